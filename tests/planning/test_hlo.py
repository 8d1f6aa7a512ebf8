"""The reader of compiled programs: products by their formula, bytes by what a mesh axis sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_libtpu
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxramp.model.parts.attention import AttentionMask, attend
from maxramp.model.parts.gated_delta import gated_delta
from maxramp.parallel.axes import AXES
from maxramp.parallel.sharding import X_BTHh
from maxramp.planning import gpu, hlo, machine, topology
from maxramp.planning.topology import CHIPS

# A FLOP, a cycle and a byte in a second each.
UNIT = topology.Chip(1, 1e-12, 1e-9, 1e-9, 1e-9, 1e-9, 3, 1)


def pod(name: str, sizes: tuple[int, ...], slices: int = 1, context: int = 1) -> Mesh:
    """A mesh of data, fsdp and tensor over a pod's chips; its first axis is over the slices."""
    data, fsdp, tensor = sizes
    sizes = (data, 1, fsdp, 1, context, tensor)  # one stage; whole experts
    devices = machine.describe_devices(topology.parse(name), slices)
    if slices == 1:
        grid = mesh_utils.create_device_mesh(sizes, devices)
    else:
        inner = (sizes[0] // slices, *sizes[1:])
        grid = mesh_utils.create_hybrid_device_mesh(inner, (slices, 1, 1, 1, 1, 1), devices)
    return Mesh(grid, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def on(mesh: Mesh, shape: tuple[int, ...], dtype: str, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def count(mesh: Mesh, function, *arguments, options=None) -> hlo.StepCost:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = jax.jit(function).lower(*arguments).compile(options).as_text()
        return hlo.count(text, UNIT)


def sent(mesh: Mesh, function, shape: tuple[int, int] = (512, 512)) -> hlo.StepCost:
    """The work of a function of what each device has, float32 of a shape."""
    x = on(mesh, (shape[0] * mesh.size, shape[1]), "float32", P(AXES, None))
    mapped = jax.shard_map(
        lambda x: function(x * 2) + 1, in_specs=P(AXES), out_specs=P(AXES), check_vma=False
    )
    return count(mesh, mapped, x)


MIB = 2.0**20  # of float32[512, 512]


def collectives(axis: str, n: int) -> dict:
    """A function of each kind over an axis of n devices, and the shares that a device receives."""
    turns = [(i, (i + 1) % n) for i in range(n)]
    return {
        "all-gather": (lambda x: jax.lax.all_gather(x, axis, tiled=True), n - 1),
        "all-reduce": (lambda x: jax.lax.psum(x, axis), 2 * (n - 1) / n),
        "collective-permute": (lambda x: jax.lax.ppermute(x, axis, turns), 1),
    }


@needs_libtpu
@pytest.mark.parametrize("axis, n", [("data", 2), ("fsdp", 4), ("tensor", 2)])
def test_bytes_along_each_axis(axis, n):
    """A ring over n devices that each begin with a MiB: what each receives."""
    mesh = pod("v5p:2x2x4", (2, 4, 2))
    for kind, (function, received) in collectives(axis, n).items():
        work = sent(mesh, function)
        assert work.collective_bytes == {kind: received * MIB} and not work.network_bytes


@needs_libtpu
def test_bytes_between_slices():
    """Three slices: what crosses them is counted apart, and so is each kind."""
    mesh = pod("v5p:2x2x1", (3, 4, 1), slices=3)
    for kind, (function, received) in collectives("data", 3).items():
        work = sent(mesh, function)
        assert work.network_bytes == {kind: received * MIB} and not work.collective_bytes
    # A sum over chips and slices: 1/4 of it crosses, once it is scattered.
    work = sent(mesh, lambda x: jax.lax.psum(x, ("data", "fsdp")))
    assert work.network_bytes == {"all-reduce": 2 * 2 / 3 * MIB / 4}
    assert sum(work.collective_bytes.values()) == 2 * 3 / 4 * MIB


@needs_libtpu
def test_a_gather_on_a_torus_runs_along_its_rings():
    """Where sides wrap, 64 chips gather along the rings; elsewhere XLA adds up padded shards."""
    work = sent(pod("v5p:4x4x4", (1, 64, 1)), lambda x: jax.lax.all_gather(x, "fsdp", tiled=True))
    assert work.collective_bytes == {"all-gather": 63 * MIB}


@needs_libtpu
def test_windowed_products_count_once():
    """A weight's travel in a loop, two turns in one, leaves a device's products at 2 B T D F."""
    mesh = pod("v5p:2x4x4", (1, 16, 2))
    B, T, D, F = 32, 4096, 4096, 14336
    x = on(mesh, (B, T, D), "bfloat16", P("fsdp", None, None))
    w = on(mesh, (D, F), "bfloat16", P("fsdp", "tensor"))

    def product(x, w):
        return jnp.einsum("BTD,DF->BTF", x, w, out_sharding=P("fsdp", None, "tensor"))

    always = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"}
    work = count(mesh, product, x, w, options=always)
    assert "collective-permute" in work.collective_bytes
    assert work.flops == 2 * B * T * D * F / mesh.size


@needs_libtpu
@pytest.mark.parametrize(("rows", "window"), [(1, 0), (2, 0), (1, 512), (1, 600)])
def test_attention_kernels(rows, window):
    """Forward 2 products, backward 4 and 3, of each row, head and block that no mask empties."""
    mesh, T, H, K, h = pod("v5p:2x2x1", (1, 4, 1)), 2048, 4, 2, 128
    q, k = (on(mesh, (4 * rows, T, heads, h), "bfloat16", X_BTHh) for heads in (H, K))

    def loss(q, k, v):
        return attend(q, k, v, AttentionMask(window=window), "splash").astype(jnp.float32).sum()

    work = count(mesh, jax.grad(loss, (0, 1, 2)), q, k, k)
    behind = np.arange(T)[:, None] - np.arange(T)
    seen = (behind >= 0) & (behind < (window or T))
    blocks = seen.reshape(4, 512, 4, 512).any((1, 3)).sum()
    assert work.flops == (2 + 4 + 3) * 2 * rows * H * blocks * 512 * 512 * h
    assert work.attention_seconds == pytest.approx(work.flops)


@needs_libtpu
@pytest.mark.parametrize("rows", [1, 2])
def test_attention_to_gathered_keys_counts_the_last_part(rows):
    """Of 4 parts of a row, in order, the last sees 4 blocks. Several rows are a loop over them."""
    mesh, T, H, K, h = pod("v5p:2x2x1", (1, 1, 1), context=4), 2048, 4, 2, 128
    q, k = (on(mesh, (rows, T, heads, h), "bfloat16", X_BTHh) for heads in (H, K))

    def loss(q, k, v):
        return attend(q, k, v, AttentionMask(), "splash", "all_gather").astype(jnp.float32).sum()

    work = count(mesh, jax.grad(loss, (0, 1, 2)), q, k, k)
    assert work.flops == (2 + 4 + 3) * 2 * rows * H * 4 * 512 * 512 * h


@needs_libtpu
def test_kernels_of_gated_delta_rules():
    """In products of 128 x 128 x 128, of which a chunk's inverse takes 12."""
    mesh, T, K, H, h = pod("v5p:2x2x1", (1, 4, 1)), 256, 2, 4, 128
    shapes = (4, T, K, h), (4, T, K, h), (4, T, H, h), (4, T, H), (4, T, H)
    arrays = [on(mesh, shape, "float32", P("fsdp")) for shape in shapes]
    arrays[2] = arrays[2].update(dtype=jnp.bfloat16)

    def gradients(*arrays):
        segments = jnp.zeros((1, T), jnp.int32)
        return jax.grad(lambda *x: gated_delta(*x, segments)[0].sum(), range(5))(*arrays)

    mapped = jax.shard_map(gradients, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False)
    work = count(mesh, mapped, *arrays)
    forward, backward = 12 * H + 2 * K + 6 * H, 14 * H + 3 * (2 * K + 6 * H) - 2 * H
    assert work.flops == T // 128 * (forward + backward) * 2 * 128**3


def test_the_most_loaded_device():
    costs_n = np.arange(1.0, 17.0)
    assert hlo.share_of_row("", costs_n, 1 / 4) == costs_n.mean() * 4
    last = costs_n[12:].sum()
    assert hlo.share_of_row("/attention_of_4_devices_in_order/", costs_n, 1 / 4) == last
    balanced = hlo.share_of_row("/attention_of_4_devices_balanced/", costs_n, 1 / 4)
    assert costs_n.mean() * 4 <= balanced < 1.05 * costs_n.mean() * 4
    assert hlo.share_of_row("/attention_of_4_devices_in_order/", costs_n, 1 / 8) == last / 2


PROGRAM = """
%inner (p: f32[8,4]) -> f32[8,4] {
  %p.1 = f32[8,4]{1,0} parameter(0)
  %w.1 = f32[4,4]{1,0} constant({...})
  ROOT %d.1 = f32[8,4]{1,0} dot(%p.1, %w.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%cond (t: (s32[], f32[8,4])) -> pred[] {
  %t.2 = (s32[], f32[8,4]{1,0}) parameter(0)
  %n.2 = s32[] constant(5)
  %i.2 = s32[] get-tuple-element(%t.2), index=0
  ROOT %lt.2 = pred[] compare(%i.2, %n.2), direction=LT
}

%body (t: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %t.3 = (s32[], f32[8,4]{1,0}) parameter(0)
  %i.3 = s32[] get-tuple-element(%t.3), index=0
  %one.3 = s32[] constant(1)
  %next.3 = s32[] add(%i.3, %one.3)
  %x.3 = f32[8,4]{1,0} get-tuple-element(%t.3), index=1
  %f.3 = f32[8,4]{1,0} fusion(%x.3), calls=%inner, backend_config={"estimated_cycles":"7"}
  %r.3 = f32[8,4]{1,0} all-reduce(%f.3), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %o.3 = (s32[], f32[8,4]{1,0}) tuple(%next.3, %r.3)
}

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %a.4 = f32[8,4]{1,0} parameter(0)
  %i.4 = s32[] constant(0)
  %s.4 = (s32[], f32[8,4]{1,0}) tuple(%i.4, %a.4)
  %l.4 = (s32[], f32[8,4]{1,0}) while(%s.4), condition=%cond, body=%body
  ROOT %g.4 = f32[8,16]{1,0} all-gather-start(%a.4), replica_groups={{0,1,2,3},{4,5,6,7}}
}
"""


def changed(*changes: tuple[str, str]) -> str:
    text = PROGRAM
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def test_the_reader_of_programs():
    """Five turns of a product of 8 x 4 x 4 and of an all-reduce over groups of 4."""
    work = hlo.count(PROGRAM, UNIT)
    assert work.flops == 5 * 2 * 8 * 4 * 4 and work.compute_seconds == pytest.approx(7 * 5)
    reduced = 5 * 2 * 128 * 3 / 4
    assert work.collective_bytes == {"all-reduce": reduced, "all-gather": 128 * 3}
    assert work.collective_seconds == pytest.approx(reduced)


ADD_TWO = """%add_two (i: s32[]) -> s32[] {
  %i.0 = s32[] parameter(0)
  %two.0 = s32[] constant(2)
  ROOT %sum.0 = s32[] add(%i.0, %two.0)
}

"""
SAYS_9 = ("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"9"}}')
LOOPS = {
    "unrolled by two, and counted before": (3, SAYS_9, ("constant(1)", "constant(2)")),
    "its first turns peeled": (3, ("constant(0)", "constant(2)")),
    "down to a number": (
        *(4, ("constant(0)", "constant(8)"), ("constant(1)", "constant(-1)")),
        *(("constant(5)", "constant(4)"), ("direction=LT", "direction=GT")),
    ),
    "a start that was copied": (
        5,
        ("tuple(%i.4,", "tuple(%j.4,"),
        ("  %s.4", "  %b.4 = (s32[], s32[], u32[]) copy-start(%i.4)\n  %s.4"),
        ("  %s.4", "  %j.4 = s32[] copy-done(%b.4)\n  %s.4"),
    ),
    "a counter that was copied": (
        5,
        ("tuple(%next.3,", "tuple(%kept.3,"),
        ("  ROOT %o.3", "  %kept.3 = s32[] copy(%next.3)\n  ROOT %o.3"),
    ),
    "a step that a fusion adds": (
        3,
        ("add(%i.3, %one.3)", "fusion(%i.3), kind=kLoop, calls=%add_two"),
        ("%cond (", f"{ADD_TWO}%cond ("),
    ),
    "thousands of turns": (2000, ("constant(5)", "constant(2000)")),
    "a limit that the compiler alone knows": (9, SAYS_9, ("constant(5)", "custom-call()")),
    "rows that experts have, if loads are equal": (
        16,
        ("body=%body", 'body=%body, metadata={op_name="mlp/row_blocks_16/while"}'),
        ("constant(5)", "custom-call()"),
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_how_often_loops_run(loop):
    turns, *changes = LOOPS[loop]
    work = hlo.count(changed(*changes), UNIT)
    assert work.compute_seconds == pytest.approx(7 * turns)


SAYS_NOT = {
    "no limit": ("constant(5)", "custom-call()"),
    "no counter": ("add(", "divide("),
    "no end": ("direction=LT", "direction=GE"),
    "no step": ("constant(1)", "constant(0)"),
    "an end that is far": ("constant(5)", "constant(2000000000)"),
}


@pytest.mark.parametrize("change", SAYS_NOT)
def test_a_loop_of_unknown_length_is_refused(change):
    changes = [SAYS_NOT[change]]
    if change == "no end":  # from 5 up
        changes += [("constant(0)", "constant(7)")]
    with pytest.raises(ValueError, match="loop l.4 does not say how often"):
        hlo.count(changed(*changes), UNIT)


# 1e6 flops, 1e6 bytes of memory, 1e4 over NVLink and 1e3 over the network a second.
RATES = (1e6, 1e6, 1e4, 1e3)
TWO_NODES = [0, 0, 0, 0, 1, 1, 1, 1]

# A loop of four turns gathers a weight while a product of 8 x 16 x 8 runs beside it. The product
# reads a slice of a stack of weights; afterwards its sum is reduced, and nothing runs beside that.
TIMED = """
%product (p: f32[8,16], s: f32[4,16,8], i: s32[]) -> f32[8,8] {
  %p.1 = f32[8,16]{1,0} parameter(0)
  %s.1 = f32[4,16,8]{2,1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %c.1 = f32[1,16,8]{2,1,0} dynamic-slice(%s.1, %i.1), dynamic_slice_sizes={1,16,8}
  %w.1 = f32[16,8]{1,0} bitcast(%c.1)
  ROOT %d.1 = f32[8,8]{1,0} dot(%p.1, %w.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (t: (f32[8,16], f32[4,16,8], s32[])) -> (f32[8,16], f32[4,16,8], s32[]) {
  %t.2 = (f32[8,16]{1,0}, f32[4,16,8]{2,1,0}, s32[]) parameter(0)
  %x.2 = f32[8,16]{1,0} get-tuple-element(%t.2), index=0
  %w.2 = f32[4,16,8]{2,1,0} get-tuple-element(%t.2), index=1
  %i.2 = s32[] get-tuple-element(%t.2), index=2
  %g.2 = ((f32[2,8]{1,0}), f32[16,8]{1,0}) all-gather-start(%v.2), replica_groups=[1,8]<=[8]
  %y.2 = f32[8,8]{1,0} fusion(%x.2, %w.2, %i.2), kind=kCustom, calls=%product
  %h.2 = f32[16,8]{1,0} all-gather-done(%g.2)
  ROOT %o.2 = (f32[8,16]{1,0}, f32[4,16,8]{2,1,0}, s32[]) tuple(%x.2, %w.2, %i.2)
}

%cond (t: (f32[8,16], f32[4,16,8], s32[])) -> pred[] {
  %t.3 = (f32[8,16]{1,0}, f32[4,16,8]{2,1,0}, s32[]) parameter(0)
  %i.3 = s32[] get-tuple-element(%t.3), index=2
  ROOT %lt.3 = pred[] compare(%i.3, %n.3), direction=LT
}

ENTRY %main (a: f32[2,8]) -> f32[2,8] {
  %a.4 = f32[2,8]{1,0} parameter(0)
  %l.4 = (f32[8,16]{1,0}, s32[]) while(%s.4), body=%body, condition=%cond, backend_config={TURNS}
  ROOT %r.4 = f32[2,8]{1,0} all-reduce(%a.4), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}
""".replace("TURNS", '"known_trip_count":{"n":"4"}').replace(
    "  %i.2 =", "  %v.2 = f32[2,8]{1,0} get-tuple-element(%t.2), index=3\n  %i.2 ="
)


def test_work_and_time_of_a_program():
    work = gpu.count(TIMED, TWO_NODES, RATES)
    product = 2 * 8 * 16 * 8
    assert work.flops == 4 * product
    # It reads its rows, one of the four weights and the counter, and writes its result.
    touched = 4 * (8 * 16 + 16 * 8 + 1 + 8 * 8)
    assert work.compute_seconds == pytest.approx(4 * max(product, touched) / 1e6)
    # Eight devices gather 64 bytes of each other: 7 shares, one of them from the other node.
    # Inside a node, four reduce and gather 64 bytes: 3/4 of them twice.
    assert work.collective_bytes == {"all-gather": 4 * 6 * 64, "all-reduce": 2 * 48}
    assert work.network_bytes == {"all-gather": 4 * 64, "all-reduce": 0}
    # The gathering takes longer than the product beside it: each turn lasts as long as it.
    gathered, reduced = 4 * 64 / 1e3, 2 * 48 / 1e4
    assert work.compute_seconds + work.collective_seconds == pytest.approx(gathered + reduced)
    slow = gpu.count(TIMED, TWO_NODES, (1e3, *RATES[1:]))  # its product hides the transfer
    total = slow.compute_seconds + slow.collective_seconds
    assert total == pytest.approx(4 * product / 1e3 + reduced)
    work = gpu.count(TIMED, [0] * 8, RATES)  # on one node, which has no network
    assert sum(work.network_bytes.values()) == 0
    assert work.collective_bytes == {"all-gather": 4 * 7 * 64, "all-reduce": 2 * 48}


@pytest.mark.parametrize(
    "kind, received",
    [
        *(("all-gather", (6 * 64, 1 * 64)), ("reduce-scatter", (6 * 8, 1 * 8))),
        *(("all-reduce", (2 * 6 * 8, 2 * 1 * 8)), ("all-to-all", (3 * 8, 4 * 8))),
    ],
)
def test_bytes_over_nvlink_and_the_network(kind, received):
    """64 bytes of each of eight devices on two nodes, counted by hand."""
    text = f"""
ENTRY %main (a: f32[16]) -> f32[16] {{
  %a.1 = f32[16]{{0}} parameter(0)
  ROOT %r.1 = f32[16]{{0}} {kind}(%a.1), replica_groups={{}}, dimensions={{0}}
}}
"""
    work = gpu.count(text, TWO_NODES, RATES)
    assert (work.collective_bytes[kind], work.network_bytes[kind]) == received


def test_a_permutation_crosses_where_one_of_its_pairs_does():
    def moved(pairs):
        text = TIMED.replace("all-reduce(%a.4), replica_groups={{0,1,2,3},{4,5,6,7}}", pairs)
        work = gpu.count(text, TWO_NODES, RATES)
        return work.collective_bytes["collective-permute"], work.network_bytes["collective-permute"]

    inside = "collective-permute(%a.4), source_target_pairs={{0,1},{1,0}}"
    assert moved(inside) == (64, 0)
    assert moved(inside.replace("{1,0}", "{3,4}")) == (0, 64)


def test_flops_of_attention_kernels():
    """Two products forward and five backward: 2 rows of 64 tokens, 4 heads of 32, causal."""
    text = """
ENTRY %main (q: bf16[2,64,4,32], k: bf16[2,64,2,32]) -> bf16[2,4,64,32] {
  %q.1 = bf16[2,64,4,32]{3,2,1,0} parameter(0)
  %k.1 = bf16[2,64,2,32]{3,2,1,0} parameter(1)
  ROOT %f.1 = (bf16[2,4,64,32]{3,2,1,0}) custom-call(%q.1, %k.1, %k.1), REST
}
"""
    one = 2 * 2 * 4 * 64 * 64 * 32 / 2
    for name, products in (("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)):
        rest = f'custom_call_target="{name}", backend_config={{"mask_type": "CAUSAL"}}'
        assert gpu.count(text.replace("REST", rest), [0], RATES).flops == products * one


@pytest.mark.parametrize(
    "written, expected",
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=1,'c'=4] {'a','c'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(1)4}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_the_groups_of_a_transfer(written, expected):
    groups = hlo.groups(f"replica_groups={written}, dimensions={{0}}", 8)
    assert sorted(map(sorted, groups.tolist())) == expected
    assert groups.dtype == np.int64


def test_transfers_of_another_processor_run_beside_the_step():
    """TPU7x gathers weights of 8 bits by a call that starts and ends."""
    work = hlo.count(
        """
%gather (w: f8e4m3fn[2,8]) -> f8e4m3fn[16,8] {
  %w.1 = f8e4m3fn[2,8]{1,0} parameter(0), backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %g.1 = f8e4m3fn[16,8]{1,0} all-gather(%w.1), replica_groups=[1,8]<=[8], dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (w: f8e4m3fn[2,8]) -> f8e4m3fn[16,8] {
  %w.2 = f8e4m3fn[2,8]{1,0} parameter(0), backend_config={"estimated_cycles":"1500"}
  %c.2 = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%gather
  %u.2 = ((f8e4m3fn[2,8]{1,0}), f8e4m3fn[16,8]{1,0}) call-update(%c.2, %w.2)
  ROOT %d.2 = f8e4m3fn[16,8]{1,0} call-done(%u.2)
}
""",
        CHIPS["v5e"],
    )
    assert work.collective_bytes == {"all-gather": 7 * 16}
    assert work.compute_seconds == pytest.approx(1e-6)
    assert work.collective_seconds == 0


def test_groups_that_cannot_be_read():
    with pytest.raises(ValueError, match="cannot be read: all of them"):
        hlo.groups("replica_groups=all of them", 8)
