"""Samples [lo, hi) -> one global array, read ahead of the step.

Glossary
  row r of the run   element r of the shuffled, repeated corpus: what sample r is, for every batch
                     size, host count and restart
  step k             trains on rows [samples_before(k), samples_before(k + 1)), in order; row r
                     of the step is row r % B of micro batch r // B (B = micro batch size)
  local rows         the rows of a micro batch that this process's devices hold; no other is read

Shapes: A gradient accumulation steps, B rows of a micro batch, S tokens of a row and the next one.
"""

import functools
import time
from collections.abc import Iterator

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxramp.config import Config
from maxramp.data.sources import Corpus
from maxramp.errors import ConfigError
from maxramp.loss import PADDING
from maxramp.rampup import RampupBatchManager
from maxramp.step import BATCH_ABS


class _StepBatches:
    """Element k: this process's rows of step k, int32 [A, local B, S]."""

    def __init__(self, rows: grain.MapDataset, ramp: RampupBatchManager, local_rows):
        self._rows, self._ramp, self._local_rows = rows, ramp, local_rows

    def __len__(self) -> int:
        return self._ramp.step_at_sample(len(self._rows))  # whole batches only

    def __getitem__(self, step: int) -> np.ndarray:
        stage = self._ramp.stage_at_step(step)
        first, B = self._ramp.samples_before(step), stage.micro_batch_size
        batch = [
            [self._rows[first + a * B + row] for row in self._local_rows(B)]
            for a in range(stage.gradient_accumulation_steps)
        ]
        return np.asarray(batch, np.int32)

    def __repr__(self) -> str:
        return f"_StepBatches({self._rows})"


class _EvalBatches:
    """Element n: this process's rows of evaluation batch n; past the last row there is padding."""

    def __init__(self, rows, batch_size: int, length: int, local_rows):
        self._rows, self._batch_size, self._local_rows = rows, batch_size, local_rows
        self._padding = np.full((length,), PADDING, np.int32)

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __getitem__(self, index: int) -> np.ndarray:
        first = index * self._batch_size
        rows = [first + row for row in self._local_rows(self._batch_size)]
        batch = [self._rows[i] if i < len(self._rows) else self._padding for i in rows]
        return np.asarray([batch], np.int32)

    def __repr__(self) -> str:
        return f"_EvalBatches({self._rows})"


class Loader:
    """Hands out the batch of each step, in order from `first_step`, and whole evaluations."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        ramp: RampupBatchManager,
        mesh: Mesh,
        first_step: int,
        eval_rows: int,
    ):
        """
        Args:
          config: a resolved config.
          corpus: the rows.
          ramp: which of them a step takes.
          mesh: the mesh that they are spread over.
          first_step: the step whose batch comes first.
          eval_rows: rows of an evaluation batch.

        Raises:
          ConfigError: the run needs more rows than there are.
        """
        (part,) = corpus.train
        rows = grain.MapDataset.source(part.items)
        if config.enable_data_shuffling:
            rows = rows.shuffle(seed=config.data_shuffle_seed)
        rows = rows.repeat(config.num_epoch)
        needed, there = ramp.total_samples, len(rows)
        if needed > there:
            raise ConfigError(
                f"steps={ramp.total_steps} takes {needed} rows, but the data has "
                f"{len(part.items)} x num_epoch={config.num_epoch} = {there}; use num_epoch="
                f"{-(-needed // len(part.items))}, or at most steps={ramp.step_at_sample(there)}"
            )
        self._sharding = NamedSharding(mesh, BATCH_ABS)
        self._row_length = config.max_target_length + 1
        self._local_rows = functools.cache(self._find_local_rows)
        self._prefetch = grain.ReadOptions(
            num_threads=1, prefetch_buffer_size=config.grain_prefetch_buffer_size
        )
        self._eval_rows, self._eval_steps = eval_rows, config.eval_steps
        # In random order, so that the first eval_steps batches are a fair sample of all.
        self._held_out = grain.MapDataset.source(corpus.held_out).shuffle(seed=0)
        self._batches = self._read_ahead(
            _StepBatches(rows, ramp, self._local_rows), first_step, ramp.total_steps
        )
        self._ramp, self._next_step = ramp, first_step

    def batch(self, step: int) -> tuple[jax.Array, float]:
        """The rows of `step` and the seconds waited for them; steps are asked for in order.

        Returns:
          int32 [A, B, S] sharded as BATCH_ABS, seconds.
        """
        assert step == self._next_step, f"asked for step {step}, next is {self._next_step}"
        self._next_step += 1
        start = time.perf_counter()
        local = next(self._batches)
        batch = self._global(local, self._ramp.stage_at_step(step).micro_batch_size)
        return batch, time.perf_counter() - start

    def eval_batches(self) -> Iterator[jax.Array]:
        """Batches [1, B, S] of the held-out rows: all of them once, or the first eval_steps."""
        batches = _EvalBatches(self._held_out, self._eval_rows, self._row_length, self._local_rows)
        steps = len(batches) if self._eval_steps == -1 else min(self._eval_steps, len(batches))
        for local in self._read_ahead(batches, 0, steps):
            yield self._global(local, self._eval_rows)

    def close(self) -> None:
        """Stops reading ahead."""
        self._batches.close()

    def _read_ahead(self, batches, first: int, last: int) -> Iterator[np.ndarray]:
        return iter(grain.MapDataset.source(batches)[first:last].to_iter_dataset(self._prefetch))

    def _global(self, local: np.ndarray, micro_batch_size: int) -> jax.Array:
        shape = (len(local), micro_batch_size, self._row_length)
        return jax.make_array_from_process_local_data(self._sharding, local, shape)

    def _find_local_rows(self, micro_batch_size: int) -> list[int]:
        shape = (1, micro_batch_size, self._row_length)
        indices = self._sharding.addressable_devices_indices_map(shape).values()
        return sorted({row for index in indices for row in range(micro_batch_size)[index[1]]})
