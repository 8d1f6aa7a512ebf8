"""Checks a run's batches against published laws (`measuring/laws.py`) and its own noise scale."""

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

from maxramp.commandline import short, show_keys
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.files.place import Place
from maxramp.measuring import laws
from maxramp.measuring.noise import Block, noise_blocks, run_records
from maxramp.measuring.rebatching import Batches, Rebatching, ramp_keys
from maxramp.objectives.text import TEXT
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.rampup.shape import Meshes

# A batch is far above the laws at this many times their largest; DeepSeek-V4's ramp comes to 3.4.
_FAR = 4.0
# It is at half of that where it is this many times the noise scale, as batches that cost nothing
# are above it, too (arXiv 2505.23971).
_FAR_AS_MEASURED, _ABOVE_NOISE = 2.0, 10.0
_LEAST_TOKENS = 10**9  # of a run: the laws were measured on longer ones
_EARLY = 0.01  # of a run, in which a batch costs little, however large it is


class _Steps(NamedTuple):
    """Of a stage."""

    index: int
    first: int  # samples before them
    last: int  # and after
    batch: int  # tokens
    tokens: int  # that the run has trained on after them

    @property
    def excess(self) -> float:
        """The batch over the largest by the laws. These are of runs with one batch throughout, so
        the D of the steps is that of a run which ends with them."""
        return self.batch / laws.largest_batch(self.tokens)

    def largest_noise(self, curve: Sequence[Block]) -> float:
        """The upper end of the noise scale over the steps, in rows; infinity if it is not known."""
        ends = [
            b.rows[2] for b in curve if b.first_sample < self.last and b.last_sample > self.first
        ]
        return math.inf if not ends or None in ends else max(ends)


def check_batches(config: Config, meshes: Meshes, run: Place, consumed: int = 0) -> list[str]:
    """A line if a batch is far too large, with a ramp in its place. `config` is resolved, `run` may
    have measured its noise scale, `consumed` samples are trained."""
    if _is_outside(config):
        return []
    ramp = RampupBatchManager(config.batch, meshes=meshes)
    left = sorted(_late_steps(ramp), key=lambda steps: -steps.excess)
    left = [steps for steps in left if steps.last > consumed]
    above, noise = [steps for steps in left if steps.excess > _FAR], ""
    if not above and (above := [steps for steps in left if steps.excess > _FAR_AS_MEASURED]):
        there, row = (run / "metrics.jsonl").is_file(), ramp.keys.max_target_length
        curve = noise_blocks(run_records(run), "norms_", 12) if there else []
        ends = {steps: steps.largest_noise(curve) * row for steps in above}
        above = [steps for steps in above if steps.batch > _ABOVE_NOISE * ends[steps]]
        noise = "".join(f" (noise scale at most {short(ends[steps])})" for steps in above[:1])
    if not above:
        return []
    worst = above[0]
    best, most = laws.BEST.batch(worst.tokens), laws.largest_batch(worst.tokens)
    return [
        f"stage {worst.index} has batches of {short(worst.batch)} tokens{noise} up to "
        f"{short(worst.tokens)} tokens of the run, where laws find {short(best)} best and more "
        f"than {short(most)} wasteful: such a run takes about {1 + worst.excess:.2g} times the "
        f"tokens of small batches (docs/noise.md); {_remedy(config, meshes, ramp)}"
    ]


def _is_outside(config: Config) -> bool:
    """Whether the laws say nothing of such a run: they are of training on text from new weights."""
    begun = config.checkpoints
    return bool(
        (begun.load_parameters_path or begun.load_full_state_path)
        or (config.objective is not TEXT or config.model.lora_rank)
        or config.batch.rampup_policy == "noise"
    )


def _late_steps(ramp: RampupBatchManager) -> list[_Steps]:
    """The steps of a run's stages but those that end early in it; none of a short run."""
    found, of_run = [], ramp.tokens(ramp.total_samples)
    for stage in ramp.stages_between(0, ramp.total_steps):
        first, size = stage.first_sample, stage.global_batch_size
        last = first + ramp.run_steps(stage) * size
        found.append(_Steps(stage.index, first, last, size * stage.spec.tokens, ramp.tokens(last)))
    return [s for s in found if of_run >= _LEAST_TOKENS and s.tokens > _EARLY * of_run]


def _remedy(config: Config, meshes: Meshes, ramp: RampupBatchManager) -> str:
    """Keys to paste, of a ramp on as many tokens that is not above the laws: halvings of the run's
    batches, or powers of 2 times the fewest rows that divide over the devices, each from where the
    laws find it small enough."""
    rebatching, phases = Rebatching(config, config, ramp), config.batch.phase_list
    fewest_rows = math.lcm(*(phase.keys.ranks * phase.keys.rows_multiple for phase in phases))

    def excess(batches: Batches) -> float:
        with contextlib.suppress(ConfigError):
            keys = rebatching.keys(ramp_keys(batches))
            found = RampupBatchManager(config.replace(**keys).batch, meshes=meshes)
            found.check(found.stages)
            return max(steps.excess for steps in _late_steps(found))
        return math.inf

    def begin(size: int) -> int:
        row = ramp.keys.max_target_length
        return math.ceil(laws.tokens_of_largest(size * row) / row)

    def smaller(size: int) -> int | None:
        """At most half of a batch."""
        most = size // 2
        sizes = [most] * (size % 2 == 0)
        if most >= fewest_rows:
            sizes.append(fewest_rows << (most // fewest_rows).bit_length() - 1)
        return next((n for n in sizes if excess([(0, n)]) < math.inf), None)

    own = {s.first_sample: s.global_batch_size for s in ramp.stages_between(0, ramp.total_steps)}
    early, sizes, batches = _EARLY * ramp.total_samples, sorted({*own.values()}), []
    while begin(sizes[-1]) > early and (size := smaller(sizes[-1])):
        sizes.append(size)
    for place in sorted({0, *own, *map(begin, sizes)}):
        most = ramp.stage_at_sample(place).global_batch_size
        fits = (n for n in sizes if n <= most and begin(n) <= place)
        size = max(fits, default=min(sizes))
        if place < ramp.total_samples and (not batches or batches[-1][1] != size):
            batches.append((place, size))
    if excess(batches) <= _FAR_AS_MEASURED:
        return f"as many tokens in smaller batches: {show_keys(rebatching.rated_keys(batches))}"
    return "the devices divide no batch among them that is small enough; use fewer, or train longer"
