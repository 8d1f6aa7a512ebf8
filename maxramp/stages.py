"""Every stage's program, compiled before it is needed.

A new batch shape is a new program. Tracing and lowering need the mesh of the main thread and take
tenths of a second; compiling takes seconds to minutes and needs neither, so it runs in one
background thread, in the order of use (the same order on every host), while earlier stages train.
"""

import concurrent.futures
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxramp.config import Config
from maxramp.errors import TrainingError
from maxramp.optimizer import LearningRate
from maxramp.rampup import Stage
from maxramp.step import BATCH_ABS, TrainState, eval_step, init_state, train_step

_THREAD = "compile"
_Work = tuple[concurrent.futures.Future, Callable[[], Any], str]


def abstract_state(config: Config, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the train state on a mesh."""

    def on_mesh(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if x.sharding else P()  # what is not sharded is on every device
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(on_mesh, jax.eval_shape(functools.partial(init_state, config)))


def end_process(status: int) -> NoReturn:
    """Ends the process, also while a program is being compiled.

    A compile cannot be interrupted, and an interpreter that shuts down under one aborts.
    """
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


class Programs:
    """The compiled train step of every stage, and the evaluation step."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        learning_rate: LearningRate,
        state: TrainState,
        stages: list[Stage],
        eval_rows: int,
    ):
        """Lowers everything now; each program is handed to the compiler as soon as it is lowered.

        Args:
          config: a resolved config.
          mesh: the mesh that is set.
          learning_rate: of consumed samples.
          state: abstract state.
          stages: the stages that will run, in order.
          eval_rows: rows of an evaluation batch; 0 = there is no evaluation.
        """
        self._mesh = mesh
        self._row_length = config.max_target_length + 1
        self._futures: dict[Any, concurrent.futures.Future] = {}
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_compile_all, args=(self._work,), name=_THREAD, daemon=True
        )
        self._thread.start()

        def add(
            key: Any, function: Callable, name: str, *arguments: Any, donate: tuple = ()
        ) -> None:
            if key not in self._futures:  # stages of one shape share a program
                lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
                self._futures[key] = concurrent.futures.Future()
                self._work.put((self._futures[key], lowered.compile, name))

        step = functools.partial(train_step, config=config, learning_rate=learning_rate)
        for i, stage in enumerate(stages):
            batch = self._batch(stage.gradient_accumulation_steps, stage.micro_batch_size)
            add(batch.shape, step, f"stage {stage.index}", state, batch, donate=(0,))
            if i == 0 and eval_rows:  # an evaluation may come before the second stage
                sums = (jax.ShapeDtypeStruct((), jnp.float32),) * 2
                evaluate = functools.partial(eval_step, config=config)
                add("eval", evaluate, "evaluation", state.model, sums, self._batch(1, eval_rows))
        self._work.put(None)

    def _batch(self, accumulation: int, rows: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self._mesh, BATCH_ABS)
        shape = (accumulation, rows, self._row_length)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    def train_step(self, stage: Stage) -> tuple[Callable, float]:
        """The compiled step of a stage, and the seconds spent waiting for it."""
        return self._get(
            (stage.gradient_accumulation_steps, stage.micro_batch_size, self._row_length)
        )

    def eval_step(self) -> tuple[Callable, float]:
        """The compiled evaluation step, and the seconds spent waiting for it."""
        return self._get("eval")

    def close(self) -> None:
        """Compiles nothing more, and gives the program in work a second to be done."""
        for future in self._futures.values():
            future.cancel()
        self._thread.join(1.0)

    def _get(self, key: Any) -> tuple[Callable, float]:
        future = self._futures[key]
        if future.done():
            return future.result(), 0.0
        start = time.perf_counter()
        return future.result(), time.perf_counter() - start


def _compile_all(work: "queue.SimpleQueue[_Work | None]") -> None:
    while item := work.get():
        future, compile_program, name = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(compile_program())
        except Exception as error:  # whatever the compiler raises is the answer to who asks
            reason = " ".join(str(error).split())[:300]
            future.set_exception(TrainingError(f"the program of {name} did not compile: {reason}"))
