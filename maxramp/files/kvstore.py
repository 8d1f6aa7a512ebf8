"""TensorStore's view of an object storage: reads that name a generation, writes that expect one."""

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

from maxramp.files.place import ObjectPath

TIMEOUT = 60.0  # seconds that an answer may take


def spec_of(folder: ObjectPath) -> dict[str, Any]:
    """What TensorStore calls a folder; the environment says the same to it as to other clients."""
    spec: dict[str, Any] = {"bucket": folder.bucket, "path": f"{folder.key}/"}
    if folder.scheme == "gs":
        return {"driver": os.environ.get("TENSORSTORE_GCS_BACKEND", "gcs")} | spec
    for key, names in (
        ("endpoint", ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
        ("aws_region", ("AWS_REGION", "AWS_DEFAULT_REGION")),
    ):
        if given := [os.environ[name] for name in names if os.environ.get(name)]:
            spec[key] = given[0]
    if os.environ.get("AWS_ACCESS_KEY_ID"):  # else it looks for files first, and complains
        spec["aws_credentials"] = {"type": "environment"}
    return {"driver": "s3"} | spec


def open_store(folder: ObjectPath) -> Any:
    """A `tensorstore.KvStore` of the objects below a folder.

    Raises:
      OSError: there is none.
    """
    import tensorstore  # takes a while

    with storing(folder):
        return tensorstore.KvStore.open(spec_of(folder)).result(timeout=TIMEOUT)


@contextlib.contextmanager
def storing(path: ObjectPath) -> Iterator[None]:
    """Turns what TensorStore raises into an OSError that names an address."""
    try:
        yield
    except TimeoutError:
        raise OSError(errno.ETIMEDOUT, f"no answer within {TIMEOUT:g} s", str(path)) from None
    except Exception as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise OSError(errno.EIO, text, str(path)) from None
