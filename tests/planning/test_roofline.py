"""The reader of GPU programs, on texts whose work is known."""

import numpy as np
import pytest

from maxramp.planning import gpu, hlo

# 1e6 flops, 1e6 bytes of memory, 1e4 over NVLink and 1e3 over the network a second.
RATES = (1e6, 1e6, 1e4, 1e3)
TWO_NODES = [0, 0, 0, 0, 1, 1, 1, 1]

# A loop of four turns gathers a weight while a product of 8 x 16 x 8 runs beside it. The product
# reads a slice of a stack of weights; afterwards its sum is reduced, and nothing runs beside that.
PROGRAM = """
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
    work = gpu.count(PROGRAM, TWO_NODES, RATES)
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
    slow = gpu.count(PROGRAM, TWO_NODES, (1e3, *RATES[1:]))  # its product hides the transfer
    total = slow.compute_seconds + slow.collective_seconds
    assert total == pytest.approx(4 * product / 1e3 + reduced)
    work = gpu.count(PROGRAM, [0] * 8, RATES)  # on one node, which has no network
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
        text = PROGRAM.replace("all-reduce(%a.4), replica_groups={{0,1,2,3},{4,5,6,7}}", pairs)
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


def test_groups_that_cannot_be_read():
    with pytest.raises(ValueError, match="cannot be read: all of them"):
        hlo.groups("replica_groups=all of them", 8)
