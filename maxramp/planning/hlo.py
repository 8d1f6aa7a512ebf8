"""What a compiled program does, read from its text: work, cycles and collectives, loops included.

A compiler's own cost analysis counts the body of a loop once. Here every computation is weighted by
how often it runs: once for each call, and a loop's body as often as its condition says.

The text is XLA's: computations `%name (...) -> ... {`, instructions
`%name = type[shape]{layout} opcode(%operand, ...), attribute=value`. On TPU it carries the
compiler's estimate of an instruction's cycles.
"""

import collections
import dataclasses
import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping

_BYTES = {"pred": 1, "f8": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\((.*)$")
_SHAPE = re.compile(r"([a-z]+[0-9a-z]*)\[([0-9,]*)\]")


@dataclasses.dataclass
class Instruction:
    """One instruction of a computation."""

    name: str
    types: list[tuple[str, tuple[int, ...]]]
    opcode: str
    rest: str  # operands and attributes
    is_root: bool

    def attribute(self, name: str) -> str:
        """The text behind `name=`, up to a comma; empty if there is none."""
        found = re.search(rf"\b{name}=%?([^\s,}}]+)", self.rest)
        return found[1] if found else ""

    def operands(self) -> list[str]:
        """Names of the instructions whose results it takes."""
        return re.findall(r"%([^\s,)]+)", self.rest.partition(")")[0])

    @property
    def bytes(self) -> int:
        """Of its result."""
        return sum(_size_of(kind) * math.prod(shape) for kind, shape in self.types)


Computations = dict[str, list[Instruction]]

# What the text says of a result: an integer, the elements of a tuple, or nothing.
Known = int | tuple["Known", ...] | None
_COMPUTED = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_PASSED_ON = ("copy", "bitcast", "convert", "opt-barrier")
_MOST_TURNS = 10_000  # that are followed; of a loop that never ends as well


def _size_of(kind: str) -> float:
    if kind in _BYTES:
        return _BYTES[kind]
    bits = re.search(r"\d+", kind)
    return int(bits[0]) / 8 if bits else 0


@dataclasses.dataclass
class Work:
    """What one run of a program does on one device.

    Attributes:
      flops: of matrix products, those of kernels included.
      cycles: the compiler's estimate of everything but collectives and kernels.
      kernel_flops: of attention kernels, which the compiler does not look into.
      collective_bytes: kind -> bytes that a device receives, by a ring over its group, from devices
        of its slice.
      waited_bytes: those of them that nothing else runs beside.
      network_bytes: kind -> bytes that a device receives from other slices.
    """

    flops: float = 0.0
    cycles: float = 0.0
    kernel_flops: float = 0.0
    collective_bytes: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    waited_bytes: float = 0.0
    network_bytes: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )


def count(text: str) -> Work:
    """Adds up the work of a compiled program.

    Args:
      text: `jax.stages.Compiled.as_text()`.

    Raises:
      ValueError: a loop's number of turns cannot be read.
    """
    computations, entry = parse(text)
    work = Work()

    def add(name: str, times: float) -> None:
        table = {i.name: i for i in computations[name]}
        for i in table.values():
            if cycles := re.search(r'"estimated_cycles":"(\d+)"', i.rest):
                work.cycles += times * int(cycles[1])
            if i.opcode in ("convolution", "dot"):
                lhs, rhs = (table[o].types[0][1] for o in i.operands()[:2])
                product = dot_flops if i.opcode == "dot" else _convolution_flops
                work.flops += times * product(i, lhs, rhs)
            if i.opcode == "custom-call" and (flops := _kernel_flops(i)):
                work.flops += times * flops
                work.kernel_flops += times * flops
            base = i.opcode.removesuffix("-start")
            if base in COLLECTIVES:
                _add_collective(work, i, base, name, times, table)
            if i.opcode == "send" and "_xla_megascale_transfer_type" in i.rest:
                _add_transfer(work, i, times, table)
            if i.opcode == "while":
                add(i.attribute("body"), times * turns(i, table, computations))
            elif i.opcode in ("fusion", "call", "async-start", "conditional"):
                for called in _called(i):
                    add(called, times)

    add(entry, 1.0)
    return work


def parse(text: str) -> tuple[Computations, str]:
    """The computations of a compiled program in the order of their texts, and the entry's name."""
    computations: Computations = {}
    entry, current = "", []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif found := _INSTRUCTION.match(line):
            root, name, kind, opcode, rest = found.groups()
            types = [
                (t, tuple(int(n) for n in dims.split(",") if n))
                for t, dims in _SHAPE.findall(re.sub(r"\{[^}]*\}", "", kind))
            ]
            current.append(Instruction(name, types, opcode, rest, bool(root)))
    return computations, entry


def _called(i: Instruction) -> Iterator[str]:
    for attribute in ("calls", "to_apply", "true_computation", "false_computation"):
        if name := i.attribute(attribute):
            yield name


def turns(loop: Instruction, table: Mapping[str, Instruction], computations: Computations) -> int:
    """How often a loop runs: the integers of its state are followed until its condition fails.

    The number that a compiler writes beside a loop counts only where the text does not tell: a loop
    that was unrolled or peeled later has other turns.

    Args:
      loop: a `while`.
      table: the instructions of its computation by name.
      computations: from `parse`.

    Raises:
      ValueError: neither says it.
    """

    @functools.cache
    def read(name: str) -> tuple[dict[str, Instruction], str]:
        instructions = computations[name]
        return {i.name: i for i in instructions}, next(i.name for i in instructions if i.is_root)

    def result(name: str, argument: Callable[[int], Known]) -> Known:
        instructions, root = read(name)
        return _values(instructions, result, argument)(root)

    state = _values(table, result, lambda number: None)(loop.operands()[0])
    for count in range(_MOST_TURNS):
        goes_on = result(loop.attribute("condition"), lambda number: state)  # noqa: B023
        if goes_on is None:
            break
        if not goes_on:
            return count
        before, state = state, result(loop.attribute("body"), lambda number: state)  # noqa: B023
        if state == before:  # and so for ever
            break
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    raise ValueError(f"the loop {loop.name} does not say how often it runs")


def _values(
    table: Mapping[str, Instruction],
    result: Callable[[str, Callable[[int], Known]], Known],
    argument: Callable[[int], Known],
) -> Callable[[str], Known]:
    """What is known of the results of a computation's instructions, by their names.

    Args:
      table: the instructions by name.
      result: what is known of the result of another computation, called with these arguments.
      argument: what is known of a parameter, by its number.
    """

    @functools.cache
    def value(name: str) -> Known:
        if name not in table:
            return None
        i = table[name]
        if not any(kind[0] in "psu" and math.prod(shape) == 1 for kind, shape in i.types):
            return None
        of = i.operands()
        if i.opcode == "constant":
            found = re.match(r"(-?\d+|true|false)\)", i.rest)
            return json.loads(found[1]) if found else None
        if i.opcode == "parameter":
            return argument(int(i.rest.partition(")")[0]))
        if i.opcode == "tuple":
            return tuple(map(value, of))
        if i.opcode == "copy-start":
            return value(of[0]), value(of[0])
        if i.opcode in ("get-tuple-element", "copy-done"):
            elements = value(of[0])
            return elements and elements[int(i.attribute("index") or 0)]
        if i.opcode in _PASSED_ON:
            return value(of[0])
        if i.opcode in ("fusion", "call"):
            called = i.attribute("calls") or i.attribute("to_apply")
            return result(called, lambda number: value(of[number]))
        compute = _COMPUTED.get(i.opcode) or _COMPUTED.get(i.attribute("direction"))
        known = [value(operand) for operand in of] if compute else [None]
        return None if None in known else compute(*known)

    return value


def dot_flops(i: Instruction, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> float:
    """2 for each product of elements of a `dot`, from the shapes of its operands."""
    dims = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", i.rest)
    contracted = math.prod(lhs[int(d)] for d in dims[1].split(",") if d) if dims else 1
    return 2.0 * math.prod(i.types[0][1]) * contracted


def _convolution_flops(i: Instruction, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> float:
    """2 for each product of an input and a kernel element; padding and holes are no products.

    TPU programs write matrix products so, with batch dimensions as spatial ones of a window that
    meets one element at a time.
    """
    inputs, kernel, output = re.split("_|->", i.attribute("dim_labels"))
    out = i.types[0][1]
    window = dict(
        re.findall(r"(\w+)=([0-9x_-]+)", i.rest.partition("window={")[2].partition("}")[0])
    )
    flops = 2.0 * out[output.index("b")] * rhs[kernel.index("o")] * rhs[kernel.index("i")]
    for d in (int(label) for label in output if label.isdigit()):
        size, stride, base, dilation = (
            int(window[name].split("x")[d]) if name in window else 1
            for name in ("size", "stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(window["pad"].split("x")[d].split("_")[0]) if "pad" in window else 0
        holes_included = (lhs[inputs.index(str(d))] - 1) * base + 1
        flops *= sum(
            1
            for o in range(out[output.index(str(d))])
            for k in range(size)
            if 0 <= (at := o * stride + k * dilation - low) < holes_included and at % base == 0
        )
    return flops


# Products of a causal attention kernel, each of [T, h] with [h, T] or [T, T] with [T, h]: scores
# and result; scores, dP, dV, dK; scores, dP, dQ.
_KERNELS = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}


def _kernel_flops(i: Instruction) -> float:
    """Of an attention kernel, from its queries [..., H, T, h]; half of the scores are never made.

    The queries are the first operand of real numbers; what the mask is made of is integers.
    """
    products = next((n for name, n in _KERNELS.items() if i.name.startswith(name)), 0)
    found = re.search(r"\b(?:b?f\d+)\[([0-9,]+)\]", i.rest.partition("constraints=")[2])
    if not products or not found:
        return 0.0
    *heads, length, width = map(int, found[1].split(","))
    return products * 2.0 * math.prod(heads) * length * length * width / 2


def _add_collective(
    work: Work, i: Instruction, kind: str, computation: str, times: float, table: dict
) -> None:
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # what TPU makes of one whose result is cut up at once
    operands = [table[o].bytes for o in i.operands() if o in table]
    # A permute's other operands are where its result goes.
    size = sum(operands[:1]) if kind == "collective-permute" else sum(operands)
    moved = times * _received(kind, size, _group_size(i.rest))
    work.collective_bytes[kind] += moved
    if not i.opcode.endswith("-start") and "async" not in computation:
        work.waited_bytes += moved


def _add_transfer(work: Work, i: Instruction, times: float, table: dict) -> None:
    """What a send to other slices stands for: a collective among one chip of each.

    Its target is `"{1,2}x{0:3}"`, slices and chips, or groups of chips `{{100000,200000},...}`.
    """
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.rest)[1]
    kind = kind.lower().replace("_", "-").replace("one-to-one", "collective-permute")
    group = re.search(r"_xla_megascale_target=[^0-9]*([0-9,]*)", i.rest)[1].count(",") + 1
    work.network_bytes[kind] += times * _received(kind, table[i.operands()[0]].bytes, group)


def _received(kind: str, size: float, group: int) -> float:
    """Bytes that a device of a group receives when each gives `size` bytes to a collective."""
    if kind == "all-gather":
        return size * (group - 1)
    if kind == "all-reduce":
        return 2 * size * (group - 1) / group
    if kind == "collective-permute":
        return size
    return size * (group - 1) / group


def _group_size(rest: str) -> int:
    """Devices of a group: `[groups,size]<=[...]`, `{{0,2},{1,3}}`, or axes of a named mesh."""
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(found[1])
    if found := re.search(r"replica_groups=\{\{([0-9,]*)\}", rest):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", found[2]))
    return 1
