"""Orbax on the addresses of object storages: S3 too, and no requests in the thread that saves.

Orbax names a TensorStore driver for gs:// and for the file system alone. What it makes of gs:// is
what S3 needs as well, with TensorStore's other driver: so three functions of Orbax that look at an
address are given to know both. The tests with servers notice when Orbax no longer asks them.
"""

import os
import re
from typing import Any

from etils.epath.gpath import PosixGPath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from maxramp.files.kvstore import spec_of
from maxramp.files.place import ObjectPath
from maxramp.keys.section import is_object_storage


class _Path(PosixGPath):
    """An address whose mark of an unfinished deletion, which Orbax looks for, is known not to be.

    It is Orbax's own way of deleting that leaves it, and maxramp deletes in another.
    """

    def exists(self) -> bool:
        """As of its class, but for the mark."""
        return self.name != "_CHECKPOINT_DELETION" and super().exists()


UNSEEN = ocp.options.FileOptions(path_class=_Path, skip_sync_file_validations=True)


def teach() -> None:
    """Makes Orbax take addresses of S3 where it takes those of Google's storage."""
    tensorstore_utils._normalize_path = _normal
    tensorstore_utils._use_gcs_driver = is_object_storage
    gcs_utils.get_kvstore_for_gcs = _store


def _normal(path: str) -> str:
    return re.sub(r"^(gs|s3):/", r"\1://", os.path.normpath(path))


_store_of_google = gcs_utils.get_kvstore_for_gcs


def _store(path: str) -> dict[str, Any]:
    if path.startswith("gs://"):
        return _store_of_google(path)
    # A name as Orbax gives it: of a folder, or what a folder's name begins with.
    return spec_of(ObjectPath.of(path)) | {"path": path.split("/", 3)[3]}
