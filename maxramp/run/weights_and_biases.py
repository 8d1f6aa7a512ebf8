"""Weights & Biases: the numbers of metrics.jsonl, by the package wandb, under TensorBoard's tags.

A run keeps its id over restarts. The service takes every step once: what a restart trains again it
leaves out, and on the same devices that is the same.
"""

import contextlib
import hashlib
import pathlib
import threading
from collections.abc import Callable
from typing import Any

from maxramp.errors import ConfigError
from maxramp.run.metrics import Record
from maxramp.run.tensorboard import TAGS

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
          folder: of the run; its path makes the id, and wandb's own files come to lie in it.
          config: what to show of the configuration.
          warn: takes a line about what went wrong and is no reason to stop.

        Raises:
          ConfigError: the package is missing, or takes no run.
        """
        self._warn, self._failed = warn, False
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"wandb_project={project} needs the package wandb: python -m pip install wandb "
                "(or 'maxramp[wandb]'); or leave it out"
            ) from None
        folder = folder.absolute()
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest(),
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
        numbers = {
            TAGS.get(name, name): value
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float)
        }
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
