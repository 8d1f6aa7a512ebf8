"""Multi-token prediction: drafts read and predict their own document alone, and a step with them is
the same however it is split.

Shapes: R rows of a step, T tokens of a row, S with the one after them.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, batch_of, make_mesh
from jax.sharding import NamedSharding
from one_step import by_name, packed_batch
from test_step import make_config

from maxramp.data.rows import PADDING
from maxramp.model.parts.weights import weights_of
from maxramp.model.pattern import DRAFT
from maxramp.model.pipeline import order_by_layer
from maxramp.objectives.pairs import PAIRS
from maxramp.objectives.text import TEXT
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.drafts import look_ahead
from maxramp.training.learning_rate import LearningRate
from maxramp.training.state import abstract_state, init_state
from maxramp.training.step import eval_loss_of, eval_step, make_train_step

ROWS, SCALE = 8, 0.5
SGD = ("opt_type=sgd", "sgd_momentum=0", "learning_rate=1", "gradient_clipping_threshold=0")
KEYS = (*SGD, f"mtp_loss_scaling_factor={SCALE}", "base_num_kv_heads=2")


def favour(head_DV):
    """A head under which a few tokens are likely, and all others alike."""
    return head_DV * (np.arange(head_DV.shape[1]) < 3)


def take_steps(config, batch, clocks=(0,)):
    """Steps from the first state, each at a clock: weights before and after, and their metrics, and
    what an evaluation shows of the first state under another head."""
    mesh = make_mesh(config)

    def evaluate(model, batch):
        model = jax.tree.map(lambda x: x, model)
        model.head_DV = model.head_DV.replace(favour(model.head_DV[...]))
        names = config.recipe.eval_sums
        sums = (jnp.float32(0),) * len(names)
        sums = eval_step(model, sums, batch, loss=eval_loss_of(config.recipe))
        return {f"eval_{name}": x for name, x in zip(names, sums, strict=True)}

    ramp = RampupBatchManager(config.batch, mesh.size)
    step = make_train_step(config.recipe, LearningRate.from_keys(config.learning_rate, ramp))
    with jax.set_mesh(mesh):
        state = jax.jit(functools.partial(init_state, config.recipe))()
        batch = jax.device_put(batch, NamedSharding(mesh, BATCH_ABT))
        compiled, results = jax.jit(step).lower(state, batch).compile(), []
        held_out = jax.device_get(jax.jit(evaluate)(state.model, batch))
        for clock in clocks:
            at = state.__class__(**vars(state) | {"consumed_samples": jnp.uint32([clock, 0])})
            after, metrics = compiled(at, batch)
            metrics = jax.device_get(metrics) | held_out
            results.append((by_name(order_by_layer(after.model)), metrics))
        return by_name(order_by_layer(state.model)), *results


def norm(x_TD, scale_D):
    return x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + 1e-5) * scale_D


def rotate(x_TKh):
    T, half = len(x_TKh), x_TKh.shape[-1] // 2
    angle = np.arange(T)[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    a, b = x_TKh[..., :half], x_TKh[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def run_layer(w, x_TD):
    y = norm(x_TD, w["mixer_norm.scale_D"])
    names = ("query_DHh", "key_DKh", "value_DKh")
    q, k, v = (np.einsum("TD,DKh->TKh", y, w[f"mixer.{name}"]) for name in names)
    k, v = (np.repeat(z, q.shape[1] // k.shape[1], axis=1) for z in (k, v))
    scores = np.einsum("THh,SHh->HTS", rotate(q), rotate(k)) / np.sqrt(q.shape[-1])
    shares = np.exp(scores) * np.tri(len(q))
    shares /= shares.sum(-1, keepdims=True)
    x_TD = x_TD + np.einsum("HTS,SHh,HhD->TD", shares, v, w["mixer.out_HhD"])
    y = norm(x_TD, w["mlp_norm.scale_D"])
    gate = y @ w["mlp.gate_DF"]
    return x_TD + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_DF"])) @ w["mlp.out_FD"]


def sums_by_definition(w, rows, begins, drafts):
    """Sums of cross-entropy, numbers of targets, and numbers of tokens that the model would write
    too; of the next tokens and of all drafts: document by document."""

    def layers(kind):
        own = {n.split(".", 2)[2]: x for n, x in w.items() if n.startswith(f"layers.{kind}.")}
        return [{n: x[i] for n, x in own.items()} for i in range(len(next(iter(own.values()))))]

    sums, own = np.zeros((2, 3)), None
    for row, is_first in zip(rows, begins, strict=True):
        starts = [0, *np.flatnonzero(is_first[1:]) + 1, len(row)]
        for start, end in zip(starts, starts[1:], strict=False):
            document, inputs = row[start:end], row[start : min(end, len(row) - 1)]
            x = w["embedding_VD"][inputs]
            for layer in layers("dense") if len(x) else ():
                x = run_layer(layer, x)
            x = norm(x, w["norm.scale_D"])
            for d, draft in enumerate([None, *layers("draft")[:drafts]]):
                if draft:  # of the positions from which a token d further on can be read
                    ahead = w["embedding_VD"][inputs[d:]]
                    joined = norm(ahead, draft["embedding_norm.scale_D"])
                    joined = joined, norm(x[: len(ahead)], draft["hidden_norm.scale_D"])
                    x = np.concatenate(joined, -1) @ draft["join_CD"]
                    block = {n.removeprefix("block."): y for n, y in draft.items()}
                    x = norm(run_layer(block, x), draft["norm.scale_D"])
                targets = document[d + 1 :][: len(x)]
                logits = x[: len(targets)] @ w["head_DV"]
                right = logits[np.arange(len(targets)), targets]
                best = logits.argmax(-1)
                own = own if d else best
                loss = (np.log(np.exp(logits).sum(-1)) - right).sum()
                sums[int(d > 0)] += loss, len(targets), (best == own[d:]).sum()
    return sums


def losses_by_definition(*arguments):
    sums = sums_by_definition(*arguments)
    return sums[:, 0] / sums[:, 1]


def random_documents(length):
    rng = np.random.default_rng(0)
    rows_RS = rng.integers(0, 264, (4, length + 1), dtype=np.int32)
    return rows_RS, rng.random(rows_RS.shape) < 0.25


def test_a_step_is_that_of_the_definitions():
    """Two drafts, and documents too short for them; a phase switches their loss off in the same
    program. Gradients are numerical derivatives along those of the step."""
    phase = ("phases_unit=samples", "phases={80: {mtp_loss_scaling_factor: 0}}")
    constant = ("lr_schedule_type=wsd", "wsd_decay_steps_fraction=0", "max_target_length=12")
    config = make_config(*KEYS, *phase, *constant, "mtp_num_layers=2", devices=1)
    rows_RS, begins_RS = random_documents(12)
    batch = batch_of(*(x.reshape(2, 2, -1) for x in (rows_RS, begins_RS)))
    first, *results = take_steps(config, batch, (0, 80))
    assert len([name for name in first if name.startswith("layers.draft.")]) == 13
    weights = {name: x.astype(np.float64) for name, x in first.items()}
    expected = losses_by_definition(weights, rows_RS, begins_RS, 2)
    favoured = weights | {"head_DV": favour(weights["head_DV"])}
    _, ahead = sums_by_definition(favoured, rows_RS, begins_RS, 2)
    names = ("eval_mtp_loss", "eval_mtp_tokens", "eval_mtp_acceptance_rate")
    np.testing.assert_allclose([results[0][1][name] for name in names], ahead, rtol=1e-6)
    assert 0.1 < ahead[2] / ahead[1] < 0.9
    for scale, (last, metrics) in zip((SCALE, 0), results, strict=True):
        np.testing.assert_allclose((metrics["loss"], metrics["mtp_loss"]), expected, rtol=1e-6)
        for name, x in weights.items():
            gradient = x - last[name]
            if not scale and "draft" in name:
                assert not gradient.any()
                continue
            length = np.sqrt((gradient**2).sum())
            near = [
                losses_by_definition(
                    weights | {name: x + step * gradient / length}, rows_RS, begins_RS, 2
                )
                @ (1, scale)
                for step in (1e-4, -1e-4)
            ]
            assert length == pytest.approx((near[0] - near[1]) / 2e-4, rel=2e-5), name


def test_what_drafts_read_and_predict_is_of_their_document():
    rows_RS, begins_RS = random_documents(9)
    rows_RS[3, 6:] = PADDING
    begins_RS[3, 6:] = False
    batch = batch_of(rows_RS, begins_RS)
    for d, ahead in enumerate(look_ahead(batch, 10).ahead, 1):
        for (r, t), token in np.ndenumerate(np.asarray(ahead[0])):
            inside = t + d < 9 and not begins_RS[r, t + 1 : t + d + 1].any()
            assert token == (rows_RS[r, t + d] if inside else PADDING)
            follows = inside and not begins_RS[r, t + d + 1]
            assert ahead[1][r, t] == (rows_RS[r, t + d + 1] if follows else PADDING)


EXPERTS = (
    *("decoder_block=dots1", "use_qk_norm=True", "routed_score_func=sigmoid", "routed_bias=True"),
    *("num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=16", "shared_experts=1"),
    *("routed_bias_update_rate=0.01", "load_balance_loss_weight=0.1", "router_z_loss_weight=0.01"),
)
MESHES = {
    "passes": (),
    "all": ("ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"),
    "ulysses": ("ici_context_parallelism=2", "context_parallel_strategy=ulysses"),
    "balanced": ("ici_context_parallelism=4", "context_parallel_strategy=all_gather"),
    "experts": ("ici_expert_parallelism=4",),
    "pipeline": ("ici_pipeline_parallelism=2", "num_pipeline_repeats=2", "mtp_num_layers=2"),
    "expert pipeline": ("ici_pipeline_parallelism=2", "ici_expert_parallelism=2"),
}


@functools.cache
def one_device(*keys):
    config = make_config(*keys, f"per_device_batch_size={ROWS}", devices=1)
    return take_steps(config, packed_batch(config, ROWS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [*itertools.product(["experts"], MESHES)]
    + [pytest.param("dense", x, marks=pytest.mark.long) for x in MESHES if "expert" not in x],
)
def test_any_split_is_the_same_step(family, mesh):
    """The loss, its parts, and what every weight moves by, the biases of drafts' experts too."""
    layers = "4" if mesh == "pipeline" else "2"
    keys = (*KEYS, "mtp_num_layers=1", "max_target_length=32", f"base_num_decoder_layers={layers}")
    keys += EXPERTS if family == "experts" else ()
    keys += tuple(key for key in MESHES[mesh] if key.startswith("mtp"))
    passes, devices = (4, 1) if mesh == "passes" else (1, DEVICES)
    rows = f"per_device_batch_size={ROWS / passes / devices}"
    config = make_config(*keys, *MESHES[mesh], rows, devices=devices)
    first, (last, metrics) = take_steps(config, packed_batch(config, ROWS, passes))
    first_1, (last_1, metrics_1) = one_device(*keys)
    shown = [name for name in metrics if name.startswith("eval_")]
    for name in ("loss", "mtp_loss", "grad_norm", "load_balance_loss", *shown):
        if name in metrics:
            np.testing.assert_allclose(metrics[name], metrics_1[name], rtol=1e-5)
    for name, x in first_1.items():
        np.testing.assert_array_equal(first[name], x)
        change = np.abs(last_1[name] - x).max()
        assert change > 0
        rounding = 2.0**-22 * np.abs(last_1[name]).max()
        assert np.abs(last[name] - last_1[name]).max() <= 1e-5 * change + rounding, name
    if family == "experts":
        loads = metrics["expert_load"]
        assert loads.shape == (int(layers) + config.model.mtp_num_layers, 8)
        np.testing.assert_array_equal(loads, metrics_1["expert_load"])


def test_drafts_stay_where_no_next_token_is_predicted():
    """They are frozen, and their experts' loads are not counted; so under trainable_layers without
    them."""
    rows = (*EXPERTS, "mtp_num_layers=1", "base_num_decoder_layers=2")
    for keys, objective in (((), PAIRS), (("trainable_layers=[0,1]",), TEXT)):
        config = make_config(*KEYS, *rows, *keys, devices=1)
        recipe = dataclasses.replace(config.recipe, objective=objective)
        state = abstract_state(recipe, make_mesh(config))
        assert not weights_of(state.trained.layers[DRAFT])
        assert len(weights_of(state.frozen.layers[DRAFT])) == 20
        assert state.buffers["expert_load"].shape == (2, 8)


@pytest.mark.slow
def test_the_noise_scale_is_measured_with_drafts():
    """In both tensor halves, as on one device."""
    keys = (*KEYS, "mtp_num_layers=1", "log_gradient_noise_scale=True", "max_target_length=32")
    names = ("norms_noise_signal", "norms_noise_variance", "mtp_loss")
    mesh = ("ici_fsdp_parallelism=4", "ici_tensor_parallelism=2")
    config = make_config(*keys, *mesh, f"per_device_batch_size={ROWS / DEVICES}")
    _, (_, metrics) = take_steps(config, packed_batch(config, ROWS))
    _, (_, metrics_1) = one_device(*keys)
    for name in names:
        np.testing.assert_allclose(metrics[name], metrics_1[name], rtol=1e-4)
