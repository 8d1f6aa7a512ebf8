"""Mixtures of experts: an update is that of the definitions, however the rows are split.

Shapes: N steps, R rows of a step, S tokens of a row and the one after it; L layers, E experts, k of
a token; others as in maxramp/model/.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh
from jax.sharding import NamedSharding
from one_step import by_name
from test_step import (
    LENGTH,
    ROWS,
    STEPS,
    TOLERANCE,
    deviation,
    gated_mlp,
    initial_state,
    make_config,
    random_rows,
    reference_sums,
    train,
)

from maxramp.checkpoints import arrays
from maxramp.data.rows import PADDING
from maxramp.model.parts import dispatch, grouped
from maxramp.model.parts.weights import new_weight
from maxramp.model.pipeline import order_by_layer
from maxramp.parallel.sharding import (
    EXPERTS_IN_EDF,
    EXPERTS_OUT_EFD,
    STREAM_BTD,
    X_BTD,
    CHOICES_BTk,
)
from maxramp.training.state import abstract_state

EXPERTS, PER_TOKEN, LAYERS = 8, 2, 4
MIXTURE = (
    *("decoder_block=mixtral", f"num_experts={EXPERTS}", f"num_experts_per_tok={PER_TOKEN}"),
    *("base_moe_mlp_dim=16", f"base_num_decoder_layers={LAYERS}", "opt_type=sgd"),
    *("sgd_momentum=0", "learning_rate=1", "gradient_clipping_threshold=0"),
)
LOSSES = ("load_balance_loss_weight=0.1", "router_z_loss_weight=0.01")
# DeepSeek-V3's router, whatever the family.
SIGMOID = {"routed_score_func": "sigmoid", "routed_scaling_factor": 1.5, "shared_experts": 2}
SIGMOID |= {"routed_bias": True, "routed_bias_update_rate": 0.01}
SIGMOID |= {"n_routing_groups": 4, "topk_routing_group": 2}


def config_of(*keys, devices=1, **router):
    return make_config(*MIXTURE, *keys, devices=devices).replace(**router)


@functools.cache
def trained(*keys, devices=1, accumulation=1, is_sigmoid=False):
    """Some steps on the same rows, some of them short, as chats are."""
    config = config_of(*keys, devices=devices, **(SIGMOID if is_sigmoid else {}))
    return train(config, padded_rows(), accumulation)


def padded_rows():
    rows_NRS = random_rows(STEPS, ROWS)
    lengths_NR = np.random.default_rng(1).integers(2, LENGTH + 2, (STEPS, ROWS))
    lengths_NR[:, ::2] = LENGTH + 1
    lengths_NR[0, -1] = 0
    return np.where(np.arange(LENGTH + 1) < lengths_NR[..., None], rows_NRS, PADDING)


def counts_of(training):
    """How many tokens each expert took in the last step: int [L, E]."""
    return np.asarray(training.states[1].buffers["expert_load"]).astype(int)


def choose(scores_RTE, sigmoid, bias_E):
    """The experts of each token [R, T, k]: of the best two groups by their best two, the best."""
    by_RTE = scores_RTE
    if sigmoid:
        by_RTE = by_RTE + bias_E
        groups = by_RTE.reshape(*by_RTE.shape[:2], SIGMOID["n_routing_groups"], -1)
        worth_RTg = jnp.sort(groups, axis=-1)[..., -2:].sum(-1)
        open_RTt = jnp.argsort(-worth_RTg)[..., : SIGMOID["topk_routing_group"]]
        group_E = np.arange(by_RTE.shape[-1]) // groups.shape[-1]
        is_open_RTE = (open_RTt[..., None] == group_E).any(-2)
        by_RTE = jnp.where(is_open_RTE, by_RTE, -np.inf)
    return jnp.argsort(-by_RTE)[..., :PER_TOKEN]


def experts_by_definition(layer, y, *, is_token_RT, row_weight_R, last_E, keys, sums):
    """The MLP of a layer; adds to `sums` its balance loss, z-loss, dropped choices and counts."""
    E, sigmoid = keys.num_experts, keys.routed_score_func == "sigmoid"
    logits_RTE = y @ layer["mlp.router.matrix_DE"]
    exp_RTE = jnp.exp(logits_RTE)
    scores_RTE = exp_RTE / exp_RTE.sum(-1, keepdims=True)
    if sigmoid:
        scores_RTE = 1 / (1 + jnp.exp(-logits_RTE))
    experts_RTk = choose(scores_RTE, sigmoid, layer.get("mlp.router.bias_E"))
    weights_RTk = jnp.take_along_axis(scores_RTE, experts_RTk, -1)
    weights_RTk *= keys.routed_scaling_factor / weights_RTk.sum(-1, keepdims=True)
    R, T, k = experts_RTk.shape
    dropped_RT = jnp.zeros((R, T))
    if keys.capacity_factor > 0:
        room_R = jnp.ceil(is_token_RT.sum(1) * k * keys.capacity_factor / E)
        taken_RE = jnp.zeros((R, E))
        for t in range(T):
            here_RkE = experts_RTk[:, t, :, None] == jnp.arange(E)
            here_RkE &= is_token_RT[:, t, None, None]
            taken_RE += here_RkE.any(1)
            is_late_Rk = (here_RkE & (taken_RE > room_R[:, None])[:, None]).any(-1)
            weights_RTk = weights_RTk.at[:, t].multiply(~is_late_Rk)
            dropped_RT = dropped_RT.at[:, t].set(is_late_Rk.sum(-1))
    out = jnp.zeros_like(y)
    for e in range(E):
        names = zip(("gate_DF", "up_DF", "out_FD"), ("gate_EDF", "up_EDF", "out_EFD"), strict=True)
        y_expert = gated_mlp({f"mlp.{one}": layer[f"mlp.{every}"][e] for one, every in names}, y)
        out += y_expert * jnp.where(experts_RTk == e, weights_RTk, 0).sum(-1)[..., None]
    if sigmoid:
        out += gated_mlp({n.replace(".shared", ""): w for n, w in layer.items()}, y)
    # A row's mean over its tokens weighs as much as its targets.
    tokens_R = jnp.maximum(is_token_RT.sum(1), 1)
    is_chosen_RTE = (experts_RTk[..., None] == jnp.arange(E)).any(2) & is_token_RT[..., None]
    counts_RE = is_chosen_RTE.sum(1)
    share_RTE = scores_RTE / scores_RTE.sum(-1, keepdims=True)
    mean_RE = (share_RTE * is_token_RT[..., None]).sum(1) / tokens_R[:, None]
    loads_RE = counts_RE / jnp.maximum(counts_RE.sum(1, keepdims=True), 1)
    if keys.load_balance_loss_scope == "pass":
        loads_RE = counts_RE.sum(0, keepdims=True) / counts_RE.sum()
    if keys.load_balance_loss_scope == "step":
        loads_RE = jnp.where(last_E.sum() > 0, last_E / jnp.maximum(last_E.sum(), 1), 1 / E)
    z_RT = jnp.log(exp_RTE.sum(-1)) ** 2 * is_token_RT
    row_means = {
        "load_balance_loss": E * (mean_RE * loads_RE).sum(1),
        "router_z_loss": z_RT.sum(1) / tokens_R,
        "dropped_share": (dropped_RT * is_token_RT).sum(1) / tokens_R / k,
    }
    sums.append(({n: (x_R * row_weight_R).sum() for n, x_R in row_means.items()}, counts_RE.sum(0)))
    return out


def train_by_definition(training, keys):
    """SGD in float64 on one device, all rows of a step at once: what `train` returns."""

    layers = keys.base_num_decoder_layers

    def objective(w, rows_RS, last_LE):
        sums, last = [], iter(list(last_LE))
        targets_R = (rows_RS[:, 1:] >= 0).sum(1)
        known = {"is_token_RT": rows_RS[:, :-1] >= 0, "row_weight_R": targets_R / targets_R.sum()}

        def mlp(layer, y):
            known["last_E"] = next(last)
            return experts_by_definition(layer, y, **known, keys=keys, sums=sums)

        heads = keys.base_num_kv_heads
        cross_entropy, _, tokens = reference_sums(w, rows_RS, heads, "sparse", mlp)
        shown = {n: sum(layer[n] for layer, _ in sums) / layers for n in sums[0][0]}
        shown["load_balance_loss"] *= keys.load_balance_loss_weight
        shown["router_z_loss"] *= keys.router_z_loss_weight
        shown["loss"] = cross_entropy / tokens
        minimized = shown["loss"] + shown["load_balance_loss"] + shown["router_z_loss"]
        return minimized, (shown, jnp.stack([counts_E for _, counts_E in sums]))

    w = {name: x.astype(np.float64) for name, x in training.first.items()}
    counts_LE, steps = np.zeros((layers, keys.num_experts)), []
    differentiate = jax.jit(jax.grad(objective, has_aux=True))
    for rows_RS, rate in zip(padded_rows(), training.metrics["learning_rate"], strict=True):
        gradient, (shown, counts_LE) = differentiate(w, rows_RS, counts_LE.astype(float))
        gradient, shown, counts_LE = jax.device_get((gradient, shown, counts_LE))
        w = {name: x - float(rate) * gradient[name] for name, x in w.items()}
        if keys.routed_bias:
            above_LE = np.sign(counts_LE.mean(1, keepdims=True) - counts_LE)
            bias = training.first["layers.sparse.mlp.router.bias_E"]
            assert bias.shape == above_LE.shape
            w["layers.sparse.mlp.router.bias_E"] += keys.routed_bias_update_rate * above_LE
        steps.append(shown | {"expert_load": counts_LE / counts_LE.sum(1, keepdims=True)})
    return w, {name: np.stack([shown[name] for shown in steps]) for name in steps[0]}


# Keys, and whether scores are sigmoids.
ROUTERS = {
    "row": (LOSSES, False),
    "step": ((*LOSSES, "load_balance_loss_scope=step"), False),
    "capacity": ((*LOSSES, "capacity_factor=1"), False),
    "sigmoid": ((*LOSSES, "load_balance_loss_scope=step"), True),
}
DEFINED = ROUTERS | {"pass": ((*LOSSES, "load_balance_loss_scope=pass"), False)}


def slow_but(cases, *quick, long=()):
    marks = {name: pytest.mark.long if name in long else pytest.mark.slow for name in cases}
    marks |= dict.fromkeys(quick, ())
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


@pytest.mark.parametrize("name", slow_but(DEFINED, "sigmoid"))
def test_a_step_is_that_of_the_definitions(name):
    keys, is_sigmoid = DEFINED[name]
    keys += ("base_num_decoder_layers=2",)
    states = trained(*keys, is_sigmoid=is_sigmoid)
    model = config_of(*keys, **(SIGMOID if is_sigmoid else {})).model
    with jax.enable_x64(True):
        last, metrics = train_by_definition(states, model)
    assert (metrics["dropped_share"] > 0.01).all() == (name == "capacity")
    for shown, expected in metrics.items():
        if shown != "dropped_share" or name == "capacity":
            np.testing.assert_allclose(states.metrics[shown], expected, 1e-5, 1e-9, err_msg=shown)
    change = {name: last[name] - states.first[name] for name in last}
    assert deviation(states.change, change) < TOLERANCE


TENSOR = ("ici_fsdp_parallelism=4", "ici_tensor_parallelism=2")
EXPERT = ("ici_expert_parallelism=4", "ici_fsdp_parallelism=2")
ALL = ("ici_expert_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2")
COPIES = ("ici_data_parallelism=2", "ici_expert_parallelism=2", "ici_fsdp_parallelism=2")
PIPELINE = ("ici_pipeline_parallelism=2", "num_pipeline_repeats=2", "ici_expert_parallelism=4")
GATHERED = ("ici_pipeline_parallelism=2", "ici_expert_parallelism=2", "ici_fsdp_parallelism=2")
GATHERED += ("pipeline_fsdp_ag_once=True",)
SPLITS = {
    **{"2 passes": ((), 1, 2), "4 passes": ((), 1, 4), "data": (("ici_data_parallelism=8",), 8, 1)},
    **{"fsdp, tensor": (TENSOR, 8, 2), "expert, fsdp": (EXPERT, 8, 1)},
    **{"expert, fsdp, 4 passes": (EXPERT, 8, 4), "expert, fsdp, tensor": (ALL, 8, 2)},
    **{"data, expert, fsdp": (COPIES, 8, 2), "circular pipeline, expert": (PIPELINE, 8, 2)},
    "pipeline, gathered once": (GATHERED, 8, 2),
}


def order(training):
    """First and last weights, layers as a row meets them."""
    return [by_name(order_by_layer(state.model)) for state in training.states]


def count_flips(one, other):
    """Choices that differ, at least, in each step: near a tie the last bit of a score decides."""
    shares = [training.metrics["expert_load"] for training in (one, other)]
    choices = PER_TOKEN * (padded_rows()[..., :-1] >= 0).sum((1, 2))
    return np.abs(shares[0] - shares[1]).sum((1, 2)) * choices / 2


FEW = ("4 passes", "expert, fsdp, tensor", "circular pipeline, expert")
CASES = {
    f"{router}; {split}": (router, split)
    for router in ROUTERS
    for split in (SPLITS if router == "row" else FEW)
}
LONG = ("row; 4 passes", "row; data", "row; fsdp, tensor", "row; expert, fsdp, 4 passes")
LONG += ("capacity; 4 passes", "sigmoid; 4 passes")


@pytest.mark.parametrize("case", slow_but(CASES, "row; expert, fsdp", long=LONG))
def test_an_update_does_not_depend_on_the_split(case):
    """No choice of experts flips near a tie here."""
    router, split = CASES[case]
    losses, is_sigmoid = ROUTERS[router]
    keys, devices, accumulation = SPLITS[split]
    one = trained(*losses, is_sigmoid=is_sigmoid)
    how = {"devices": devices, "accumulation": accumulation, "is_sigmoid": is_sigmoid}
    other = trained(*losses, *keys, **how)
    assert count_flips(one, other).max() < 0.5
    np.testing.assert_array_equal(counts_of(one), counts_of(other))
    shown = {n for n, values in one.metrics.items() if values.dtype == np.float32}
    assert shown > {"loss", "load_balance_loss", "router_z_loss", "expert_load_max"}
    for name in shown:
        np.testing.assert_allclose(other.metrics[name], one.metrics[name], 1e-5, 1e-7, err_msg=name)
    (first, last), (other_first, other_last) = order(one), order(other)
    np.testing.assert_equal(first, other_first)
    assert deviation(other_last, last) < 1e-5
    changes = [{n: x[n] - first[n] for n in x} for x in (other_last, last)]
    assert deviation(*changes) < TOLERANCE
    bias = "layers.sparse.mlp.router.bias_E"
    assert (bias in last) == is_sigmoid
    if is_sigmoid:  # it follows from integers
        assert len(np.unique(last[bias])) > 3
        np.testing.assert_array_equal(last[bias], other_last[bias])


@pytest.mark.slow
def test_the_balance_of_a_pass_depends_on_the_split():
    keys = (*LOSSES, "load_balance_loss_scope=pass")
    whole, halves = (trained(*keys, accumulation=n) for n in (1, 2))
    spread = trained(*keys, *ALL, devices=8)
    assert count_flips(whole, spread).max() < 0.5
    assert deviation(order(spread)[1], order(whole)[1]) < 1e-5
    apart = np.abs(halves.metrics["load_balance_loss"] / whole.metrics["load_balance_loss"] - 1)
    assert apart.max() > 1e-3
    assert deviation(halves.change, whole.change) > 100 * TOLERANCE
    # Micro batches of a pipeline are passes of their own.
    turns = trained(*keys, *PIPELINE, devices=8)
    assert deviation(order(turns)[1], order(halves)[1]) < 1e-5


@pytest.mark.slow
def test_biases_and_counts_are_in_a_checkpoint(tmp_path):
    saved = trained(*LOSSES, is_sigmoid=True).states[1]
    arrays.save(tmp_path / "1", saved)()
    config = config_of(*LOSSES, *EXPERT, devices=8, **SIGMOID)
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        abstract = arrays.items_of(abstract_state(config.recipe, mesh))
        restored = arrays.load(tmp_path / "1", abstract)
    np.testing.assert_equal(by_name(restored["model"]), by_name(saved.model))
    bias = by_name(restored["model"])["layers.sparse.mlp.router.bias_E"]
    assert len(np.unique(bias)) > 3
    np.testing.assert_equal(by_name(restored["optimizer"]["buffers"]), by_name(saved.buffers))


@pytest.mark.slow
def test_the_noise_scale_does_not_depend_on_the_mesh():
    keys = (*LOSSES, "log_gradient_noise_scale=True")
    one = trained(*keys, accumulation=4).metrics
    for mesh in (EXPERT, ALL):
        spread = trained(*keys, *mesh, devices=8, accumulation=4).metrics
        names = {name for name in one if "noise" in name}
        assert len(names) == 4
        for name in names:
            np.testing.assert_allclose(spread[name], one[name], rtol=1e-3, err_msg=name)


def choices(name):
    """Experts of tokens [B, T, 2] by how they are spread; EXPERTS: none."""
    random = np.random.default_rng(2)
    chosen = random.permuted(np.tile(np.arange(EXPERTS), (16, 8, 1)), axis=-1)[..., :PER_TOKEN]
    if name == "all to two of a device":
        chosen[:] = 4, 5
    if name == "few":
        chosen = np.where(np.isin(chosen, (1, 6)), chosen, EXPERTS)
    if name == "dropped":
        chosen = np.where(random.random(chosen.shape) < 0.4, EXPERTS, chosen)
    if name == "none":
        chosen[:] = EXPERTS
    return chosen.astype(np.int32)


def emulate_ragged_all_to_all(x, out, begins, sizes, lands, received, *, axis_name):
    """What XLA has on TPUs and GPUs alone: every piece from its place here to its place there."""
    devices = jax.lax.axis_size(axis_name)
    pieces, number = len(begins) // devices, jax.lax.axis_index(axis_name)
    arguments = x, jnp.stack([begins, sizes, lands])
    every_x, every_piece = (jax.lax.all_gather(a, axis_name) for a in arguments)
    for device, piece in itertools.product(range(devices), range(pieces)):
        begin, size, land = every_piece[device, :, number * pieces + piece]
        assert received.shape == sizes.shape
        at = jnp.arange(len(x))
        to = jnp.where((at >= begin) & (at < begin + size), at - begin + land, len(out))
        out = out.at[to].set(every_x[device], mode="drop")
    return out


def plain_mixture(x_BTD, weights_BTk, in_EDF, out_EFD, chosen_BTk):
    made_BTED = jnp.einsum("BTD,EDF,EFG->BTEG", x_BTD, in_EDF, out_EFD)
    is_chosen_BTkE = chosen_BTk[..., None] == np.arange(EXPERTS)
    return jnp.einsum("BTk,BTkE,BTED->BTD", weights_BTk, is_chosen_BTkE.astype(float), made_BTED)


@pytest.mark.parametrize("mesh", slow_but((EXPERT, ALL), ALL), ids=("expert 4", "expert 2, tensor"))
def test_every_way_to_the_experts_is_that_of_a_plain_product(mesh, monkeypatch):
    """Forward and backward, also where one device's experts take all tokens, or none."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulate_ragged_all_to_all)
    monkeypatch.setattr(dispatch, "_BLOCK", 20)  # rows: a device has up to 4 of such blocks
    random = np.random.default_rng(3)
    shapes = (16, 8, 32), (16, 8, PER_TOKEN), (EXPERTS, 32, 16), (EXPERTS, 16, 32)
    arrays = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    specs = X_BTD, CHOICES_BTk, EXPERTS_IN_EDF, EXPERTS_OUT_EFD
    weigh_BTD = random.normal(size=shapes[0]).astype(np.float32)

    def weigh(y_MF, weights_M):
        return y_MF * weights_M[:, None]

    @functools.partial(jax.jit, static_argnames="way")
    def mix(x_BTD, weights_BTk, in_EDF, out_EFD, chosen_BTk, way):
        def total(x_BTD, weights_BTk, in_EDF, out_EFD):
            plan = dispatch.plan(chosen_BTk, EXPERTS, way)
            x_MD, weights_M = dispatch.spread(x_BTD, weights_BTk, plan)
            into = new_weight(in_EDF, "matrix", "D F", "E")
            out = new_weight(out_EFD, "matrix", "F D", "E")
            y_MF = grouped.product(x_MD, (into,), plan.sizes_E, "blocks")
            y_MF = dispatch.map_rows(weigh, plan, y_MF, weights_M)
            y_MD = grouped.product(y_MF, (out,), plan.sizes_E, "blocks")
            y_BTD = dispatch.collect(y_MD, plan)
            return (y_BTD * jax.reshard(weigh_BTD, STREAM_BTD)).sum(), y_BTD

        arrays = x_BTD, weights_BTk, in_EDF, out_EFD
        return jax.grad(total, range(4), has_aux=True)(*arrays)

    def defined(*arrays, chosen):
        y_BTD = plain_mixture(*arrays, chosen)
        return (y_BTD * weigh_BTD).sum(), y_BTD

    with jax.set_mesh(devices := make_mesh(config_of(*mesh, devices=8))):
        placed = [
            jax.device_put(a, NamedSharding(devices, s)) for a, s in zip(arrays, specs, strict=True)
        ]
        for name in ("spread", "all to two of a device", "few", "dropped", "none"):
            chosen = choices(name)
            expected = jax.grad(functools.partial(defined, chosen=chosen), range(4), has_aux=True)
            expected = jax.tree.map(np.asarray, expected(*arrays))
            for way in ("gather", "ragged"):
                results = mix(*placed, jax.reshard(chosen, CHOICES_BTk), way=way)
                for a, b in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4, err_msg=f"{name} {way}")


def test_routers_compute_in_float32():
    """What bfloat16 would round decides and weighs nothing."""
    config = config_of("dtype=bfloat16")
    with jax.set_mesh(make_mesh(config)):
        model = initial_state(config).model.cast("bfloat16").one_by_one()
        mlp = model.layers[0].mlp
        assert mlp.gate_EDF[...].dtype == jnp.bfloat16
        x_BTD = jax.random.normal(jax.random.key(0), (ROWS, LENGTH, 32), jnp.bfloat16)
        (experts_BTk, weights_BTk), _ = mlp.router(x_BTD, None)
    logits = np.asarray(x_BTD, np.float64) @ np.asarray(mlp.router.matrix_DE[...], np.float64)
    top = np.sort(logits)[..., ::-1][..., :PER_TOKEN]
    weights = np.exp(top) / np.exp(top).sum(-1, keepdims=True)
    assert weights_BTk.dtype == jnp.float32
    np.testing.assert_allclose(weights_BTk, weights, rtol=3e-6)
    np.testing.assert_array_equal(experts_BTk, np.argsort(-logits)[..., :PER_TOKEN])


def test_no_token_is_dropped_where_nothing_is_trained():
    """Generation and tasks read rows of other lengths than training."""
    config = config_of(capacity_factor=0.5)
    with jax.set_mesh(make_mesh(config)):
        router = initial_state(config).model.one_by_one().layers[0].mlp.router
        x_BTD = jax.random.normal(jax.random.key(0), (ROWS, LENGTH, 32))
        (read_BTk, _), _ = router(x_BTD, None)
        (trained_BTk, _), _ = router(x_BTD, jnp.ones((ROWS, LENGTH)))
    assert (read_BTk < EXPERTS).all() and (trained_BTk == EXPERTS).any()
