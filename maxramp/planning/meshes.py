"""Ranks the meshes that a config may have on a machine, and compiles the first of them."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from maxramp.commandline import count
from maxramp.config.keys import Config
from maxramp.config.resolve import values_on_any_mesh
from maxramp.errors import ConfigError
from maxramp.keys.numbers import plain_number
from maxramp.parallel.axes import AXES
from maxramp.parallel.keys import MeshKeys
from maxramp.parallel.mesh import format_sizes
from maxramp.planning.compile_target import CompileTarget
from maxramp.planning.compiled import run_totals
from maxramp.planning.machine import Machine
from maxramp.planning.mesh_cost import CostModel, StepEstimate
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.phases import MESH_KEYS
from maxramp.rampup.schedule import Stage
from maxramp.stage import StageSpec

_STRATEGY, _PARTS = "context_parallel_strategy", "num_pipeline_microbatches"
_PARTS_OF_STAGE = (1, 2, 4)  # that are tried: micro batches of a pipeline for each of its stages
_PASS_KEYS = ("micro_batch_size", "per_device_batch_size", "gradient_accumulation_steps")
_LEAST_GAIN = 0.01  # of a step's time, for which the first stages get a mesh of their own


class Way(NamedTuple):
    """How a stage may run: on which mesh, in which passes."""

    target: CompileTarget  # of this mesh, as if there were one slice
    stage: Stage
    spec: StageSpec
    estimate: StepEstimate

    @property
    def strategy(self) -> str:
        """How devices along `context` exchange what attention reads; "" without such."""
        is_cut = self.spec.mesh.sizes["context"] > 1
        return self.target.config.model.context_parallel_strategy if is_cut else ""

    @property
    def keys(self) -> dict[str, Any]:
        """The keys for a command line, whatever mesh its config has."""
        batch, spec, mesh = self.target.config.batch, self.spec, self.spec.mesh
        keys = {**mesh.group("ici"), **mesh.group("dcn")}
        keys[_STRATEGY] = self.target.config.model.context_parallel_strategy
        keys |= {_PARTS: spec.pipeline_microbatches if mesh.pipeline_stages > 1 else -1}
        keys |= {"remat_policy": spec.remat_policy}
        rows = spec.rows // mesh.ranks
        if not has_free_passes(batch):
            return keys
        if batch.gives_global_batch:
            return keys | {"micro_batch_size": rows}
        size = plain_number(Fraction(rows, mesh.model_parallel_size))
        passes = {"gradient_accumulation_steps": spec.accumulation}
        return keys | {"per_device_batch_size": size} | passes

    @property
    def name(self) -> str:
        """The mesh in words."""
        mesh = self.spec.mesh
        parts = f"{self.spec.pipeline_microbatches} parts" if mesh.pipeline_stages > 1 else ""
        between = max(mesh.slices.values()) > 1 and f"{format_sizes(mesh.slices)} between slices"
        details = [*filter(None, (between, self.strategy, parts))]
        return format_sizes(mesh.sizes) + (f" ({', '.join(details)})" if details else "")


def splits(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yields all ways to write a number as a product of this many factors."""
    if parts == 1:
        yield (number,)
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        yield from ((first, *rest) for rest in splits(number // first, parts - 1))


def list_meshes(devices: int) -> Iterator[dict[str, Any]]:
    """Yields the keys of every mesh of one slice, whatever a config allows; pipelines last."""
    axes = sorted(AXES, key=lambda axis: axis != "stage")
    for row in splits(devices, len(axes)):
        mesh = MeshKeys.from_sizes(dict(zip(axes, row, strict=True)))
        stages = mesh.pipeline_stages
        parts = [stages * n for n in _PARTS_OF_STAGE] if stages > 1 else [-1]
        is_cut = mesh.sizes["context"] > 1
        strategies = [{_STRATEGY: x} for x in ("ulysses", "all_gather")] if is_cut else [{}]
        for strategy, number in itertools.product(strategies, parts):
            yield mesh.group("ici") | mesh.group("dcn") | strategy | {_PARTS: number}


def spread(mesh: MeshKeys, slices: int) -> Iterator[MeshKeys]:
    """Yields a mesh, or if it is of one slice, all ways to lay it on several. Between slices lie
    only copies, stages and shards: what other axes exchange in a layer does not suit their network.
    """
    if slices == 1 or max(mesh.slices.values()) > 1:
        yield mesh
        return
    between = AXES[: AXES.index("fsdp") + 1]
    for row in splits(slices, len(between)):
        dcn = dict(zip(between, row, strict=True))
        if all(mesh.sizes[axis] % size == 0 for axis, size in dcn.items()):
            yield MeshKeys.from_sizes(mesh.sizes, dcn)


def has_free_passes(batch: BatchKeys) -> bool:
    """Tells whether one key can cut the batch into other passes: not where the ramp or a phase
    gives them."""
    by_ramp = batch.enable_rampup_batch_size and not batch.gives_global_batch
    return not by_ramp and not any(batch.changing(name) for name in _PASS_KEYS)


class MeshSearch:
    """The meshes that a config may have on a machine, and those of them that are compiled."""

    def __init__(self, config: Config, machine: Machine, say: Callable[[str], None]):
        """Takes a loaded config and shows progress by lines. A ConfigError if it allows no mesh."""
        self.machine, self._say, self._loaded = machine, say, config
        self.phases = {
            name: {key: value for key, value in changes.items() if key not in MESH_KEYS}
            for name, changes in config.batch.phases.items()
        }
        devices = len(machine.devices)
        self.config = config.replace(phases=self.phases, **values_on_any_mesh(config, devices, 1))
        self.targets, refusals = [], []
        say("checking which meshes the config allows")
        whole = dataclasses.replace(machine, slices=1)
        for keys in list_meshes(devices):
            try:  # the config's own checks
                self.targets.append(self._target(self.config.replace(**keys), whole))
            except ConfigError as error:
                refusals.append(error)
        if not self.targets:
            raise refusals[0]
        self._cost = CostModel(self.targets[0].config.recipe, machine)
        ramp = self.targets[0].ramp
        self.stages = ramp.stages_between(0, ramp.total_steps)  # on some mesh
        self.own_mesh: MeshKeys | None = None  # of the last stage, if it can run
        self.planned = 0  # meshes to compile
        self.compiled: dict[int, list[tuple[Way, dict[str, Any]]]] = {}  # by index of the stage

    def _target(self, config: Config, machine: Machine) -> CompileTarget:
        return CompileTarget.from_machine(config, machine, self._say)

    def ways(
        self, target: CompileTarget, index: int, limit: float, slowest: float = math.inf
    ) -> list[Way]:
        """Returns the ways of a target to run a stage that the estimate fits into `limit` GiB, the
        fastest first: under each remat policy the largest passes. Returns [] if it cannot run the
        stage, or takes at least `slowest` seconds."""
        stage = target.ramp.stages[index]
        try:
            target.ramp.check([stage])
        except ConfigError:
            return []
        spec, ways = stage.spec, []
        model = target.config.recipe.with_spec(spec).model
        rows, ranks = spec.samples // spec.mesh.ranks, spec.mesh.ranks
        multiples = range(spec.rows_multiple, rows + 1, spec.rows_multiple)
        sizes = [size for size in multiples if rows % size == 0]
        if not has_free_passes(target.config.batch):
            sizes = [spec.rows // ranks]
        # On each mesh the least that a step can take: in one pass that keeps everything.
        least = dataclasses.replace(spec.resize(1, spec.samples), remat_policy="none")
        meshes = [
            mesh
            for mesh in spread(spec.mesh, self.machine.slices)
            if self._cost.step(model, dataclasses.replace(least, mesh=mesh)).seconds < slowest
        ]
        for policy in target.policies if meshes else ():
            kept = dataclasses.replace(spec, remat_policy=policy)
            tried = [kept.resize(rows // size, size * ranks) for size in sizes]
            fitting = bisect.bisect_right(tried, limit, key=lambda x: self._cost.gib(model, x))
            for mesh in meshes if fitting else ():
                largest = dataclasses.replace(tried[fitting - 1], mesh=mesh)
                ways.append(Way(target, stage, largest, self._cost.step(model, largest)))
        return sorted(ways, key=lambda way: way.estimate.seconds)

    def rank(self, index: int, number: float = math.inf) -> list[Way]:
        """Returns the meshes for a stage, each in the way that the model expects to be fastest, the
        fastest first. Once `number` are ranked, pipelines slower than the last of them are left
        out."""
        ranked: list[Way] = []
        by_stages = itertools.groupby(self.targets, lambda x: x.config.mesh.pipeline_stages)
        for _, targets in by_stages:
            enough = len(ranked) >= number
            slowest = ranked[int(number) - 1].estimate.seconds if enough else math.inf
            for target in targets:
                ranked += self.ways(target, index, target.limit, slowest)
            ranked.sort(key=lambda way: (way.estimate.seconds, way.estimate.gib))
            first: dict[MeshKeys, Way] = {}
            for way in ranked:
                first.setdefault(way.spec.mesh, way)
            ranked = list(first.values())
        return ranked

    def with_own(self, ways: Sequence[Way], number: int, index: int) -> list[Way]:
        """Returns the first `number` ways and, in second place, that on the config's own mesh for a
        stage: in its fastest passes, or as the config has it if none may fit. Sets `own_mesh`,
        which `compile` reads."""
        try:
            target = self._target(self._loaded, self.machine)
            stage = target.ramp.stages[index]
            target.ramp.check([stage])
        except ConfigError as error:
            self._say(f"the config's own mesh is not compiled: {error}")
            return [*ways[:number]]
        self.own_mesh, spec = stage.spec.mesh, stage.spec
        model = target.config.recipe.with_spec(spec).model
        as_given = Way(target, stage, spec, self._cost.step(model, spec))
        same = [way for way in ways if way.spec.mesh == self.own_mesh]
        own = (same or self.ways(target, index, target.limit) or [as_given])[0]
        others = [way for way in ways[:number] if way is not own]
        return [own, *others] if ways[:1] == [own] else [*others[:1], own, *others[1:]]

    def compile(self, way: Way) -> dict[str, Any]:
        """Compiles a way; if it does not fit, the next one of its mesh, until one fits. Returns
        `CompileTarget.step` and `run_totals` of the last one, with its keys and estimate."""
        target = self._target(self.config.replace(**layout_keys(way.keys)), self.machine)
        limit, mesh, ways = target.limit, way.spec.mesh, [way]
        while ways:
            way = ways[0]
            entry = target.step(way.spec)
            if entry["fits"]:
                break
            # What does not fit tells how far the estimates of this mesh are off.
            limit = way.estimate.gib * min(0.99, limit / entry["memory_gib"]["peak"])
            ways = [w for w in self.ways(way.target, way.stage.index, limit) if w.spec.mesh == mesh]
        spec = way.spec
        entry = entry | {
            "mesh": way.name,
            "is_own": mesh == self.own_mesh,
            "remat_policy": spec.remat_policy,
            "global_batch_size": spec.samples,
            "per_device_batch_size": plain_number(Fraction(spec.rows, len(self.machine.devices))),
            "gradient_accumulation_steps": spec.accumulation,
            "estimated_seconds": way.estimate.seconds,
            "keys": way.keys,
        }
        return entry | run_totals(target, entry, spec, target.ramp.steps_in_run(way.stage))

    def compile_all(self, ways: Sequence[Way]) -> list[tuple[Way, dict[str, Any]]]:
        """Compiles each way; returns the ways with what `compile` returns, the fastest first and
        those that do not fit last. `compiled` has those of a stage, even if this is interrupted."""
        self.planned += len(ways)
        for number, way in enumerate(ways, 1):
            self._say(
                f"stage {way.stage.index}, mesh {number} of {len(ways)}: {way.name}, estimated "
                f"{way.estimate.seconds:.3g} s a step"
            )
            entry = self.compile(way)
            step = f"{entry['step_seconds']:.3g} s a step" if entry["fits"] else "does not fit"
            self._say(f"{way.name}: {step}")
            compiled = self.compiled.get(way.stage.index, []) + [(way, entry)]
            compiled.sort(key=lambda x: (not x[1]["fits"], x[1].get("step_seconds", math.inf)))
            self.compiled[way.stage.index] = compiled
        return self.compiled[ways[0].stage.index] if ways else []

    def compile_stages(self, number: int) -> None:
        """Compiles, into `compiled`, the last stage's step on the `number` meshes that rank first
        and the config's own; and if the fastest fits, a first stage's of another program on the
        first meshes that a phase can leave for it. A ConfigError if no mesh may fit."""
        first, last = self.stages[0].index, self.stages[-1].index
        ranked = self.rank(last, number)
        if not ranked:
            raise ConfigError(
                f"no mesh of {count(len(self.machine.devices), 'device')} holds the model and a "
                f"row in {self.targets[0].limit:.3g} GiB of each, by the estimate of maxramp.plan; "
                "use more devices or shorter rows"
            )
        best, entry = self.compile_all(self.with_own(ranked, number, last))[0]
        if self.stages[0].spec != self.stages[-1].spec and entry["fits"]:
            ways = [way for way in self.rank(first) if _may_change(way, best)]
            same = [way for way in ways if way.spec.mesh == best.spec.mesh]
            self.compile_all([*same, *(way for way in ways[:number] if way not in same)])

    def result(self) -> dict[str, Any]:
        """Compares the steps compiled for the last stage, of which one must be, and for the first.

        Returns `stages`, each with `meshes`: entries as those of `compile_stages` with `mesh`,
        `is_own`, `remat_policy`, `estimated_seconds` and `keys`; `keys` of the fastest run; `gain`,
        the share of the first stage's time that a mesh of its own saves; `refusal`, why no run can
        have these keys, or ""; `planned`, how many meshes were to be compiled.
        """
        best, entry = self.compiled[self.stages[-1].index][0]
        early = self.compiled.get(self.stages[0].index, ())
        keys, phases, gain = entry["keys"], {}, 0.0
        if early and early[0][0].stage.index != best.stage.index and early[0][1]["fits"]:
            keys, phases, gain = _with_phase(self, best, entry, early)
        reason = self.refusal(keys, phases)
        keys = keys | {"phases": self.phases | phases}
        needed = {n: value for n, value in keys.items() if _is_needed(self._loaded, n, value)}
        return {
            "compile_topology": self.machine.name,
            "device": self.machine.device,
            "times": self.machine.times,
            "planned": self.planned,
            "stages": [
                {"index": index, "meshes": [entry for _, entry in compiled]}
                for index, compiled in sorted(self.compiled.items())
            ],
            "keys": needed if entry["fits"] else {},
            "gain": gain,
            "refusal": reason,
        }

    def seconds(self, way: Way, index: int) -> float:
        """Estimates a step of another stage on a way's mesh; infinite if it cannot run there."""
        ways = self.ways(way.target, index, way.target.limit)
        same = (w.estimate.seconds for w in ways if w.spec.mesh == way.spec.mesh)
        return next(same, math.inf)

    def refusal(self, keys: dict[str, Any], phases: dict[str, Any]) -> str:
        """Returns why no run can have these keys in all its stages; "" if one can."""
        config = self.config.replace(**layout_keys(keys), phases=self.phases | phases)
        try:
            target = self._target(config, self.machine)
            target.ramp.check(target.ramp.stages_between(0, target.ramp.total_steps))
        except ConfigError as error:
            return str(error)
        return ""


def layout_keys(keys: dict[str, Any]) -> dict[str, Any]:
    """Returns those of a way's keys that say how devices are laid out."""
    names = {*MeshKeys.names(), _STRATEGY, _PARTS}
    return {name: value for name, value in keys.items() if name in names}


def _is_needed(config: Config, name: str, value: Any) -> bool:
    """Tells whether a command line needs a key: not where the config has the value, or leaves a
    size open that comes out as 1."""
    before = config.values.get(name)
    return value != before and (before, value) != (-1, 1)


def _may_change(way: Way, later: Way) -> bool:
    """Tells whether a phase can lead from one way's mesh to another."""
    names = {n for n in MeshKeys.names() if n not in MESH_KEYS} | {_PARTS}
    if way.strategy and later.strategy:
        names |= {_STRATEGY}
    return all(way.keys[name] == later.keys[name] for name in names)


def _with_phase(
    search: MeshSearch, best: Way, entry: dict[str, Any], early: Sequence[tuple[Way, dict]]
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Returns the keys of a run that begins on the first stage's fastest mesh, the phase in which
    it goes on with `best`, and the share of that stage's time that this saves; the keys of `best`
    and no phase where it saves next to nothing."""
    own, begun = early[0]
    same = next((x for way, x in early if way.spec.mesh == best.spec.mesh and x["fits"]), None)
    gain = 1 - begun["step_seconds"] / same["step_seconds"] if same else 1.0
    if own.spec.mesh == best.spec.mesh or gain < _LEAST_GAIN:
        return entry["keys"], {}, 0.0
    index = best.stage.index
    while index > 1 and search.seconds(best, index - 1) <= search.seconds(own, index - 1):
        index -= 1
    keys, later = dict(begun["keys"]), entry["keys"]
    keys[_STRATEGY] = later[_STRATEGY] if best.strategy else keys[_STRATEGY]
    changed = {name: value for name, value in later.items() if value != keys[name]}
    batch, sample = search.config.batch, search.stages[index].threshold.first_sample
    unit = batch.max_target_length if batch.phases_unit == "tokens" else 1
    names = (phase.name for phase in batch.phase_list[1:] if phase.first_sample == sample)
    name = next(names, str(sample * unit))
    return keys, {name: search.phases.get(name, {}) | changed}, gain
