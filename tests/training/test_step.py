"""The train step: one update, however the rows are split, sharded, recomputed or padded.

Shapes: N steps, R rows of a step (= A x B), S tokens of a row and the one after it; others as in
maxramp/model/.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, batch_of, make_mesh, numpy_fingerprint
from conftest import make_config as make_tiny_config
from jax.sharding import NamedSharding
from one_step import by_name

from maxramp.data.rows import PADDING
from maxramp.parallel.axes import AXES, NAME_IN_KEYS
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate
from maxramp.training.loss import cross_entropy_sums, next_token_prediction
from maxramp.training.optimizers.table import adam_state
from maxramp.training.state import init_state
from maxramp.training.step import eval_step, make_train_step

STEPS, ROWS, LENGTH, VOCAB = 3, 64, 16, 264

# Of the largest element of an array: sums in another order differ by 2^-24 of their largest terms,
# and a change of weights by 1/100 of their size has lost 7 more bits to rounding.
TOLERANCE = 5e-5

SGD = ("opt_type=sgd", "learning_rate=1")  # changes as large as Adam's
# Adam divides by |g|, which turns rounding near zero into steps of up to the learning rate; an
# epsilon near the size of the gradients bounds that.
ADAM = ("adam_eps=1e-3",)


def make_config(*arguments, devices=DEVICES):
    """The tiny model at a constant batch of ROWS, and at its peak learning rate from the start."""
    constant = ("enable_rampup_batch_size=False", f"per_device_batch_size={ROWS / devices}")
    constant += ("warmup_steps_fraction=0", "steps=20")
    return make_tiny_config(*constant, *arguments, devices=devices)


def random_rows(*shape):
    return np.random.default_rng(0).integers(0, VOCAB, (*shape, LENGTH + 1), dtype=np.int32)


def place(batch_ABS, mesh):
    return jax.device_put(batch_of(batch_ABS), NamedSharding(mesh, BATCH_ABT))


@functools.cache
def initial_state(config):
    """The first state, on the config's mesh."""
    with jax.set_mesh(make_mesh(config)):
        return jax.jit(functools.partial(init_state, config.recipe))()


@functools.cache
def compiled_step(config):
    rate = LearningRate.from_keys(config.learning_rate, RampupBatchManager(config.batch))
    return jax.jit(make_train_step(config.recipe, rate))


@dataclasses.dataclass
class Training:
    first: dict  # weights by name
    last: dict
    metrics: dict  # [N, ...] by name
    states: tuple  # first and last

    @property
    def change(self):
        """What training has added to each weight."""
        return {name: self.last[name] - self.first[name] for name in self.first}


def train(config, rows_NRS, accumulation=1):
    """Trains a new model, one step for each set of rows."""
    mesh, first, step = make_mesh(config), initial_state(config), compiled_step(config)
    with jax.set_mesh(mesh):
        state, metrics = first, []
        for rows_RS in rows_NRS:
            batch_ABS = rows_RS.reshape(accumulation, -1, rows_RS.shape[-1])
            state, step_metrics = step(state, place(batch_ABS, mesh))
            metrics.append(jax.device_get(step_metrics))
    stacked = {name: np.stack([m[name] for m in metrics]) for name in metrics[0]}
    return Training(by_name(first.model), by_name(state.model), stacked, (first, state))


@functools.cache
def trained(*arguments, devices=DEVICES, accumulation=1):
    """A training on the same rows as all others; several tests compare with the same one."""
    config = make_config(*arguments, devices=devices)
    return train(config, random_rows(STEPS, ROWS), accumulation)


def deviation(actual, expected):
    """Largest difference of any array, in units of that array's largest element."""
    assert actual.keys() == expected.keys()
    return np.max([np.abs(actual[n] - x).max() / np.abs(x).max() for n, x in expected.items()])


def assert_same(actual, expected, tolerance=TOLERANCE):
    """Equal losses and gradient norms at every step, and weights that have moved alike."""
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(actual.metrics[name], expected.metrics[name], rtol=tolerance)
    assert deviation(actual.change, expected.change) < tolerance


def assert_same_rows(actual, expected):
    names = "batch_fingerprint", "learning_rate"
    fingerprints, rates = ([m.metrics[name] for m in (actual, expected)] for name in names)
    np.testing.assert_array_equal(*fingerprints)
    np.testing.assert_array_max_ulp(*rates, maxulp=1)  # each program rounds its own cosine


@pytest.mark.parametrize("accumulation", (4, pytest.param(8, marks=pytest.mark.slow)))
@pytest.mark.parametrize("optimizer", (pytest.param(SGD, marks=pytest.mark.slow), ADAM))
def test_more_passes_are_the_same_step(optimizer, accumulation):
    split = trained(*optimizer, accumulation=accumulation)
    assert_same(split, trained(*optimizer))
    assert_same_rows(split, trained(*optimizer))


def test_a_step_without_targets_changes_no_weight():
    """Documents of one token each teach nothing, and every number is finite."""
    config = make_config(*SGD)
    training = train(config, np.full((1, ROWS, LENGTH + 1), PADDING, np.int32))
    assert training.metrics["loss"] == training.metrics["grad_norm"] == 0
    for name, change in training.change.items():
        assert not change.any(), name


COPIES = ("ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2")
# An instruction that sums over devices: its shapes, and the devices of each sum as lists.
_SUM = re.compile(r"= (.*?) all-reduce(?:-start)?\(.*replica_groups=\{(\{.*?\})\}")


@pytest.mark.slow
def test_gradients_travel_once():
    """Copies add up gradients over passes and exchange them once, outside of the loops."""
    assert_same(trained(*COPIES, *ADAM, accumulation=4), trained(*ADAM, devices=1))

    config = make_config(*COPIES, *ADAM)
    mesh, state = make_mesh(config), initial_state(config)
    with jax.set_mesh(mesh):
        batch = place(random_rows(4, ROWS // 4), mesh)
        text = compiled_step(config).lower(state, batch).compile().as_text()
    pairs = [f"{{{a.id},{b.id}}}" for a, b in mesh.devices.reshape(2, -1).T]  # copies of a shard
    sizes = {"in a loop": [], "once": []}
    for computation in re.split(r"\n(?=%|ENTRY )", text):
        where = "once" if computation.startswith("ENTRY") else "in a loop"
        for shapes, groups in _SUM.findall(computation):
            if groups == ",".join(pairs):
                matches = re.findall(r"f32\[([\d,]+)\]", shapes)
                sizes[where] += [np.prod([int(n) for n in shape.split(",")]) for shape in matches]
    products = [w for name, w in by_name(state.model).items() if "scale_D" not in name]
    assert sizes == {"in a loop": [], "once": sizes["once"]}
    assert sorted(sizes["once"]) == sorted(w.size // 4 for w in products)


# Mesh axis of each dimension that is sharded; all other dimensions are whole on every device.
SHARDED = {
    "embedding_VD": {0: "tensor", 1: "fsdp"},
    "head_DV": {0: "fsdp", 1: "tensor"},
    **dict.fromkeys(("query_DHh", "key_DKh", "value_DKh"), {1: "fsdp", 2: "tensor"}),
    **dict.fromkeys(("gate_DF", "up_DF"), {1: "fsdp", 2: "tensor"}),
    **{"out_HhD": {1: "tensor", 3: "fsdp"}, "out_FD": {1: "tensor", 2: "fsdp"}},
}
UNSHARDED = {"scale_D", "zeros_in_mu", "zeros_in_nu", "consumed_samples", "bad_steps"}


# Stages are in tests/model/test_pipeline.py.
ALL_DATA = pytest.param({"data": 8}, marks=pytest.mark.slow)
ALL_TENSOR = pytest.param({"tensor": 8}, marks=pytest.mark.slow)
MESHES = (
    *(ALL_DATA, {"fsdp": 8}, ALL_TENSOR, {"data": 2, "fsdp": 2, "tensor": 2}),
    *({"data": 2, "context": 4}, {"fsdp": 2, "context": 2, "tensor": 2}),
)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_any_mesh_trains_as_one_device(sizes):
    """Each device holds only its shard of weights and moments, from the first state on."""
    axes = dict.fromkeys(AXES, 1) | sizes
    # All in fsdp is what the config fills in by itself.
    keys = [f"ici_{NAME_IN_KEYS[axis]}_parallelism={size}" for axis, size in axes.items()]
    spread = trained(*ADAM, *(keys if sizes != {"fsdp": 8} else ()))
    one = trained(*ADAM, devices=1)
    np.testing.assert_equal(spread.first, one.first)
    assert_same(spread, one)
    assert_same_rows(spread, one)
    for path, x in jax.tree.leaves_with_path(spread.states):
        name = jax.tree_util.keystr(path).removesuffix(".value").rpartition(".")[-1]
        assert name in SHARDED.keys() | UNSHARDED
        shape = list(x.shape)
        for dimension, axis in SHARDED.get(name, {}).items():
            shape[dimension] //= axes[axis] * (axes["context"] if axis == "fsdp" else 1)
        assert len(x.addressable_shards) == DEVICES
        assert {shard.data.shape for shard in x.addressable_shards} == {tuple(shape)}, path


def gated_mlp(layer, y):
    gate = y @ layer["mlp.gate_DF"]
    return (gate / (1 + jnp.exp(-gate)) * (y @ layer["mlp.up_DF"])) @ layer["mlp.out_FD"]


def reference_sums(w, rows_RS, kv_heads, kind="dense", mlp=gated_mlp):
    """The decoder by its definition, on named weights: sums of losses and log(Z)^2, and targets."""

    def norm(x_RTD, scale_D):
        return x_RTD / jnp.sqrt((x_RTD**2).mean(-1, keepdims=True) + 1e-5) * scale_D

    def rotate(x_RTHh):
        T, h = x_RTHh.shape[1], x_RTHh.shape[-1]
        angle = np.arange(T)[:, None, None] * 10000.0 ** (-2 * np.arange(h // 2) / h)
        a, b = x_RTHh[..., : h // 2], x_RTHh[..., h // 2 :]
        cos, sin = np.cos(angle), np.sin(angle)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    inputs_RT, targets_RT = jnp.maximum(rows_RS[:, :-1], 0), rows_RS[:, 1:]
    x = w["embedding_VD"][inputs_RT]
    layers, own = f"layers.{kind}.", [n for n in w if n.startswith("layers.")]
    for i in range(len(w[own[0]])):
        layer = {n.removeprefix(layers): w[n][i] for n in own}
        y = norm(x, layer["mixer_norm.scale_D"])
        q, k, v = (
            jnp.einsum("RTD,DHh->RTHh", y, layer[f"mixer.{name}"])
            for name in ("query_DHh", "key_DKh", "value_DKh")
        )
        # Query heads share key/value heads in groups of neighbours.
        k, v = (jnp.repeat(z, q.shape[2] // kv_heads, axis=2) for z in (k, v))
        scores = jnp.einsum("RTHh,RSHh->RHTS", rotate(q), rotate(k)) / np.sqrt(q.shape[-1])
        scores = jnp.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
        y = jnp.einsum("RHTS,RSHh->RTHh", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("RTHh,HhD->RTD", y, layer["mixer.out_HhD"])
        x = x + mlp(layer, norm(x, layer["mlp_norm.scale_D"]))
    x = norm(x, w["norm.scale_D"])
    logits_RTV = x @ (w["head_DV"] if "head_DV" in w else w["embedding_VD"].T)
    log_z_RT = jnp.log(jnp.exp(logits_RTV).sum(-1))
    target_RT = jnp.take_along_axis(logits_RTV, jnp.maximum(targets_RT, 0)[..., None], -1)[..., 0]
    real_RT = targets_RT >= 0
    return ((log_z_RT - target_RT) * real_RT).sum(), (log_z_RT**2 * real_RT).sum(), real_RT.sum()


def reference_training(w, rows_NRS, kv_heads, z_loss, clip, eps):
    """AdamW on the mean of cross-entropy + z_loss * log(Z)^2: all rows at once, in float64."""
    b1, b2, decay, peak, final, schedule_steps = 0.9, 0.95, 0.1, 1e-2, 1e-3, 20

    def objective(w, rows_RS):
        cross_entropy, z, tokens = reference_sums(w, rows_RS, kv_heads)
        return (cross_entropy + z_loss * z) / tokens, cross_entropy / tokens

    gradient = jax.jit(jax.grad(objective, has_aux=True))
    metrics = {"loss": [], "grad_norm": []}
    w = first = {name: x.astype(np.float64) for name, x in w.items()}
    m, v = ({name: np.zeros_like(x) for name, x in w.items()} for _ in range(2))
    for step, rows_RS in enumerate(rows_NRS):
        g, loss = jax.device_get(gradient(w, rows_RS))
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        assert norm > clip  # that clipping is tested at all
        rate = final + (peak - final) * (1 + np.cos(np.pi * step / (schedule_steps - 1))) / 2
        for name in w:
            clipped = g[name] * clip / norm
            m[name] = b1 * m[name] + (1 - b1) * clipped
            v[name] = b2 * v[name] + (1 - b2) * clipped**2
            corrected = m[name] / (1 - b1 ** (step + 1)), v[name] / (1 - b2 ** (step + 1))
            update = corrected[0] / (np.sqrt(corrected[1]) + eps) + decay * w[name]
            w = w | {name: w[name] - rate * update}
        metrics["loss"].append(loss)
        metrics["grad_norm"].append(norm)
    return Training(first, w, metrics, ())


REFERENCE_CASES = {
    "untied": (0.0, ()),
    "tied": (0.0, ("logits_via_embedding=True",)),
    "grouped": (1e-2, ("base_num_kv_heads=2", "z_loss_multiplier=1e-2")),
}


@pytest.mark.parametrize("case", REFERENCE_CASES)
def test_every_step_is_that_of_the_definitions(case):
    z_loss, arguments = REFERENCE_CASES[case]
    config = make_config(
        "gradient_clipping_threshold=0.1", "adam_eps=1e-4", "adam_weight_decay=0.1", *arguments
    )
    rows_NRS = random_rows(STEPS, ROWS)
    training = train(config, rows_NRS, accumulation=2)
    with jax.enable_x64(True):
        expected = reference_training(
            training.first, rows_NRS, config.model.base_num_kv_heads, z_loss, clip=0.1, eps=1e-4
        )
    assert_same(training, expected)


def test_a_loss_depends_on_no_later_token():
    config = make_config(*ADAM, devices=1)
    tokens_1S = np.arange(LENGTH + 1, dtype=np.int32)[None] * 7  # all different

    def loss_at(model, position):
        targets_1T = jnp.where(jnp.arange(LENGTH) == position, tokens_1S[:, 1:], PADDING)
        x_1TD, _ = model.hidden(tokens_1S[:, :-1], config.model)
        return cross_entropy_sums(x_1TD, model.head("float32"), targets_1T, 0.0, 0)[0]

    gradient = jax.jit(jax.grad(loss_at))
    with jax.set_mesh(make_mesh(config)):
        model = initial_state(config).model
        for position in range(LENGTH):
            table_VD = np.asarray(gradient(model, position).embedding_VD[...])
            norms_T = np.linalg.norm(table_VD[tokens_1S[0, :-1]], axis=-1)
            assert np.all(norms_T[: position + 1] > 1e-6)
            assert np.all(norms_T[position + 1 :] == 0)


@functools.cache
def loss_and_gradients(*arguments):
    """Loss and gradients of the first weights, for settings of how they are computed."""
    config = make_config(*arguments)
    state, mesh = initial_state(make_config(*ADAM)), make_mesh(config)

    def objective(model, rows_RS):
        x_BTD, _ = model.hidden(rows_RS[:, :-1], config.model)
        head_DV = model.head(config.model.dtype)
        return cross_entropy_sums(x_BTD, head_DV, rows_RS[:, 1:], 0.0, 0)[0]

    with jax.set_mesh(mesh):
        rows_RS = place(random_rows(1, ROWS), mesh).tokens[0]
        loss, gradients = jax.jit(jax.value_and_grad(objective))(state.model, rows_RS)
    return {"loss": np.asarray(loss)} | by_name(gradients)


ALONE = ("remat_policy=full", "remat_policy=minimal", "scan_layers=False")


@pytest.mark.parametrize(
    "keys",
    ["scan_layers=False remat_policy=full"]
    + [pytest.param(key, marks=pytest.mark.slow) for key in ALONE],
)
def test_remat_and_unrolling_change_no_gradient(keys):
    base = loss_and_gradients("remat_policy=none", "scan_layers=True")
    assert deviation(loss_and_gradients(*keys.split()), base) < TOLERANCE


def test_padding_rows_train_nothing():
    rows_NRS = random_rows(STEPS, ROWS)
    padded_NRS = np.full((STEPS, 2 * ROWS, LENGTH + 1), PADDING, np.int32)
    real = np.sort(np.random.default_rng(0).permutation(2 * ROWS)[:ROWS])
    padded_NRS[:, real] = rows_NRS
    padded = train(make_config(*ADAM, f"per_device_batch_size={2 * ROWS // DEVICES}"), padded_NRS)
    assert_same(padded, trained(*ADAM))


def test_evaluation_of_a_padded_batch():
    """Over batches of which the last is filled up: the definition's mean over real tokens."""
    config = make_config()
    rows_RS = random_rows(20)
    rows_RS[3, 9:] = rows_RS[17, 2:] = PADDING
    filled_RS = np.concatenate([rows_RS, np.full((4, LENGTH + 1), PADDING, np.int32)])
    mesh, training = make_mesh(config), trained(*ADAM)
    objective = next_token_prediction(config.loss, config.model)
    evaluate = jax.jit(functools.partial(eval_step, loss=objective))
    with jax.set_mesh(mesh):
        sums = jnp.float32(0), jnp.float32(0)
        for batch_BS in np.split(filled_RS, 3):
            sums = evaluate(training.states[1].model, sums, place(batch_BS[None], mesh))
    with jax.enable_x64(True):
        weights = {name: x.astype(np.float64) for name, x in training.last.items()}
        expected = reference_sums(weights, rows_RS, config.model.base_num_kv_heads)
        cross_entropy, _, tokens = map(float, expected)
    assert sums[1] == tokens == 20 * LENGTH - 8 - 15
    assert float(sums[0]) / tokens == pytest.approx(cross_entropy / tokens, rel=1e-6)


def test_the_fingerprint_does_not_depend_on_the_split():
    """The hash of the docstring, for any split of the rows; another for any other rows."""
    rows_RS = random_rows(ROWS)
    rows_RS[5, 3:] = PADDING
    config = make_config()
    mesh, compute = make_mesh(config), jax.jit(lambda batch: batch.hashes.sum((0, 1)))

    def fingerprint(rows_RS, accumulation=1):
        batch_ABS = rows_RS.reshape(accumulation, -1, LENGTH + 1)
        with jax.set_mesh(mesh):
            return compute(place(batch_ABS, mesh)).tolist()

    base = fingerprint(rows_RS)
    assert base == numpy_fingerprint(rows_RS)
    assert base == fingerprint(rows_RS, 2) == fingerprint(rows_RS, 8)

    swapped_RS = rows_RS.copy()
    swapped_RS[[10, 42]] = rows_RS[[42, 10]]
    changed_RS = rows_RS.copy()
    changed_RS[63, LENGTH] ^= 1
    for other_RS in (swapped_RS, changed_RS, rows_RS[::-1]):
        other = fingerprint(other_RS)
        assert other == numpy_fingerprint(other_RS)
        assert other[0] != base[0] and other[1] != base[1]


def test_clock_passes_32_bits():
    """Samples carry into the high word, which rates read: an ended schedule stays ended."""
    config = make_config(*SGD)
    mesh, start, step = make_mesh(config), initial_state(config), compiled_step(config)
    consumed = 2**32 - 3
    with jax.set_mesh(mesh):
        clock = jnp.array([consumed, 0], jnp.uint32)
        state = dataclasses.replace(start, consumed_samples=clock)
        for _ in range(2):
            state, metrics = step(state, place(random_rows(1, ROWS), mesh))
            assert metrics["learning_rate"] == 0
            consumed += ROWS
            assert state.consumed_samples.tolist() == [consumed % 2**32, consumed // 2**32]
    np.testing.assert_equal(by_name(state.model), by_name(start.model))


def test_bfloat16_trains_nearly_as_float32():
    training, exact = trained(*ADAM, "dtype=bfloat16"), trained(*ADAM)
    assert {x.dtype for x in jax.tree.leaves(training.states[1].model)} == {np.dtype("float32")}
    # bfloat16 has 8 bits: 0.4% an operation.
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(training.metrics[name], exact.metrics[name], rtol=0.01)
    assert np.any(training.metrics["loss"] != exact.metrics["loss"])  # it is another arithmetic
    for name, x in exact.change.items():
        y = training.change[name]
        assert np.vdot(x, y) > 0.98 * np.linalg.norm(x) * np.linalg.norm(y), name


@pytest.mark.slow
def test_gradients_of_bfloat16_weights_add_up_in_float32():
    """The gradients of eight passes add up to that of one: Adam's first mean, in float32."""
    constant = ("weight_dtype=bfloat16", "mu_dtype=float32", "learning_rate=0")
    means = []
    for accumulation in (1, 8):
        training = train(make_config(*constant, devices=1), random_rows(1, ROWS), accumulation)
        state = training.states[1]
        assert {x.dtype for x in jax.tree.leaves(state.model)} == {np.dtype(jnp.bfloat16)}
        means.append(by_name(adam_state(state.opt_state).mu))
    assert deviation(*means) < 0.02  # the gradients of norms are rounded to bfloat16 in each pass
