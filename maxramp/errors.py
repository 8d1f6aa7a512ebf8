"""The errors of commands: one line on stderr, and an exit status that other programs rely on."""

import re
import sys

EXIT_FAILED = 1  # the run could not go on
EXIT_CONFIG = 2  # the configuration or the command line is wrong
EXIT_STAGE_END = 75  # a stage ended under stop_at_stage_end: start again for the next one
EXIT_PREEMPTED = 76  # stopped by a signal after saving: start again
EXIT_LOST = 77  # no progress for hang_timeout_seconds, or a peer process was lost: start again

# What follows EXIT_LOST, for people and under a launch, which starts again itself.
NEXT_START = "the next start continues from the newest checkpoint, if there is one"


class ConfigError(ValueError):
    """A wrong key, file or cluster, described in one line that a person can act on.

    The line names the key or file and its value, the relation it breaks with the numbers, and the
    remedy. Programs print it as `error: LINE` and exit with status 2. Whatever reads keys, files or
    a cluster may raise it; docstrings say so only where a caller handles it.
    """


class TrainingError(RuntimeError):
    """Why a run that had started must stop, in one line. Programs exit with status 1."""


class StepError(TrainingError):
    """A step that no process of the job can take: the state before it is whole."""


class NotFiniteError(TrainingError):
    """Weights or losses that are not numbers: the state is not worth saving."""


class PeerLostError(TrainingError):
    """Another process of the job ended. Programs exit with status 77: start the job again."""


class Stopped(Exception):
    """Somebody asked for the end; every process stops at the same point of its work."""


def install(extra: str) -> str:
    return f"python -m pip install -e '.[{extra}]'"


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    if isinstance(error, MemoryError) or "std::bad_alloc" in text:
        return True
    names_memory = re.search("memory|allocat", text, re.IGNORECASE)
    return "RESOURCE_EXHAUSTED" in text and names_memory is not None


def one_line(error: Exception, most: int = 200) -> str:
    return " ".join(str(error).split())[:most] or type(error).__name__


def reason_of(error: Exception) -> str:
    """Describes an error of the system or a library in one line; if memory is out, with keys
    that need less."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = one_line(error, 300)
    if not is_out_of_memory(error):
        return text
    what = re.sub("^(RESOURCE_EXHAUSTED: )?(out of memory )?", "", text, flags=re.IGNORECASE)
    return (
        f"out of memory: {what.rstrip('.')}; use a smaller "
        "per_device_batch_size (gradient_accumulation_steps keeps the global batch), "
        "remat_policy=full, or more ici_fsdp_parallelism"
    )


def report(error: Exception) -> int:
    """Prints an error in one line on stderr; returns the exit status that goes with it. Errors
    whose text does not say what is wrong are raised: a person needs the traceback.
    """
    if isinstance(error, ConfigError | TrainingError):
        text = str(error).strip()
    # JAX's, by its name: what only reads a config does not import JAX.
    elif isinstance(error, OSError | MemoryError) or type(error).__name__ == "JaxRuntimeError":
        text = reason_of(error)
    else:
        raise error
    print(f"error: {' '.join(text.splitlines())}", file=sys.stderr)
    return exit_status(error)


def exit_status(error: BaseException) -> int:
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    return EXIT_LOST if isinstance(error, PeerLostError) else EXIT_FAILED
