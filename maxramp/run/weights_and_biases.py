"""Weights & Biases: the numbers of metrics.jsonl, by the package wandb, under TensorBoard's tags.

A file in a run's folder keeps its id over restarts. The service takes every step once: what a
restart trains again it leaves out, and on the same devices that is the same.
"""

import contextlib
import pathlib
import secrets
import threading
from collections.abc import Callable
from typing import Any

from maxramp.errors import ConfigError, install
from maxramp.files.storage import write_whole
from maxramp.run.metrics import Record, numbers_of, tag_of

_ID = ".wandb_id"  # the file in a run's folder
_FINISH_SECONDS = 15.0  # that an end waits for what is still to be uploaded


class WandbWriter:
    """A writer of records. Where to and how is wandb's own: WANDB_MODE, WANDB_API_KEY, ..."""

    def __init__(
        self,
        project: str,
        folder: pathlib.Path,
        config: dict[str, Any],
        warn: Callable[[str], None],
    ):
        """
        Args:
          project: the key wandb_project.
          folder: of the run, which keeps the id; wandb's own files come to lie in it.
          config: what to show of the configuration.
          warn: takes a line about what went wrong and is no reason to stop.

        Raises:
          ConfigError: the package is missing, or takes no run.
          OSError: the id cannot be written.
        """
        self._warn, self._failed = warn, False
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"wandb_project={project} needs the package wandb: {install('wandb')}; or leave "
                "it out"
            ) from None
        folder = folder.absolute()
        id_of_run = _id_of(folder)
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=id_of_run,
                resume="allow",
                dir=str(folder),
                config=config,
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # of the client or the network
            what = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"wandb_project={project}: wandb takes no run ({what}); set WANDB_API_KEY, or "
                "WANDB_MODE=offline to upload it later with wandb sync"
            ) from None

    def __call__(self, record: Record) -> None:
        """Hands the numbers of a record to wandb, which does not wait for the network."""
        numbers = {tag_of(name): value for name, value in numbers_of(record).items()}
        try:
            self._run.log(numbers, step=record["step"])
        except Exception as error:  # a service that died is no reason to end a run
            if not self._failed:
                self._failed = True
                self._warn(f"wandb takes no more numbers: {error}")

    def flush(self) -> None:
        """Does nothing: what was handed over is wandb's to keep."""

    def close(self) -> None:
        """Ends the run there; what cannot be uploaded in a while stays in the run's folder."""

        def finish() -> None:
            with contextlib.suppress(Exception):
                self._run.finish()

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        thread.join(_FINISH_SECONDS)
        if thread.is_alive():
            self._warn(f"wandb has not uploaded everything; wandb sync {self._run.dir}/.. does")


def _id_of(folder: pathlib.Path) -> str:
    """The id of the run in a folder: another run gets another, at the same path or elsewhere."""
    path = folder / _ID
    if path.exists():
        return path.read_text().strip()
    made = secrets.token_hex(8)
    write_whole(path, f"{made}\n".encode())
    return made
