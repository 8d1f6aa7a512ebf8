"""Reads what a compiled program does from its text: products, cycles and collectives.

A compiler's own cost analysis counts the body of a loop once. Here every computation is weighted by
how often it runs. The text is XLA's: computations `%name (...) -> ... {`, instructions `%name =
type[shape]{layout} opcode(%operand, ...), attribute=value`, on TPU with the compiler's estimate of
an instruction's cycles.
"""

import collections
import dataclasses
import functools
import json
import math
import operator
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from maxramp.model.parts.positions import balanced_order
from maxramp.planning.topology import Chip
from maxramp.training.device_memory import GIB

COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    "collective-permute",
)
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\((.*)$")
_SHAPE = re.compile(r"([a-z]+[0-9a-z]*)\[([0-9,]*)\]")
_CALLS = ("calls", "to_apply", "true_computation", "false_computation")


@dataclasses.dataclass(eq=False)
class Instruction:
    """One instruction of a compiled program."""

    program: dict[str, "Computation"]
    computation: "Computation"
    name: str
    types: list[tuple[str, tuple[int, ...]]]
    opcode: str
    rest: str  # operands and attributes

    def attribute(self, name: str) -> str:
        match = re.search(rf"\b{name}=%?([^\s,}}]+)", self.rest)
        return match[1] if match else ""

    def callee(self, name: str) -> "Computation":
        return self.program.get(self.attribute(name), Computation())

    @functools.cached_property
    def operands(self) -> list["Instruction | None"]:
        """Instructions whose results it takes; None for one that is not in the text."""
        names = re.findall(r"%([^\s,)]+)", self.rest.partition(")")[0])
        return [self.computation.get(name) for name in names]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its first result."""
        return self.types[0][1]

    @property
    def bytes(self) -> float:
        """Size of its result. A bool has a byte, other types the bits in their names (f8e4m3)."""
        bits = (8 if kind == "pred" else sum(numbers(kind)[:1]) for kind, _ in self.types)
        return sum(n / 8 * math.prod(shape) for n, (_, shape) in zip(bits, self.types, strict=True))

    @property
    def operand_bytes(self) -> float:
        return sum(operand.bytes for operand in filter(None, self.operands))


class Computation(dict[str, Instruction]):
    """Instructions by name, in the order of the text; `root` makes the result."""

    name: str
    root: Instruction


# The value of a result that follows from the text: an integer or a tuple; None where none does.
Known = int | tuple["Known", ...] | None
_COMPUTED = {
    **{"add": operator.add, "subtract": operator.sub, "multiply": operator.mul},
    **{"minimum": min, "maximum": max, "and": operator.and_, "or": operator.or_},
    **{"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge},
    **{"EQ": operator.eq, "NE": operator.ne},
}
_PASSED_ON = ("copy", "copy-start", "copy-done", "bitcast", "convert", "opt-barrier")


@dataclasses.dataclass
class StepCost:
    """The cost of one run of a program on one device. Bytes are received, by kind of transfer."""

    flops: float = 0.0  # of matrix products, those of attention kernels included
    compute_seconds: float = 0.0  # of everything but transfers
    collective_seconds: float = 0.0  # waits for transfers; on TPUs for those inside a slice
    # On TPUs the part of `compute_seconds` in kernels that the compiler does not look into, those
    # of attention or a gated delta rule and, under equal loads, of experts; and transfers between
    # slices, as if nothing ran beside them.
    attention_seconds: float | None = None
    experts_seconds: float | None = None
    network_seconds: float | None = None
    # From devices of the same slice or node, and from other slices or nodes.
    collective_bytes: dict[str, float] = dataclasses.field(default_factory=collections.Counter)
    network_bytes: dict[str, float] = dataclasses.field(default_factory=collections.Counter)

    def to_json(self) -> dict[str, Any]:
        """Returns these figures of one step on one device under their names in compiled.json; None
        where the machine tells no such part."""
        waited = self.collective_seconds + (self.network_seconds or 0.0)
        return {
            "flops_per_device": self.flops,
            "compute_seconds": self.compute_seconds,
            "attention_seconds": self.attention_seconds,
            "experts_seconds": self.experts_seconds,
            "collective_seconds": self.collective_seconds,
            "network_seconds": self.network_seconds,
            "step_seconds": self.compute_seconds + waited,
            "collective_gib": {k: n / GIB for k, n in sorted(self.collective_bytes.items()) if n},
            "network_gib": {k: n / GIB for k, n in sorted(self.network_bytes.items()) if n},
        }


def count(text: str, chip: Chip) -> StepCost:
    """Counts the cost of a TPU program (`jax.stages.Compiled.as_text()`) on one kind of chip. Times
    follow from the compiler's cycles and the chip's rates, bytes from a ring over each group. Both
    branches of a conditional on a predicate count, none of one on a number.

    Raises:
      ValueError: the text does not say how often a loop runs, or who takes part in a transfer.
    """
    work, total = StepCost(), collections.Counter()

    def add(computation: Computation, times: float, runs_beside: bool = False) -> None:
        for i in computation.values():
            cycles = re.search(r'"estimated_cycles":"(\d+)"', i.rest)
            if cycles and not runs_beside:
                total["cycles"] += times * int(cycles[1])
            kind = i.opcode.removesuffix("-start")
            if i.opcode == "dot":
                work.flops += times * dot_flops(i)
            elif i.opcode == "convolution":
                work.flops += times * _convolution_flops(i)
            elif i.opcode == "custom-call":
                total["attention"] += times * _kernel_flops(i)
                flops, tiled = _grouped_flops(i)
                work.flops += times * flops
                total["experts"] += times * tiled
                flops, peak_flops = _delta_flops(i)
                work.flops += times * flops
                total["delta"] += times * peak_flops
            elif kind in COLLECTIVES:
                if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"  # how a TPU's program writes one
                moved = times * _receive_bytes(kind, i)
                work.collective_bytes[kind] += moved
                waits = not runs_beside and "async" not in computation.name
                if i.opcode in COLLECTIVES and waits:
                    total["waited"] += moved
            elif i.opcode == "send" and "_xla_megascale_transfer_type" in i.rest:
                kind, moved = _send_bytes(i)
                work.network_bytes[kind] += times * moved
            elif i.opcode == "while":
                add(i.callee("body"), times * trip_count(i))
            elif i.opcode in ("fusion", "call", "async-start", "call-start", "conditional"):
                for called in map(i.callee, _CALLS):
                    # A call that starts is of another processor: TPU7x has one for transfers.
                    add(called, times, runs_beside or i.opcode == "call-start")

    add(parse(text), 1.0)
    work.flops += total["attention"]
    work.attention_seconds = (total["attention"] + total["delta"]) / (chip.peak_tflops * 1e12)
    work.experts_seconds = total["experts"] / (chip.peak_tflops * 1e12)
    in_kernels = work.attention_seconds + work.experts_seconds
    work.compute_seconds = total["cycles"] / (chip.clock_ghz * 1e9) + in_kernels
    work.collective_seconds = total["waited"] / (chip.interconnect_gbytes * 1e9)
    work.network_seconds = sum(work.network_bytes.values()) / (chip.network_gbytes * 1e9)
    return work


def parse(text: str) -> Computation:
    """Parses a compiled program's text; returns its entry, from which `callee` leads to the
    others."""
    program: dict[str, Computation] = {}
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = program[head[2]] = Computation()
            current.name = head[2]
            if head[1]:
                entry = current
        elif match := _INSTRUCTION.match(line):
            root, name, kind, opcode, rest = match.groups()
            shapes = _SHAPE.findall(re.sub(r"\{[^}]*\}", "", kind))
            types = [(element, tuple(numbers(dims))) for element, dims in shapes]
            current[name] = Instruction(program, current, name, types, opcode, rest)
            if root:
                current.root = current[name]
        elif line.startswith(('"', "}}")):  # an attribute of the instruction before goes on
            current[name].rest += line
    return entry


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def trip_count(loop: Instruction) -> int:
    """Counts how often a `while` runs by following the integers of its state until its condition
    fails, for at most 10,000 rounds. The compiler's own count comes second: it is wrong for a loop
    that was unrolled or peeled after it was counted. ValueError: neither is known."""
    state = _evaluate(loop.operands[0], {})
    for count in range(10_000):  # of a loop that never ends as well
        holds = _evaluate(loop.callee("condition").root, {0: state})
        if holds is None:
            break
        if not holds:
            return count
        state = _evaluate(loop.callee("body").root, {0: state})
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    if blocks := re.search(r"row_blocks_(\d+)", loop.rest):  # under equal loads of experts
        return int(blocks[1])
    raise ValueError(f"the loop {loop.name} does not say how often it runs")


def _evaluate(result: Instruction | None, arguments: Mapping[int, Known]) -> Known:
    """Returns the value of a result, as far as the text tells: of types p(red), s(igned) and
    u(nsigned) with one element, or tuples with such; else None. `arguments` are by parameter
    number. Integers do not wrap, and a convert keeps its value. The computations that fusions and
    calls name must be in the text.
    """

    @functools.cache
    def value(instruction: Instruction | None) -> Known:
        types = instruction.types if instruction else []
        if not any(kind[0] in "psu" and math.prod(shape) == 1 for kind, shape in types):
            return None
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "constant":
            literal = re.match(r"(-?\d+|true|false)\)", instruction.rest)
            return json.loads(literal[1]) if literal else None
        if opcode == "parameter":
            return arguments.get(int(instruction.rest.partition(")")[0]))
        if opcode == "tuple":
            return tuple(map(value, operands))
        if opcode == "get-tuple-element":
            elements = value(operands[0])
            return elements and elements[int(instruction.attribute("index"))]
        if opcode in _PASSED_ON:
            return value(operands[0])
        if opcode in ("fusion", "call"):
            inner = instruction.callee("calls") or instruction.callee("to_apply")
            return _evaluate(inner.root, dict(enumerate(map(value, operands))))
        compute = _COMPUTED.get(opcode) or _COMPUTED.get(instruction.attribute("direction"))
        known = [value(operand) for operand in operands] if compute else [None]
        return None if None in known else compute(*known)

    return value(result)


def dot_flops(i: Instruction) -> float:
    """Counts 2 for each product of elements of a `dot`, from the shapes of its operands."""
    dims = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", i.rest)
    contracted = math.prod(i.operands[0].shape[d] for d in numbers(dims[1])) if dims else 1
    return 2.0 * math.prod(i.shape) * contracted


def _convolution_flops(i: Instruction) -> float:
    """Counts 2 for each product of an input and a kernel element, without padding and holes. TPU
    programs write matrix products so, with batch dimensions as spatial ones of a one-element
    window."""
    inputs, kernel, output = re.split("_|->", i.attribute("dim_labels"))
    lhs, rhs = (operand.shape for operand in i.operands[:2])
    window_text = i.rest.partition("window={")[2].partition("}")[0]
    window = dict(re.findall(r"(\w+)=([0-9x_-]+)", window_text))
    flops = 2.0 * i.shape[output.index("b")] * rhs[kernel.index("o")] * rhs[kernel.index("i")]
    for d in (int(label) for label in output if label.isdigit()):
        size, stride, base, dilation = (
            int(window[name].split("x")[d]) if name in window else 1
            for name in ("size", "stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(window["pad"].split("x")[d].split("_")[0]) if "pad" in window else 0
        holes_included = (lhs[inputs.index(str(d))] - 1) * base + 1
        flops *= sum(
            0 <= (at := o * stride + k * dilation - low) < holes_included and at % base == 0
            for o in range(i.shape[output.index(str(d))])
            for k in range(size)
        )
    return flops


# Products of an attention kernel, each of [T, h] with [h, T] or [T, T] with [T, h]: scores and
# result; scores, dP, dV, dK; scores, dP, dQ. How many of these are as wide as a query, and how many
# as a value.
_KERNELS = {"fwd": (1, 1), "dkv": (2, 2), "dq": (2, 1)}


def _kernel_flops(i: Instruction) -> float:
    """Counts the FLOPs of an attention kernel on the most loaded device, from its queries
    [..., H, t, h] and the blocks of its mask, in rows of one text.

    The first operand has integers [.., blocks of queries, steps] of the forward pass and dQ, and
    [.., steps, blocks of keys] of dK and dV: how many blocks each goes through, at most. A block of
    queries sees the blocks of keys up to its own, with a window the last few of them. 0 for any
    other custom call.
    """
    if not (kernel := re.search(r"tpu_custom_call.*splash_mha_(fwd|dkv|dq)", i.rest)):
        return 0.0
    shapes = _SHAPE.findall(i.rest.partition("constraints=")[2])
    floats = [numbers(dims) for kind, dims in shapes if "f" in kind]
    (*heads, t, h), (*_, T, _), (*_, v) = floats[:3]
    query_products, value_products = _KERNELS[kernel[1]]
    queries, keys = (int(re.search(rf"block_{x}\w*\W+(\d+)", i.rest)[1]) for x in ("q", "kv"))
    *_, first, second = numbers(shapes[0][1])
    if kernel[1] == "dkv":
        near, is_windowed = -(-first * queries // keys), first * queries < t
    else:
        near, is_windowed = second, second * keys < T
    seen_n = np.arange(queries - 1, T, queries) // keys + 1
    seen = share_of_row(i.rest, np.minimum(seen_n, near) if is_windowed else seen_n, t / T)
    widths = query_products * h + value_products * v
    return 2.0 * math.prod(heads) * seen * queries * keys * widths


_DELTA_SPEED = 0.68  # of the peak, in the schedule that libtpu 0.0.42 makes of both kernels for v5p


def _delta_flops(i: Instruction) -> tuple[float, float]:
    """Counts the FLOPs of a kernel of the gated delta rule, and those that take as long at the
    peak, where a product of an inverse is three."""
    if not (kernel := re.search(r"tpu_custom_call.*gated_delta_(forward|backward)", i.rest)):
        return 0.0, 0.0
    shapes = _SHAPE.findall(i.rest.partition("constraints=")[2])
    queries, _, values = [numbers(dims) for kind, dims in shapes if "f" in kind][:3]
    (*chunks, C, k), (R, _, v) = queries, values[-3:]
    inverse = R * 2 * (C.bit_length() - 2) * C**3
    others = 2 * C * C * k + R * (C * C * (k + 2 * v) + 3 * C * k * v)
    if kernel[1] == "backward":  # all again but what tokens read, and two products for each
        inverse += R * 2 * C**3
        others = 3 * others - R * (C * C * v + C * k * v)
    times = 2.0 * math.prod(chunks)
    return times * (inverse + others), times * (3 * inverse + others) / _DELTA_SPEED


def share_of_row(rest: str, costs_n: np.ndarray, part: float) -> float:
    """Adds up the costs, of n equal parts of a row, that fall to the most loaded device in a kernel
    for a `part` of the row's queries, such as 1/2. The scope around it, in `rest` of its line, says
    how tokens lie on devices, whose number divides n (`attention.attend`); without one each device
    has a fair share."""
    scope = re.search(r"attention_of_(\d+)_devices_(balanced|in_order)", rest)
    devices, order = int(scope[1]) if scope else 1, slice(None)
    if scope and scope[2] == "balanced":
        order = np.asarray(balanced_order(costs_n[None], 1, devices))[0]
    return float(costs_n[order].reshape(devices, -1).sum(1).max()) * part * devices


def _grouped_flops(i: Instruction) -> tuple[float, float]:
    """Counts the FLOPs of a product of tokens with their experts, `gmm` or `tgmm` of megablox, for
    the rows that the scope around it gives (`grouped.describe`), and for those of all its tiles; 0
    for any other custom call."""
    scope = re.search(r"grouped_rows_(\d+)_tiled_(\d+)", i.rest)
    if not (scope and re.match("t?gmm", i.name)):
        return 0.0, 0.0
    shapes = _SHAPE.findall(i.rest.partition("constraints=")[2])
    sizes = [numbers(dims) for kind, dims in shapes if "f" in kind]
    matrix = math.prod(i.shape[-2:] if i.name.startswith("tgmm") else max(sizes, key=len)[-2:])
    return 2.0 * int(scope[1]) * matrix, 2.0 * int(scope[2]) * matrix


def _receive_bytes(kind: str, i: Instruction) -> float:
    """Counts the bytes that a device receives in a transfer, in a ring; a ValueError as
    `groups`."""
    if kind == "collective-permute":  # its other operands are where the result goes
        return i.operands[0].bytes
    if kind == "ragged-all-to-all":  # under equal loads: the larger of its arrays has room for more
        sent, received, *_ = i.operands
        return min(sent.bytes, received.bytes) * _share(kind, groups(i.rest, 1).shape[1])
    return i.operand_bytes * _share(kind, groups(i.rest, 1).shape[1])


def _send_bytes(i: Instruction) -> tuple[str, float]:
    """Reads a send to other slices as a collective among one chip of each: its kind and bytes. Its
    target is `"{1,2}x{0:3}"`, slices and chips, or groups of chips `{{100000,200000},...}`."""
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.rest)[1]
    kind = kind.lower().replace("_", "-").replace("one-to-one", "collective-permute")
    group = re.search(r"_xla_megascale_target=[^0-9]*([0-9,]*)", i.rest)[1].count(",") + 1
    return kind, i.operands[0].bytes * _share(kind, group)


def _share(kind: str, group: int) -> float:
    """Returns what a device of a group receives, as a share of the bytes that each one sends."""
    others = (group - 1) / group
    shares = {"all-gather": group - 1, "all-reduce": 2 * others, "collective-permute": 1}
    return shares.get(kind, others)


def groups(rest: str, devices: int) -> np.ndarray:
    """Reads from an instruction's `rest` which devices take part in a transfer with each other:
    [groups, devices of a group]. `devices` are all, which `{}` means.

    XLA writes `{{0,2},{1,3}}`, `[2,4]<=[4,2]T(1,0)`, or `mesh['x'=2,'y'=4] {'y'}`; the last form
    may have parts of an axis, `'y':(1)2`, and `device_ids=([2,4]T(1,0))` or a list of ids.

    Raises:
      ValueError: the text has another form.
    """
    text = rest.partition("replica_groups=")[2]
    if text.startswith("{}"):
        return np.arange(devices)[None]
    if match := re.match(r"\{(\{[0-9,]+\}(?:,\{[0-9,]+\})*)\}", text):
        return np.array([numbers(group) for group in match[1].split("},{")])
    if match := re.match(r"\[(\d+),(\d+)\]<=(\[[0-9,]+\](?:T\([0-9,]+\))?)", text):
        return _ids(match[3]).reshape(int(match[1]), int(match[2]))
    match = re.match(r"mesh\[([^\]]*)\](?:, ?device_ids=\((.*?)\)(?= ?\{))? ?\{([^}]*)\}", text)
    if not match:
        raise ValueError(f"who takes part in a transfer cannot be read: {text[:100]}")
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    # Devices of a group differ only in their coordinates along the axes, or parts of axes, named.
    coordinates = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", match[3]):
        coordinate, size = coordinates[list(sizes).index(name)], int(size or sizes[name])
        stride = sizes[name] // (int(before or 1) * size)
        coordinate -= coordinate // stride % size * stride
    _, group = np.unique(coordinates, axis=1, return_inverse=True)
    ids = _ids(match[2] or f"[{coordinates.shape[1]}]")
    return ids[np.argsort(group.ravel(), kind="stable")].reshape(group.max() + 1, -1)


def _ids(text: str) -> np.ndarray:
    if "[" not in text:
        return np.array(numbers(text))
    shape, order = map(numbers, text.partition("T")[::2])
    return np.arange(math.prod(shape)).reshape(shape).transpose(order or range(len(shape))).ravel()
