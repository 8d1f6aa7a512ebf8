"""Files of models on Hugging Face's hub: from the local cache, or else fetched into it."""

import functools
import os
import re

from maxramp.errors import ConfigError
from maxramp.files.storage import optional

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILE = re.compile(r".*\.(json|model|tiktoken)", re.IGNORECASE)


def is_name(path: str) -> bool:
    """Whether a path is not on this machine and has the form of a name, organization/model."""
    return bool(_NAME.fullmatch(path)) and not (_FILE.fullmatch(path) or os.path.lexists(path))


@functools.cache
def fetch(key: str, name: str, file: str, required: bool = True) -> str:
    """The local path of a file of a model; what the cache holds is not looked for on the hub.

    Args:
      key: whose value the name is, for messages.
      name: organization/model.
      file: its name in the model's folder.
      required: whether a model must have it; a missing one is "".

    Raises:
      ConfigError: neither the cache nor the hub gives it.
    """
    hub = optional("huggingface_hub", "huggingface_hub", f"{key}={name}", "hub")
    errors = optional("huggingface_hub.errors", "huggingface_hub", f"{key}={name}", "hub")
    try:
        cached = hub.try_to_load_from_cache(name, file)
        if isinstance(cached, str):
            return cached
        if cached is not None and not required:  # known not to be there
            return ""
        return hub.hf_hub_download(name, file)
    except errors.HFValidationError as error:
        why = f"no name of a model on Hugging Face ({_said(error)})"
    except errors.LocalEntryNotFoundError:
        why = "the cache of Hugging Face does not hold it, and the hub is out of reach"
    except errors.GatedRepoError:
        why = "its owner gives access to some only; ask for it, and set HF_TOKEN"
    except errors.EntryNotFoundError as error:
        if not required:
            return ""
        why = f"the model on Hugging Face has no such file ({_said(error)})"
    except Exception as error:  # of the client, of the network, of the disk
        why = f"cannot be fetched, with HF_TOKEN if the model needs it ({_said(error)})"
    raise ConfigError(
        f"{key}={name}: no such file or folder here; {file} of the model of that name: {why}; "
        f"fetch it where there is a network (hf download {name} {file}), or give a path"
    )


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:150]
