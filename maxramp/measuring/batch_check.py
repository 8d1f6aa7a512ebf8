"""Checks a run's batches against published laws and its own noise scale.

Laws of the batch size give the tokens of a step (rows x max_target_length) by the tokens that a run
has trained on by then, D. docs/noise.md compares them.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from maxramp.commandline import short, show_keys
from maxramp.config.keys import Config
from maxramp.config.load import unset_batch
from maxramp.errors import ConfigError
from maxramp.files.place import Place
from maxramp.measuring.noise import Block, noise_blocks, run_records
from maxramp.objectives.text import TEXT
from maxramp.rampup.keys import Meshes
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate

# A batch is far above the laws at this many times their largest; DeepSeek-V4's ramp comes to 3.4.
_FAR = 4.0
# It is at half of that where it is this many times the noise scale, as batches that cost nothing
# are above it, too (arXiv 2505.23971).
_FAR_AS_MEASURED, _ABOVE_NOISE = 2.0, 10.0
_LEAST_TOKENS = 10**9  # of a run: the laws were measured on longer ones
_EARLY = 0.01  # of a run, in which a batch costs little, however large it is
_BATCH_KEYS = ("global_batch_size", "global_batch_tokens", "gradient_accumulation_steps")

Batches = Sequence[tuple[int, float]]  # (sample from which on, rows) of each


class Law(NamedTuple):
    """coefficient * D**exponent, in tokens."""

    coefficient: float
    exponent: float

    def batch(self, tokens: float) -> float:
        return self.coefficient * tokens**self.exponent

    def tokens(self, batch: float) -> float:
        return (batch / self.coefficient) ** (1 / self.exponent)


# Bergsma et al., arXiv 2505.13738, figure 1, in sequences of 2,048: AdamW, 111M to 3.3B weights. At
# the critical batch a run takes twice the tokens of small batches, at n times it 1 + n times.
BEST = Law(2048 * 0.0306, 0.383)
CRITICAL = Law(2048 * 0.0471, 0.462)
# Islamov et al., arXiv 2603.21191: D^(2/3), from 256 rows of 1,024 at 1.3B tokens (table 1): Scion,
# which is close to Muon.
SCION = Law(2**18 / 1.3e9 ** (2 / 3), 2 / 3)


def largest_batch(tokens: float) -> float:
    """Returns the batch of the most generous law, in tokens, for `tokens` trained on."""
    return max(CRITICAL.batch(tokens), SCION.batch(tokens))


def tokens_of_largest(batch: float) -> float:
    """Returns the tokens of a run from which on `largest_batch` is at least `batch`."""
    return min(CRITICAL.tokens(batch), SCION.tokens(batch))


class _StageBatch(NamedTuple):
    """A stage's batch, and where the stage lies in the run."""

    index: int
    first_sample: int
    last_sample: int
    batch: int  # tokens
    tokens: int  # that the run has trained on at the stage's end

    @property
    def excess(self) -> float:
        """The batch over the largest by the laws. These are of runs with one batch throughout, so
        a stage counts as the end of such a run."""
        return self.batch / largest_batch(self.tokens)

    def largest_noise(self, curve: Sequence[Block]) -> float:
        """Returns the upper end of the noise scale over the stage, in rows; infinity if that is not
        known."""
        ends = [
            block.rows[2]
            for block in curve
            if block.first_sample < self.last_sample and block.last_sample > self.first_sample
        ]
        return math.inf if not ends or None in ends else max(ends)


def check_batches(
    config: Config, meshes: Meshes, run: Place | None, consumed: int = 0
) -> list[str]:
    """Returns a line if a batch is far too large, with a ramp in its place; else [].

    Args:
      config: resolved.
      meshes: of its jobs (`meshes_of`), for the ramp.
      run: the folder of a run that may have measured its noise scale; None for none.
      consumed: samples that are trained.
    """
    if _is_outside(config):
        return []
    ramp = RampupBatchManager(config.batch, meshes=meshes)
    stages = [stage for stage in _late_stages(ramp) if stage.last_sample > consumed]
    stages.sort(key=lambda stage: -stage.excess)
    above, noise = [stage for stage in stages if stage.excess > _FAR], ""
    if not above:
        curve = []
        if run and (run / "metrics.jsonl").is_file():
            curve = noise_blocks(run_records(run), "norms_", 12)
        row = ramp.keys.max_target_length
        noises = {stage: stage.largest_noise(curve) * row for stage in stages}
        above = [
            stage
            for stage in stages
            if stage.excess > _FAR_AS_MEASURED and stage.batch > _ABOVE_NOISE * noises[stage]
        ]
        noise = "".join(f" (noise scale at most {short(noises[stage])})" for stage in above[:1])
    if not above:
        return []
    worst = above[0]
    best, most = BEST.batch(worst.tokens), largest_batch(worst.tokens)
    return [
        f"stage {worst.index} has batches of {short(worst.batch)} tokens{noise} up to "
        f"{short(worst.tokens)} tokens of the run, where laws find {short(best)} best and more "
        f"than {short(most)} wasteful: such a run takes about {1 + worst.excess:.2g} times the "
        f"tokens of small batches (docs/noise.md); {_remedy(config, meshes, ramp)}"
    ]


def _is_outside(config: Config) -> bool:
    """Returns whether the laws do not cover such a run: they are of text and of new weights."""
    checkpoints, model = config.checkpoints, config.model
    has_weights = checkpoints.load_parameters_path or checkpoints.load_full_state_path
    is_tuning = config.objective is not TEXT or model.lora_rank
    return bool(has_weights or is_tuning or config.batch.rampup_policy == "noise")


def _late_stages(ramp: RampupBatchManager) -> list[_StageBatch]:
    """Returns a run's stages without those that end early in it; none of a short run."""
    stages, run_tokens = [], ramp.tokens(ramp.total_samples)
    for stage in ramp.stages_between(0, ramp.total_steps):
        first, size = stage.first_sample, stage.global_batch_size
        last = first + ramp.steps_in_run(stage) * size
        batch, tokens = size * stage.spec.tokens, ramp.tokens(last)
        if run_tokens >= _LEAST_TOKENS and tokens > _EARLY * run_tokens:
            stages.append(_StageBatch(stage.index, first, last, batch, tokens))
    return stages


def _remedy(config: Config, meshes: Meshes, ramp: RampupBatchManager) -> str:
    """Returns keys to paste for a resolved config, of a ramp on as many tokens that is not above
    the laws. Its batches are powers of 2 times the fewest rows that divide over the devices, never
    larger than the run's own, each from where the laws find it small enough."""
    rebatching, phases = Rebatching(config, config, ramp), config.batch.phase_list
    fewest_rows = math.lcm(*(phase.keys.ranks * phase.keys.rows_multiple for phase in phases))
    row, total = ramp.keys.max_target_length, ramp.total_samples
    early = int(_EARLY * total)

    def begin(size: int) -> int:
        return math.ceil(tokens_of_largest(size * row) / row)

    def largest(sample: int) -> int:
        """Returns the largest batch that the laws and the run's own batch there allow."""
        most, size = ramp.stage_at_sample(sample).global_batch_size, fewest_rows
        while 2 * size <= most and begin(2 * size) <= max(sample, early):
            size *= 2
        return size

    # A batch may change where the run's own does, and where the laws allow the next size.
    samples, size = {s.first_sample for s in ramp.stages_between(0, ramp.total_steps)}, fewest_rows
    while begin(size) < total:
        samples.add(begin(size))
        size *= 2
    batches = [(0, largest(0))]
    for sample in sorted(samples):
        if largest(sample) != batches[-1][1]:
            batches.append((sample, largest(sample)))
    with contextlib.suppress(ConfigError):
        replaced = config.replace(**rebatching.keys(ramp_keys(batches)))
        remedy = RampupBatchManager(replaced.batch, meshes=meshes)
        remedy.check(remedy.stages)
        if all(stage.excess <= _FAR_AS_MEASURED for stage in _late_stages(remedy)):
            return f"as many tokens in smaller batches: {show_keys(rebatching.rated_keys(batches))}"
    return "the devices divide no batch among them that is small enough; use fewer, or train longer"


def ramp_keys(batches: Batches) -> dict[str, Any]:
    """Returns the keys that give these batches, the first from sample 0 on."""
    if len(batches) == 1:
        return {"global_batch_size": batches[0][1]}
    return {
        "step_batch_size_schedule": " ".join(f"{sample}:{size}" for sample, size in batches),
        "step_batch_size_unit": "samples",
    }


class Rebatching:
    """Gives a run other batches on as many samples."""

    def __init__(self, config: Config, resolved: Config, ramp: RampupBatchManager):
        """Takes a config as loaded, the same `resolved` on its devices, and the ramp of that."""
        self.config, self._rate, self._ramp = config, resolved.learning_rate, ramp
        self.total_samples = ramp.total_samples

    def keys(self, own: dict[str, Any], rates: dict[str, float] | None = None) -> dict[str, Any]:
        """Returns the keys that give the run the batches of `own` keys, in place of the config's.

        They unset what gives batches or length now, and keep the other keys of phases, except for
        the learning rates of the phases in `rates`.
        """
        phases = {}
        for name, phase in self.config.batch.phases.items():
            if rest := {key: x for key, x in phase.items() if key not in _BATCH_KEYS}:
                rate = {"learning_rate": rates[name]} if rates and name in rates else {}
                phases[name] = rest | rate
        own = own | {"total_samples": self.total_samples}
        keys, before = unset_batch() | {"phases": phases} | own, self.config.values
        return {name: x for name, x in keys.items() if name in own or before[name] != x}

    def rated_keys(self, batches: Batches) -> dict[str, Any]:
        """Returns `keys` of these batches, with the learning rates for the first of them."""
        first, rate = batches[0][1], self._rate.learning_rate
        keys = self.keys(ramp_keys(batches), self.phase_rates(first) if rate else {})
        if len(batches) > 1:
            keys |= {"batch_size_lr_scaling": "sqrt", "batch_size_lr_reference": "initial"}
        if rate and not math.isclose(own := self.rate(rate, 0, first), rate, rel_tol=5e-3):
            keys["learning_rate"] = own
        return keys

    def phase_rates(self, first: int) -> dict[str, float]:
        """Returns the learning rates of phases for a first batch of `first`, where they change."""
        rates = {}
        for phase in self.config.batch.changing("learning_rate"):
            configured = phase.changes["learning_rate"]
            rate = self.rate(configured, phase.first_sample, first)
            if phase.first_sample and not math.isclose(rate, configured, rel_tol=5e-3):
                rates[phase.name] = rate
        return rates

    def rate(self, configured: float, sample: int, batch: int) -> float:
        """Returns the learning rate for `batch` samples in place of the batch at `sample`, by the
        square-root rule (`LearningRate`); not with learning_rate=none."""
        before = self._ramp.stage_at_sample(sample).global_batch_size
        scaled = configured * LearningRate.from_keys(self._rate, self._ramp).pace(before).rate
        return float(f"{scaled * (batch / before) ** 0.5:.3g}")
