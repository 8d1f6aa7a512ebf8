"""The cases of joints.py: what they are made of, and how they are drawn.

A case has one choice of every feature (joints.yml), a ramp as thresholds (which a notation writes
as keys), how the run lies on devices in its first start and in later ones, and what is checked.
It is a JSON object.
"""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from maxramp.config.keys import Config
from maxramp.keys.base import base


@dataclasses.dataclass(frozen=True)
class Choice:
    """Of a feature; joints.yml says what each field means."""

    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    phase: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    between: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    without: Sequence[str] = ()
    needs: str = ""
    exact: bool = False


_DATA = yaml.safe_load(pathlib.Path(__file__).with_name("joints.yml").read_text())
FEATURES: dict[str, dict[str, Choice]] = {
    feature: {name: Choice(**fields) for name, fields in choices.items()}
    for feature, choices in _DATA["features"].items()
}

# Keys of every case: a model of 46,000 weights whose every axis divides over 8 devices.
COMMON = {
    "base_emb_dim": "32",
    "base_num_query_heads": "8",
    "base_num_kv_heads": "8",
    "head_dim": "8",
    "base_mlp_dim": "64",
    "base_num_decoder_layers": "2",
    "vocab_size": "272",
    "max_target_length": "16",
    "learning_rate": "1e-2",
    "text_files": "{world}/text.txt",
    "eval_fraction": "0.05",
    "num_epoch": "3",
    "eval_interval": "-1",
    "eval_per_device_batch_size": "4",
    "checkpoint_period": "4",
    "enable_rampup_batch_size": "False",
    "hang_timeout_seconds": "120",
    "log_period": "1",
}
SIZES = [name for name in COMMON if name.startswith("base_") or name in ("head_dim", "vocab_size")]


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a start lies on the machine. None of it changes a row, a batch size or the schedule."""

    processes: int = 1
    devices: int = 1  # of each process
    data: int = 1
    tensor: int = 1
    expert: int = 1  # shards of the experts, where there are some
    context: int = 1  # parts of a row
    stages: int = 1
    expansion: int = -1  # only processes / expansion of them read
    micro: int = 4  # rows per data-parallel rank in a pass: accumulation follows

    @property
    def ranks(self) -> int:
        """Groups of devices that each take rows of their own."""
        return self.processes * self.devices // self.tensor // self.stages // self.context


SHAPES = (
    Shape(),
    Shape(micro=2),
    Shape(micro=16),
    Shape(devices=2),
    Shape(devices=2, tensor=2),
    Shape(devices=4, data=2, micro=2),
    Shape(devices=4, tensor=2, micro=2),
    Shape(devices=4, expert=2, micro=2),
    Shape(devices=4, context=2, micro=2),
    Shape(devices=4, context=2, stages=2),
    Shape(devices=2, stages=2),
    Shape(processes=2, micro=2),
    Shape(processes=2, devices=2, tensor=2),
    Shape(processes=2, expert=2, micro=2),
    Shape(processes=2, devices=2, context=4),
    Shape(processes=2, expansion=2),
)

RAMPS = ("constant", "megatron", "tokens", "nemo", "maxtext", "phases", "seesaw", "noise")
POLICIES = ("seesaw", "noise")  # give their thresholds by a rule
Thresholds = list[list[int]]  # [[first sample, batch], ...], the first at 0


@dataclasses.dataclass(frozen=True)
class Case:
    """One run, and what is checked of it."""

    features: Mapping[str, str]  # the choice of each feature that is not left out
    ramp: str  # its notation
    thresholds: Thresholds  # of seesaw and noise the batches alone say something: the ladder
    steps: int
    check: str
    shapes: tuple[Shape, ...]  # of the first start, and of later ones
    moments: tuple[str, ...] = ()  # at which starts are struck
    phase_at: int = 12  # the sample where the phase of a feature begins
    wrong: str = ""  # what no run takes, as key=value

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads the case of a command line."""
        values = json.loads(text)
        values |= {"shapes": tuple(Shape(**shape) for shape in values["shapes"])}
        return cls(**values | {"moments": tuple(values["moments"])})

    def to_json(self) -> str:
        """Returns the case for a command line."""
        default = dataclasses.asdict(Shape())
        shapes = [
            {k: v for k, v in dataclasses.asdict(shape).items() if v != default[k]}
            for shape in self.shapes
        ]
        return json.dumps(vars(self) | {"shapes": shapes})

    @property
    def choices(self) -> list[Choice]:
        return [FEATURES[f][self.features[f]] for f in FEATURES if f in self.features]

    @property
    def has_experts(self) -> bool:
        return any("num_experts" in choice.keys for choice in self.choices)

    @property
    def exact(self) -> bool:
        """Whether other sums would make it another run."""
        return self.ramp == "noise" or any(choice.exact for choice in self.choices)

    @property
    def batches(self) -> list[int]:
        """Of every step, by the thresholds: a step takes the last that is not above its samples."""
        batches, consumed = [], 0
        for _ in range(self.steps):
            batches.append([rows for first, rows in self.thresholds if first <= consumed][-1])
            consumed += batches[-1]
        return batches

    def has(self, feature: str) -> str:
        """Returns the choice of a feature; its first one if the case leaves it out."""
        return self.features.get(feature, next(iter(FEATURES[feature])))

    @property
    def is_valid(self) -> bool:
        """Whether the choices, the ramp and the shapes go together."""
        names = {f"{feature}={name}" for feature, name in self.features.items()}
        drawn = names | {f"ramp={self.ramp}"} | self.features.keys()
        left_out = FEATURES.keys() - self.features.keys()
        drawn |= {f"{feature}={next(iter(FEATURES[feature]))}" for feature in left_out}
        fit = all(c.needs in (drawn | {""}) and not drawn & {*c.without} for c in self.choices)
        fit = fit and all(self.ramp in writable(self, shape) for shape in self.shapes)
        fit = fit and (self.ramp != "noise" or not any(choice.phase for choice in self.choices))
        fit = fit and (not self.exact or len({*self.shapes}) == 1)
        return fit and not any(_refused(self, shape) for shape in self.shapes)


def _wrong_keys(case: Case) -> Iterator[str]:
    """Yields what the program of a case reads and does not take."""
    program = "grpo" if case.has("data") == "grpo" else "train"
    for text in _DATA["wrong"]:
        name = text.partition("=")[0]
        if not Config.unread_by(program, base() | {name: None}):
            yield text


def _refused(case: Case, shape: Shape) -> bool:
    """Returns whether a shape cannot run a case."""
    lora, noise = case.has("start") == "lora_dropout", case.has("step") == "noise"
    dense = any("first_num_dense_layers" in choice.keys for choice in case.choices)
    least = shape.ranks * (2 // shape.stages * shape.stages if shape.stages > 1 else 1)
    mesh = case.has("phases") in ("mesh", "expert_mesh", "context_mesh")
    return (
        any(rows % least for _, rows in case.thresholds)
        or (shape.stages > 1 and (lora or noise or mesh or dense or case.ramp == "noise"))
        or (
            mesh
            and (
                shape.tensor > 1
                or shape.expert > 1
                or shape.context > 1
                or shape.processes * shape.devices < 2
                or shape.data > 1
            )
        )
        or (case.ramp == "maxtext" and mesh)
        or (case.has("data") == "grpo" and shape.stages > 1)
        or (case.has("storage") != "disk" and shape.processes > 1)
    )


# --- Ramps ---------------------------------------------------------------------------------------


def _even(thresholds: Thresholds) -> tuple[int, int] | None:
    """Returns (increment, samples of each step) of a ramp whose steps are alike, else None."""
    pairs = list(itertools.pairwise(thresholds))
    rises = {(b[1] - a[1], b[0] - a[0]) for a, b in pairs}
    (rise,) = rises if len(rises) == 1 else [(0, 0)]
    return rise if rise[0] > 0 else None


def writable(case: Case, shape: Shape) -> list[str]:
    """Returns the notations that can write a case's ramp."""
    if case.ramp in POLICIES:
        return [case.ramp]
    notations, even = ["megatron", "tokens", "phases"], _even(case.thresholds)
    if len(case.thresholds) == 1:
        notations.append("constant")
    if even:
        notations.append("nemo")
        devices, passes = shape.processes * shape.devices, _passes(case, shape)
        whole = all(even[1] % rows == 0 for _, rows in case.thresholds)
        whole = whole and all(rows % (shape.ranks * passes) == 0 for _, rows in case.thresholds)
        if whole and devices and shape.stages == 1 and case.has("phases") != "micro":
            notations.append("maxtext")
    return notations


def _passes(case: Case, shape: Shape) -> int:
    """Returns the passes of a step under MaxText's notation."""
    return max(1, min(rows for _, rows in case.thresholds) // (shape.ranks * shape.micro))


def ramp_keys(case: Case, shape: Shape, notation: str, row: int) -> dict[str, Any]:
    """Writes the thresholds of a case in a notation; `row`: tokens of a sample."""
    pairs, micro = case.thresholds, {"micro_batch_size": shape.micro}
    (_, first), (_, last) = pairs[0], pairs[-1]
    per_pass = shape.processes * shape.devices * _passes(case, shape)
    even = _even(pairs) or (0, 0)
    match notation:
        case "constant":
            return micro | {"global_batch_size": first}
        case "megatron" | "tokens":
            unit = row if notation == "tokens" else 1
            shown = " ".join(f"{sample * unit}:{rows}" for sample, rows in pairs)
            unit = "tokens" if notation == "tokens" else "samples"
            return micro | {"step_batch_size_schedule": shown, "step_batch_size_unit": unit}
        case "nemo":
            ramp = [first, even[0], even[1] * (len(pairs) - 1)]
            return micro | {"rampup_batch_size": ramp, "global_batch_size": last}
        case "maxtext":
            sizes = [size / per_pass for size in (first, even[0], last)]
            names = ("per_device_batch_size_start", "per_device_batch_size_increment")
            return dict(zip((*names, "per_device_batch_size"), sizes, strict=True)) | {
                "enable_rampup_batch_size": True,
                "global_rampup_samples": even[1] * (len(pairs) - 1),
                "gradient_accumulation_steps": _passes(case, shape),
            }
        case "phases":
            later = {f"phases.{sample}.global_batch_size": rows for sample, rows in pairs[1:]}
            return micro | {"global_batch_size": first, "phases_unit": "samples"} | later
    ladder = {"rampup_policy": notation, "rampup_ladder": sorted({rows for _, rows in pairs})}
    if notation == "noise":
        ladder |= {"rampup_noise_factor": 1000}
    return micro | ladder


def keys_of(case: Case, shape: Shape, notation: str = "") -> dict[str, str]:
    """Returns all keys of a case, with {world} in them."""
    is_released = any("model_name" in choice.keys for choice in case.choices)
    own_sizes = SIZES if is_released else ()
    keys: dict[str, Any] = {name: value for name, value in COMMON.items() if name not in own_sizes}
    for choice in case.choices:
        keys |= choice.keys
    row = int(keys["max_target_length"])
    samples = sum(case.batches)
    in_samples = case.ramp in POLICIES or case.has("length") == "samples"
    if case.has("length") == "tokens":
        keys |= {"total_tokens": samples * row, "steps": -1}
    elif in_samples:
        keys |= {"total_samples": samples, "steps": -1}
    elif "steps" not in keys:
        keys |= {"steps": case.steps}
    keys |= ramp_keys(case, shape, notation or case.ramp, row)
    for choice in case.choices:
        keys |= {f"phases.{case.phase_at}.{name}": value for name, value in choice.phase.items()}
        keys |= {"phases_unit": "samples"} if choice.phase else {}
    keys |= {
        "ici_data_parallelism": shape.data,
        "ici_tensor_parallelism": shape.tensor,
        "ici_pipeline_parallelism": shape.stages,
        "ici_context_parallelism": shape.context,
        "ici_expert_parallelism": shape.expert if case.has_experts else 1,
        "expansion_factor_real_data": shape.expansion,
    }
    return {name: str(value) for name, value in keys.items()}


# --- Drawing -------------------------------------------------------------------------------------


_RISES = st.sampled_from([1, 1, 1, 2])  # every stage is a program to compile, the price of a case
_SHAPES = st.sampled_from([*SHAPES[:11], *SHAPES])  # several processes cost more than devices


@st.composite
def ramps(draw) -> tuple[str, Thresholds]:
    """Draws a notation, and the thresholds that it writes."""
    notation = draw(st.sampled_from(RAMPS))
    first = draw(st.sampled_from([4, 8]))
    if notation == "constant":
        return notation, [[0, first]]
    if notation in ("nemo", "maxtext", "seesaw", "noise"):
        rise, count = draw(st.sampled_from([4, 8])), draw(_RISES)
        sizes = [first + rise * i for i in range(count + 1)]
        share = draw(st.sampled_from([12, 16, 20]))
        share = math.lcm(*sizes) if notation == "maxtext" else share
        return notation, [[i * share, size] for i, size in enumerate(sizes)]
    thresholds, sample = [[0, first]], 0
    for _ in range(draw(_RISES)):
        sample += draw(st.integers(5, 30))
        size = draw(st.sampled_from([n for n in (4, 8, 12, 16) if n != thresholds[-1][1]]))
        thresholds.append([sample, size])
    return notation, thresholds


@st.composite
def moments(draw) -> str:
    """Draws when a start is killed: at a step or a change of its folder, and by which signal."""
    if draw(st.booleans()):
        return f"{draw(st.sampled_from(['KILL', 'TERM']))} step {draw(st.integers(1, 11))}"
    return f"KILL file {draw(st.integers(1, 120))}"


def _with(case: Case, choices: Mapping[str, str]) -> Case:
    """Returns a case with other choices, without those that leave a feature out."""
    drawn = {f: name for f, name in choices.items() if name != next(iter(FEATURES[f]))}
    return dataclasses.replace(case, features=case.features | drawn)


@st.composite
def cases(draw) -> Case:
    """Draws a valid case."""
    notation, thresholds = draw(ramps())
    shape = draw(_SHAPES)
    steps = draw(st.integers(6, 12)) * (3 if notation == "noise" else 1)
    case = Case({}, notation, thresholds, steps, "", (shape,))
    if not case.is_valid:  # MaxText's sizes, on devices that do not take them
        case = dataclasses.replace(case, ramp="nemo", shapes=SHAPES[:1])
    case = dataclasses.replace(case, phase_at=draw(st.integers(5, 40)))
    pairs = itertools.product(FEATURES["data"], FEATURES["start"])
    fit = [(d, s) for d, s in pairs if _with(case, {"data": d, "start": s}).is_valid]
    data = draw(st.sampled_from(sorted({data for data, _ in fit})))
    starts = [start for kind, start in fit if kind == data]  # families come with new weights
    start = draw(
        st.sampled_from(starts + ["scratch"] * (len(starts) if "scratch" in starts else 0))
    )
    case = _with(case, {"data": data, "start": start})
    for feature in draw(st.permutations([f for f in FEATURES if f not in ("data", "start")])):
        default, *others = FEATURES[feature]
        often = {"storage": 20, "order": 8, "phases": 5}.get(feature, len(others))
        drawn = _with(case, {feature: draw(st.sampled_from([default] * often + others))})
        case = drawn if drawn.is_valid else case
    case = dataclasses.replace(case, check=draw(st.sampled_from(list(fitting_checks(case)))))
    if case.check in ("killed", "moved"):
        starts = [2] if case.has("restarts") != "same" else [1, 1, 1, 2]
        for _ in range(draw(st.sampled_from(starts if case.check == "killed" else [1]))):
            moved = dataclasses.replace(case, shapes=(*case.shapes, draw(_SHAPES)))
            case = (
                moved
                if moved.is_valid
                else dataclasses.replace(case, shapes=(*case.shapes, case.shapes[0]))
            )
    if case.check == "wrong":
        case = dataclasses.replace(case, wrong=draw(st.sampled_from(list(_wrong_keys(case)))))
    if case.check == "killed":
        struck = [draw(moments()) for _ in case.shapes[1:]]
        case = dataclasses.replace(case, moments=tuple(struck))
    return case


def draw_cases(
    first: int, count: int, checks: Sequence[str] = (), choices: Sequence[str] = ()
) -> list[Case]:
    """Draws `count` different cases, with the seeds from `first` on; only those with one of these
    checks, and with one of these choices, FEATURE=NAME, if any are named. A larger count begins
    with the cases of a smaller one.

    Ten at a time: hypothesis makes later ones of a session from parts of earlier ones, and so
    repeats a few choices. What fails it cannot make simpler, as a case takes half a minute.
    """
    drawn: dict[str, Case] = {}
    rules = settings(
        max_examples=10,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def collect(case: Case) -> None:
        own = {f"{feature}={name}" for feature, name in case.features.items()}
        is_wanted = case.check in (checks or (case.check,)) and own & {*(choices or own)}
        if len(case.features) > 1 and is_wanted:
            drawn.setdefault(case.to_json(), case)

    for session in itertools.count(1000 * first):
        seed(session)(rules(given(case=cases())(collect)))()
        if len(drawn) >= count:
            return list(drawn.values())[:count]
    raise AssertionError


def fitting_checks(case: Case) -> Iterator[str]:
    """Yields the checks that fit a case."""
    yield from ("killed", "killed", "wrong")
    if case.has("data") != "passes":
        yield "schedule"
    if not case.exact:
        yield "moved"
    if len(writable(case, case.shapes[0])) > 1 or case.ramp in POLICIES:
        yield "notation"
    plain = case.has("storage") == "disk" and case.has("data") != "grpo"
    saves = case.has("checkpoints") not in ("end", "last", "best")
    if plain and saves and case.shapes[0].processes == 1:
        yield "branch"
    shape = case.shapes[0]
    whole = {shape.data, shape.tensor, shape.expert, shape.context, shape.stages} == {1}
    if case.has("storage") == "disk" and not case.exact and whole and shape.expansion < 2:
        yield "elastic"
    if plain and case.ramp not in POLICIES and case.has("data") != "passes":
        yield "suggest"


def simpler(case: Case) -> Iterator[Case]:
    """Cases with less in them, what takes away most first."""
    for feature in case.features:
        kept = {name: choice for name, choice in case.features.items() if name != feature}
        yield dataclasses.replace(case, features=kept)
    plain = SHAPES[0]
    yield dataclasses.replace(case, shapes=tuple(plain for _ in case.shapes))
    if len(case.shapes) > 2:
        yield dataclasses.replace(case, shapes=case.shapes[:-1], moments=case.moments[:-1])
    for index, shape in enumerate(case.shapes):
        if shape != plain:
            shapes = (*case.shapes[:index], plain, *case.shapes[index + 1 :])
            yield dataclasses.replace(case, shapes=shapes)
    if len(case.thresholds) > 1:
        fewer = case.thresholds[:-1]
        yield dataclasses.replace(case, thresholds=fewer)
        yield dataclasses.replace(case, thresholds=fewer[:1], ramp="constant")
    if case.ramp not in ("constant", "seesaw", "noise"):
        yield dataclasses.replace(case, ramp="megatron")
