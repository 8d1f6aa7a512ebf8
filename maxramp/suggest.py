"""Suggests a ramp for a run, or none, from what was measured on another.

python -m maxramp.suggest CONFIG.yml [key=value ...] [--noise RUN] [--branch RUN] [--json]
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import json
import pathlib
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax

from maxramp.commandline import print_table, short, take_flag, take_value
from maxramp.config import alternatives
from maxramp.config.keys import Config
from maxramp.config.load import load
from maxramp.config.resolve import mesh_checker, resolve_planned
from maxramp.errors import ConfigError, report
from maxramp.folders.place import Place, home_of
from maxramp.keys import base
from maxramp.keys.base import CONFIGS
from maxramp.keys.yamlfile import read_yaml
from maxramp.model.keys import SHAPE_KEYS
from maxramp.planning.cost import PassCost
from maxramp.rampup import ladder
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.metrics import read_records
from maxramp.run.noise import KINDS, Block, blocks_of
from maxramp.run.suggestion import Measurement, from_branches, from_noise, ramp_of

USAGE = """
  --noise RUN    a run that was trained with log_gradient_noise_scale=true: the shape of the ramp
  --branch RUN   a run that maxramp.branch has measured: its height
  --json         print everything as JSON
"""

_LEAST_SAVING = 0.05  # of a constant batch's steps: a ramp that saves less is not worth its trouble
_BLOCKS = 12, 3, 1  # shares of a run in which its noise scale is read: fewer where it is short
# What makes a run that was measured another one than the run that is planned.
_SAME = (
    *SHAPE_KEYS,
    "max_target_length",
    "dataset_type",
    "text_files",
    "grain_train_files",
    "learning_rate",
    "opt_type",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        as_json = take_flag(arguments, "--json")
        noise, branch = (take_value(arguments, flag) for flag in ("--noise", "--branch"))
        found = suggest(load(arguments, "suggest", USAGE), noise, branch)
    except (ConfigError, OSError) as error:
        return report(error)
    print(json.dumps(found, indent=2)) if as_json else print_suggestion(found)
    return 0


def suggest(config: Config, noise: str | None, branch: str | None) -> dict[str, Any]:
    """What speaks for which ramp.

    Args:
      config: loaded; of the run that is planned.
      noise: the folder of a run with a noise scale.
      branch: the folder of a run with branches, or of one of their results.

    Returns:
      `batches`, [sample, batch] of the suggested ramp, of one entry where no ramp is suggested and
      None where nothing was measured; `keys`, as key=value; `evidence` and `limits`, lines; `rows`,
      what is compared.

    Raises:
      ConfigError: the config makes no run, or what is named holds no measurement.
    """
    if config.batch.devices_per_node == -1:
        config = config.replace(devices_per_node=jax.local_device_count())
    config = config.replace(num_nodes=config.batch.nodes)
    planned = _Runs(config)
    evidence, limits = [], []
    results = _branches(branch, config, evidence, limits) if branch else []
    measured = from_branches(results) if results else []
    if noise:
        measured = _of_noise(home_of(noise), results, config, evidence, limits)
    batches, keys = None, {}
    if measured:
        batches = planned.fitting(measured, results, bool(noise), limits)
        keys = _keys(batches, planned.total_samples)
    rows = planned.compared(batches)
    if batches and len(batches) > 1:
        saved = 1 - rows[0]["steps"] / rows[1]["steps"]
        if saved < _LEAST_SAVING:
            limits.append(
                f"the ramp {_shown(batches)} would save {saved:.1%} of the steps of a constant "
                f"batch of {batches[0][1]}, less than {_LEAST_SAVING:.0%}"
            )
            batches = batches[:1]
            keys, rows = _keys(batches, planned.total_samples), planned.compared(batches)
    if keys:  # so that they can follow what this command line gives in another notation
        others, defaults = alternatives.none_chosen(), base.base()
        given = [k for k in alternatives.of_one_notation() if config.values[k] != defaults[k]]
        keys |= {k: others[k] for k in given if k not in keys}
    return {"batches": batches, "keys": keys, "evidence": evidence, "limits": limits, "rows": rows}


def print_suggestion(found: dict[str, Any]) -> None:
    """The suggestion as a table and a few lines."""
    batches = found["batches"]
    reference = found["rows"][0]
    rows = []
    for row in found["rows"]:
        cells = [row["name"]]
        if row["steps"] is None:
            rows.append([*cells, "-", "-", "-", "cannot run, see below"])
            continue
        cells += [
            f"{row['steps']:,}",
            f"{row['steps'] / reference['steps']:.2f}x",
            f"{row['node_time'] / reference['node_time']:.2f}x",
            row["batches"],
        ]
        rows.append(cells)
    print_table(["", "steps", "steps,\nrelative", "node-time,\nrelative", "batches"], rows)
    for line in found["evidence"]:
        print(f"measured  {line}")
    for line in found["limits"]:
        print(f"limit     {line}")
    for row in found["rows"]:
        if row["steps"] is None:
            print(f"limit     {row['name']} cannot run: {row['why']}")
    if batches is None:
        print(
            "suggested nothing: no measurement is given. Train with log_gradient_noise_scale=true "
            "and give --noise RUN, or run maxramp.branch and give --branch RUN"
        )
        return
    if len(batches) == 1:
        print(
            f"suggested no ramp: a constant batch of {batches[0][1]} does as well, as far as was "
            "measured"
        )
    else:
        print("suggested a ramp; its learning rate is that of its first batch, at the peak")
    print(" ".join(f'{k}="{v}"' if " " in str(v) else f"{k}={v}" for k, v in found["keys"].items()))


class _Runs:
    """The run that is planned, with other batches."""

    def __init__(self, config: Config):
        self._config, self._usable = config, mesh_checker(config)
        self._row = config.batch.max_target_length
        devices = config.batch.num_devices
        target = resolve_planned(config, devices)
        ramp = RampupBatchManager(target.batch, devices)
        self.total_samples = ramp.total_samples
        self._first = ramp.stages[0].global_batch_size

    def fitting(
        self,
        measured: Sequence[Measurement],
        results: Sequence[dict[str, Any]],
        by_noise: bool,
        limits: list[str],
    ) -> list[tuple[int, int]]:
        """(sample from which on, batch) by what was measured, of sizes that this run may take."""
        sizes = {self._first * 2**n for n in range(31)}
        sizes |= {self._first // 2**n for n in range(31) if self._first % 2**n == 0}
        if results:
            tried = [s["rows"] * r["row_tokens"] for r in results for s in r["sizes"]]
            # Without a noise scale nothing speaks for a smaller batch than the smallest that was
            # tried, and never does anything for one above the largest.
            least = 0 if by_noise else min(tried)
            sizes = {size for size in sizes if least <= size * self._row <= max(tried)}
            sizes |= {t // self._row for t in tried if t % self._row == 0}
            if not sizes:
                raise ConfigError(
                    f"max_target_length={self._row}: no batch of such rows is as large as those "
                    "that were tried; measure branches of a run with rows of this length"
                )
            # By place, the least of several windows there.
            tops = {r["first_sample"]: r["largest"] * r["row_tokens"] for r in results}
            for r in results:
                start = r["first_sample"]
                tops[start] = min(tops[start], r["largest"] * r["row_tokens"])
            if (last := tops[max(tops)]) == max(tried):
                limits.append(
                    f"no batch above {short(max(tried))} tokens was tried, and the largest cost "
                    "nothing: larger ones may do as well"
                )
            elif last < max(tops.values()) and not by_noise:
                limits.append(
                    f"a batch of {short(max(tops.values()))} tokens cost nothing at an early "
                    f"place, but more than {short(last)} cost something at the last; as a batch is "
                    "never given back, it stays at what later places allow"
                )
        if (lowest := measured[0].batch) < min(sizes) * self._row:
            limits.append(
                f"at the start {short(lowest)} tokens surely cost nothing, and the smallest batch "
                f"that this run may take has {short(min(sizes) * self._row)}"
            )
        found = ramp_of(measured, sorted(size * self._row for size in sizes))
        batches = [(round(tokens) // self._row, batch // self._row) for tokens, batch in found]
        end, total = max(one.last for one in measured), self.total_samples * self._row
        if end < 0.999 * total:
            limits.append(
                f"nothing was measured beyond {short(end)} of this run's {short(total)} tokens: "
                "the batch stays as it is there"
            )
        if (start := measured[0].first) > 0.02 * total:
            limits.append(
                f"nothing was measured before {short(start)} tokens: the batch begins at the "
                "smallest"
            )
        rate, first = self._config.schedule.learning_rate, batches[0][1]
        if rate and first != self._first:
            limits.append(
                f"learning_rate={rate:g} is that of a first batch of {self._first}; for {first} "
                f"use {rate * (first / self._first) ** 0.5:.3g}, or tune it"
            )
        return [pair for pair in batches if pair[0] < self.total_samples]

    def compared(self, batches: list[tuple[int, int]] | None) -> list[dict[str, Any]]:
        """The suggestion, constants, Seesaw and the published ramps on this run's samples.

        Without a suggestion the run as it is configured comes first.
        """
        total = {"total_samples": self.total_samples}
        if batches:
            ramp = self._with(_schedule(batches) | total)
            rows = [self._row_of("suggested", ramp, _shown(batches), must_run=True)]
            sizes = [size for _, size in batches]
        else:
            rows = [self._row_of("as configured", self._config, must_run=True)]
            sizes = rows[0]["sizes"] or [self._first]
        least, most = min(sizes), max(sizes)
        most = most if most > least else 4 * least
        for size in dict.fromkeys((least, most)):
            constant = self._with({"global_batch_size": size} | total)
            rows.append(self._row_of(f"constant {size}", constant, f"{size}"))
        ladder = [least]
        while 2 * ladder[-1] <= most:
            ladder.append(2 * ladder[-1])
        seesaw = {"rampup_policy": "seesaw", "rampup_ladder": ladder} | total
        rows.append(self._row_of("Seesaw", self._with(seesaw)))
        for path in sorted((CONFIGS / "schedules").glob("*.yml")):
            shape = _published(path, least, most, self.total_samples)
            ramp = self._with(_schedule(shape) | total)
            rows.append(self._row_of(f"like {path.stem}", ramp, _shown(shape)))
        return rows

    def _with(self, keys: dict[str, Any]) -> Config:
        """The run with other batches and another length."""
        return self._config.replace(**(alternatives.none_chosen() | keys))

    def _row_of(
        self, name: str, config: Config, batches: str = "", must_run: bool = False
    ) -> dict[str, Any]:
        """Steps and node-time of such a run; neither where it cannot run."""
        try:
            target = resolve_planned(config, config.batch.num_devices)
            cost = PassCost(target.batch, target.planning, target.model)
            ramp = RampupBatchManager(
                target.batch,
                decided=ladder.expected(target.batch),
                usable=self._usable,
                restart_passes=cost.restart,
            )
            stages = ramp.stages_between(0, ramp.total_steps)
            ramp.check(stages)
        except ConfigError as error:
            if must_run:
                raise
            return {"name": name, "steps": None, "sizes": [], "why": str(error)}
        node_time = sum(
            ramp.run_steps(s)
            * s.gradient_accumulation_steps
            * cost.of(float(s.per_device_batch_size))
            * s.nodes
            for s in stages
        )
        pairs = [(s.first_sample, s.global_batch_size) for s in stages]
        return {
            "name": name,
            "steps": ramp.total_steps,
            "node_time": node_time,
            "batches": batches or _shown(pairs),
            "sizes": [size for _, size in pairs],
        }


def _keys(batches: Sequence[tuple[int, int]], total_samples: int) -> dict[str, Any]:
    """A suggestion as keys."""
    total = {"total_samples": total_samples}
    if len(batches) == 1:
        return {"global_batch_size": batches[0][1]} | total
    scaling = {"batch_size_lr_scaling": "sqrt", "batch_size_lr_reference": "initial"}
    return _schedule(batches) | total | scaling


def _schedule(batches: Sequence[tuple[int, int]]) -> dict[str, Any]:
    if len(batches) == 1:
        return {"global_batch_size": batches[0][1]}
    text = " ".join(f"{sample}:{size}" for sample, size in batches)
    return {"step_batch_size_schedule": text, "step_batch_size_unit": "samples"}


def _shown(batches: Sequence[tuple[int, int]]) -> str:
    parts = [f"{short(sample)}:{size}" for sample, size in batches]
    return " ".join(parts if len(parts) <= 6 else [*parts[:3], "...", parts[-1]])


def _published(path: pathlib.Path, least: int, most: int, total: int) -> list[tuple[int, int]]:
    """A published ramp's shape from `least` to `most` rows over so many samples.

    Its places in the run are kept, and each size's place between the first and the last.
    """
    ramp = RampupBatchManager(load([str(path)]).batch, 1)
    stages = ramp.stages_between(0, ramp.total_steps)
    sizes = [stage.global_batch_size for stage in stages]
    low, high = min(sizes), max(sizes)
    found: list[tuple[int, int]] = []
    for stage in stages:
        place = Fraction(stage.first_sample * total, ramp.total_samples)
        share = Fraction(stage.global_batch_size - low, max(1, high - low))
        size = least * round(1 + share * Fraction(most - least, least))
        if not found or (size > found[-1][1] and int(place) > found[-1][0]):
            found.append((int(place), size))
    return found


def _branches(
    given: str, config: Config, evidence: list[str], limits: list[str]
) -> list[dict[str, Any]]:
    """The results of maxramp.branch below a folder.

    Raises:
      ConfigError: there are none.
    """
    path = home_of(given)
    files = [path] if path.is_file() else sorted(path.glob("branches/*/branch.json"))
    texts = [file.read_bytes() for file in files or path.glob("branch.json")]
    try:
        results = [json.loads(text) for text in texts]
        results.sort(key=lambda r: (r["step"], r["samples"]))
        places = {(r["step"], r["samples"]): r for r in results}
        for r in places.values():
            _use(r)
            ends = "no interval" if r["surely"] is None else f"{r['surely']} to {r['possibly']}"
            evidence.append(
                f"branches at {short(r['first_sample'] * r['row_tokens'])} tokens: batch "
                f"{r['largest']} of {', '.join(str(s['rows']) for s in r['sizes'])} is the largest "
                f"within {r['tolerance']:g} nats ({ends}; rows of {r['row_tokens']} tokens)"
            )
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError):
        raise ConfigError(f"--branch {given}: not what maxramp.branch wrote") from None
    if not results:
        raise ConfigError(
            f"--branch {given}: holds no branches; measure them: python -m maxramp.branch {given} "
            "--at STEP --sizes 8,16,32"
        )
    _compare_runs(home_of(results[0]["run"]), config, limits)
    return list(places.values())


def _use(result: dict[str, Any]) -> None:
    """Takes from a result of maxramp.branch all that is taken later: what lacks is noticed here."""
    numbers = [
        result[name] for name in ("step", "first_sample", "samples", "row_tokens", "largest")
    ]
    numbers += [size["rows"] for size in result["sizes"]]
    if result["surely"] is not None:
        numbers += [result["surely"], result["possibly"]]
    if not result["sizes"] or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError
    if min(result["row_tokens"], result["largest"], *(s["rows"] for s in result["sizes"])) < 1:
        raise ValueError
    from_branches([result])
    for kind in KINDS:
        _factor(kind, [result])
    home_of(result["run"])


def _of_noise(
    run: Place,
    results: Sequence[dict[str, Any]],
    config: Config,
    evidence: list[str],
    limits: list[str],
) -> list[Measurement]:
    """What a run's noise scale allows, at the height that branches found.

    Raises:
      ConfigError: it is no run, or one without estimates.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"--noise {run}: holds no metrics.jsonl; give the folder of a run")
    records = read_records(path)
    curves = {kind: [] for kind in KINDS}
    for shares in _BLOCKS:
        curves = {kind: curves[kind] or blocks_of(records, kind, shares) for kind in KINDS}
    factors = {kind: _factor(kind, results) for kind in KINDS}
    # The norms' first: it has no gaps.
    kinds = [kind for kind in ("norms_", "", "adam_") if curves[kind]]
    kinds.sort(key=lambda kind: factors[kind] is None)
    if not kinds:
        raise ConfigError(
            f"--noise {run}: holds no noise scale of 8 steps or more; train with "
            "log_gradient_noise_scale=true"
        )
    kind = kinds[0]
    curve, factor = curves[kind], factors[kind]
    evidence.append(
        f"noise scale of {run} ({KINDS[kind]}): {_scale(curve[0])} at the start, "
        f"{_scale(curve[-1])} after {short(curve[-1].last_sample)} samples"
    )
    if factor is None:
        limits.append(
            "no branch says how far above the noise scale the batch may go; it is kept at the "
            "noise scale's lower end, which is usually too careful"
        )
    else:
        evidence.append(f"the batch may be {factor:.3g} times the noise scale, by the branches")
    _compare_runs(run, config, limits)
    return from_noise(curve, factor or 1.0)


def _factor(kind: str, results: Sequence[dict[str, Any]]) -> float | None:
    """What surely costs nothing over the noise scale there, the least of all branches."""
    found = [
        (r["surely"] or r["largest"]) / r["noise"][f"{kind}noise_scale"]["noise_scale"]
        for r in results
        if f"{kind}noise_scale" in r["noise"]
    ]
    return min(found, default=None)


def _scale(block: Block) -> str:
    rows = block.batch_rows / block.batch_tokens
    high = "no end" if block.high is None else f"{block.high * rows:.3g}"
    return f"{block.low * rows:.3g} to {high} rows"


def _compare_runs(run: Place, config: Config, limits: list[str]) -> None:
    """Says where the run that was measured is another one than the run that is planned."""
    try:
        there = read_yaml(run / "config.yml")
    except (ConfigError, OSError):
        limits.append(f"{run} holds no config.yml: whether it was a run like this is not known")
        return
    differ = [
        f"{name}={there[name]} (here {config.values[name]})"
        for name in _SAME
        if name in there and there[name] != config.values[name]
    ]
    if differ and (line := f"measured on another run: {', '.join(differ)}") not in limits:
        limits.append(line)


if __name__ == "__main__":
    sys.exit(main())
