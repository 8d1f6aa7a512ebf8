"""A roofline of a compiled GPU program: the least time its kernels and transfers can take.

A GPU's compiler gives no times. What it does give is a scheduled program: which kernels run in
which order, what each of them reads and writes, and where every transfer starts and has to be done.
Two clocks follow the schedule. Kernels run one after another, each at the rate of its arithmetic or
of its memory, whichever is slower. Transfers run beside them, one after another over the links.
Where a transfer has to be done, the kernels wait for it.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Sequence

from maxramp.planning import hlo

# No kernel of their own: they name memory, or run others.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"}
_FREE |= {"conditional", "partition-id", "replica-id", "after-all", "opt-barrier"}
_SLICES = ("dynamic-slice", "slice", "gather")

# Products of cuDNN's flash attention, each of [T, h] with [h, T] or [T, T] with [T, h]: scores and
# result; scores again, dP, dV, dK, dQ.
_ATTENTION = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a GPU does in a second, as far as a program can count on it."""

    flops: float
    memory: float  # bytes to and from its memory
    nvlink: float  # bytes into it from the GPUs of its node
    network: float  # bytes into it from other nodes


@dataclasses.dataclass
class Work:
    """What one run of a program does on one GPU.

    Attributes:
      seconds: from start to end.
      compute_seconds: of its kernels alone; the rest of `seconds` waits for transfers.
      flops: of matrix products and attention.
      nvlink_bytes: kind -> bytes that a GPU receives from GPUs of its node.
      network_bytes: kind -> bytes that it receives from other nodes.
    """

    seconds: float = 0.0
    compute_seconds: float = 0.0
    flops: float = 0.0
    nvlink_bytes: dict[str, float] = dataclasses.field(default_factory=collections.Counter)
    network_bytes: dict[str, float] = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "Work", times: int) -> None:
        """Adds what another program does, so many times."""
        for name in ("nvlink_bytes", "network_bytes"):
            for kind, moved in getattr(other, name).items():
                getattr(self, name)[kind] += times * moved
        for name in ("seconds", "compute_seconds", "flops"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))


def count(text: str, nodes: Sequence[int], rates: Rates) -> Work:
    """Adds up the work of a compiled program.

    Args:
      text: `jax.stages.Compiled.as_text()` of a program for GPUs.
      nodes: the node of every device, in the order of the program's device assignment.
      rates: of a GPU.

    Raises:
      ValueError: the text does not say how often a loop runs, or who takes part in a transfer.
    """
    computations, entry = hlo.parse(text)

    @functools.cache
    def work_of(name: str) -> Work:
        work, link = Work(), 0.0  # `link`: when the transfers that have started are done
        done: dict[str, float] = {}
        table = computations[name]
        for i in table.values():
            kind = i.opcode.removesuffix("-start")
            if i.opcode == "while":
                body = work_of(i.attribute("body"))
                work.add(body, hlo.turns(i, table, computations))
                link = max(link, work.seconds)
            elif i.opcode == "call":
                work.add(work_of(i.attribute("to_apply")), 1)
            elif kind in hlo.COLLECTIVES:
                nvlink, network = _moved(i, kind, table, nodes)
                work.nvlink_bytes[kind] += nvlink
                work.network_bytes[kind] += network
                taken = max(nvlink / rates.nvlink, network / rates.network)
                link = done[i.name] = max(link, work.seconds) + taken
                if i.opcode == kind:  # nothing runs beside it
                    work.seconds = link
            elif i.opcode.endswith("-done"):
                work.seconds = max([work.seconds, *(done.get(o, 0.0) for o in i.operands)])
            elif i.opcode not in _FREE:
                flops = _flops(i, table, computations)
                touched = _touched(i, table, computations)
                taken = max(flops / rates.flops, touched / rates.memory)
                work.flops += flops
                work.seconds += taken
                work.compute_seconds += taken
        return work

    return work_of(entry)


def _flops(i: hlo.Instruction, table: hlo.Computation, computations: dict) -> float:
    """Of a kernel's matrix products, those of a fusion's computation included."""
    if i.opcode == "dot":
        return hlo.dot_flops(i, table)
    if i.opcode != "custom-call":
        inner = computations.get(i.attribute("calls"), {})
        return sum(_flops(j, inner, computations) for j in inner.values())
    target = re.search(r'custom_call_target="([^"]*)"', i.rest)[1]
    shapes = [table[o].shape for o in i.operands if o in table]
    if target.startswith("__cublas"):
        dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.rest)[1]
        return 2.0 * math.prod(i.shape) * math.prod(shapes[0][d] for d in hlo.numbers(dims))
    if target in _ATTENTION:
        (B, T, H, h), (_, S, _, _) = shapes[:2]
        causal = 0.5 if '"mask_type": "CAUSAL"' in i.rest else 1.0  # half is never made
        return _ATTENTION[target] * 2.0 * B * H * T * S * h * causal
    return 0.0


def _touched(i: hlo.Instruction, table: hlo.Computation, computations: dict) -> float:
    """Bytes that a kernel reads and writes: of an array that it only cuts from, what it cuts."""
    inner = computations.get(i.attribute("calls"))
    if inner:
        kernel, names, root = list(inner.values()), inner, inner[inner.root]
        operands = [j for j in kernel if j.opcode == "parameter"]
    else:
        kernel, names, root = [i], table, i
        operands = [table[o] for o in i.operands if o in table]

    def read(operand: hlo.Instruction) -> float:
        parts = 0.0
        for user in (j for j in kernel if operand.name in j.operands):
            first = user.operands[0] == operand.name
            if user.opcode == "bitcast":
                parts += read(user)
            elif first and user.opcode in _SLICES:
                parts += user.bytes
            elif not (first and user.opcode == "dynamic-update-slice"):
                return operand.bytes
        return min(parts, operand.bytes)

    def written(result: hlo.Instruction) -> float:
        if result.opcode in ("bitcast", "tuple"):
            return sum(written(names[o]) for o in result.operands if o in names)
        if result.opcode == "dynamic-update-slice" and result.operands[1] in names:
            return names[result.operands[1]].bytes
        return result.bytes

    return sum(map(read, operands)) + written(root)


def _moved(
    i: hlo.Instruction, kind: str, table: hlo.Computation, nodes: Sequence[int]
) -> tuple[float, float]:
    """Bytes that a GPU receives over NVLink and over the network.

    Each GPU of a group fetches its share of what the other nodes have, and passes it on inside its
    own node, so that what a node receives crosses the network once.
    """
    size = sum(table[o].bytes for o in i.operands if o in table)
    if kind == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", i.rest.partition("source_target_pairs=")[2])
        crosses = any(nodes[int(a)] != nodes[int(b)] for a, b in pairs)
        return (0.0, size) if crosses else (size, 0.0)
    members = hlo.groups(i.rest, len(nodes))
    count = members.shape[1]
    spread = max(len({nodes[d] for d in group}) for group in members)  # nodes of a group
    if kind == "all-to-all":
        inside = count // spread
        return (inside - 1) * size / count, (count - inside) * size / count
    share = {"all-gather": size, "all-reduce": 2 * size / count}.get(kind, size / count)
    return (count - spread) * share, (spread - 1) * share
