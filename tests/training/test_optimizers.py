"""Optimizers beside the originals of others, on any mesh; half-lives beside plain arithmetic."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import one_step
import optax
import pytest
from conftest import make_config, make_mesh
from optax.contrib import MuonDimensionNumbers, muon
from test_step import trained

from maxramp.model.parts.weights import weights_of
from maxramp.model.pipeline import order_by_layer
from maxramp.parallel.axes import AXES, NAME_IN_KEYS
from maxramp.parallel.mesh import abstract_mesh
from maxramp.planning.plan import estimate
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate
from maxramp.training.optimizers import sgd
from maxramp.training.optimizers.half_lives import STEADY, Pace
from maxramp.training.optimizers.table import make_optimizer
from maxramp.training.state import abstract_state, init_state

CONSTANT = ("enable_rampup_batch_size=False", "per_device_batch_size=4")
RATE = 0.1


def by_name(tree):
    return one_step.by_name(order_by_layer(tree))


def moved(*keys, paces=(STEADY,) * 3, devices=8):
    """Weights before and after an update of each pace by gradients that depend on the weights'
    places alone, and these gradients; all by name, layers in their order."""
    config = make_config(*CONSTANT, *keys, devices=devices)

    def sines(state):
        return jax.tree.map(lambda w: jnp.sin(jnp.float32(1e4) * w), state.trained)

    def change(state, weights, gradients, pace):
        update, step = make_optimizer(config.optimizer).update, {"pace": Pace(*pace)}
        updates, state = update(gradients, state, weights, learning_rate=RATE, **step)
        return state, optax.apply_updates(weights, updates)

    with jax.set_mesh(make_mesh(config)):
        state = jax.jit(functools.partial(init_state, config.recipe))()
        gradients = jax.jit(sines)(state)
        weights, held = state.trained, state.opt_state
        change = jax.jit(change, static_argnums=3)
        for k, pace in enumerate(paces):
            scaled = jax.tree.map(lambda g, k=k: g * (1 + k) + 0.1 * k, gradients)
            held, weights = change(held, weights, scaled, pace)
        pairs = zip(by_name(weights), weights_of(weights), strict=True)
        roles = {name: weight.role for name, weight in pairs}
        return by_name(state.trained), by_name(weights), by_name(gradients), roles


def as_optax(transformation, weights, gradients, steps=3):
    change = jax.jit(transformation.update)
    state = transformation.init(weights)
    for k in range(steps):
        scaled = {name: g * (1 + k) + np.float32(0.1 * k) for name, g in gradients.items()}
        direction, state = change(scaled, state, weights)
        weights = optax.apply_updates(weights, direction)
    return weights


def dimensions(name):
    """Axes of a stack [L, ...] or [L, E, ...] that its product sums over, and those it makes."""
    experts, letters = re.search("_(E?)([A-Za-z]+)$", name).groups()
    cut, first = 1 if letters[0] == "D" else len(letters) - 1, 1 + len(experts)
    axes = tuple(range(first, first + len(letters)))
    return MuonDimensionNumbers(axes[:cut], axes[cut:])


MUON = (
    *("opt_type=muon", "muon_weight_decay=0.3", "adam_weight_decay=0.2", "adam_b2=0.98"),
    *("base_num_kv_heads=4", "adamw_mask=[scale]"),
)


def muon_case(sizes, layers, *keys, rms=None, mark=pytest.mark.slow):
    return pytest.param(sizes, layers, keys, rms, marks=mark, id=f"{sizes} {layers} {keys}")


EXPERTS = ("decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2")
EXPERTS += ("base_moe_mlp_dim=16",)
CIRCULAR = ("num_pipeline_repeats=2", "num_layers_per_pipeline_stage=2")


@pytest.mark.parametrize(
    "sizes, layers, keys, rms",
    [
        muon_case({"data": 2, "fsdp": 2, "tensor": 2}, 3, mark=()),
        muon_case({"stage": 2, "fsdp": 4}, 4, rms=0.2),
        muon_case({"data": 8}, 11),
        muon_case({"fsdp": 2, "tensor": 4}, 3),
        muon_case({"fsdp": 8}, 5, mark=pytest.mark.long),
        muon_case({"data": 2, "tensor": 4}, 1, mark=pytest.mark.long),
        muon_case({"data": 2, "fsdp": 4}, 11, mark=pytest.mark.long),
        muon_case({"stage": 2, "fsdp": 2, "tensor": 2}, 8, *CIRCULAR),
        muon_case({"fsdp": 2, "expert": 2, "tensor": 2}, 3, *EXPERTS),
    ],
)
def test_muon_is_that_of_optax_on_every_mesh(sizes, layers, keys, rms):
    """Also of layers that do not divide, heads' own axes, experts, and weights that decay."""
    axes = dict.fromkeys(AXES, 1) | sizes
    axis_keys = [f"ici_{NAME_IN_KEYS[axis]}_parallelism={size}" for axis, size in axes.items()]
    before, after, gradients, roles = moved(
        *MUON, *axis_keys, f"base_num_decoder_layers={layers}", f"muon_consistent_rms={rms}", *keys
    )
    matrices = {name: w for name, w in before.items() if roles[name] == "matrix"}
    assert len(matrices) == 7 and {w.shape[0] for w in matrices.values()} == {layers}
    reference = muon(
        *(RATE, (3.4445, -4.7750, 2.0315)),
        weight_decay=0.3,
        consistent_rms=rms,
        muon_weight_dimension_numbers={name: dimensions(name) for name in matrices},
    )
    expected = as_optax(reference, matrices, {name: gradients[name] for name in matrices})
    adam = optax.adamw(
        *(RATE, 0.9, 0.98), weight_decay=0.2, mask=lambda ws: {n: roles[n] != "scale" for n in ws}
    )
    others = {name: w for name, w in before.items() if name not in matrices}
    expected |= as_optax(adam, others, {name: gradients[name] for name in others})
    for name, weight in after.items():
        np.testing.assert_allclose(weight, expected[name], atol=2e-5, err_msg=name)


def test_momentum_is_that_of_optax():
    before, after, gradients, _ = moved("opt_type=sgd", "sgd_momentum=0.9", devices=1)
    expected = as_optax(optax.sgd(RATE, 0.9), before, gradients)
    for name, weight in after.items():
        np.testing.assert_allclose(weight, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def adam(weights, gradients, betas, decays):
    """Adam from its definition: means of gradients weighed by what later steps keep of them."""
    first, second, eps = [], [], 1e-8
    for k, (b1, b2) in enumerate(betas):
        g = gradients.astype(np.float64) * (1 + k) + 0.1 * k
        first = [(w * b1, g_k) for w, g_k in first] + [(1 - b1, g)]
        second = [(w * b2, g_k) for w, g_k in second] + [(1 - b2, g**2)]
        m, v = (sum(w * x for w, x in held) / sum(w for w, _ in held) for held in (first, second))
        weights = weights - RATE * (m / (np.sqrt(v) + eps) + decays[k] * weights)
    return weights


def test_half_lives_through_a_ramp():
    """Batches of 4, 8 and 64 samples where keys are meant for 64; rates follow their root."""
    config = make_config(
        *("per_device_batch_size_start=1", "per_device_batch_size=8", "total_samples=4096"),
        *("per_device_batch_size_increment=1", "global_rampup_samples=1024", "opt_type=adamw"),
        *("batch_size_lr_scaling=sqrt", "batch_size_lr_reference=final"),
    )
    rate = LearningRate.from_keys(config.learning_rate, RampupBatchManager(config.batch))
    assert rate.reference == 64
    batches = 4, 4, 8, 64, 64
    names = "adam_b1", "adam_b2", "adam_weight_decay"
    before, after, gradients, _ = moved(
        f"half_lives_in_samples=[{','.join(names)}]",
        *("adam_b1=0.9", "adam_b2=0.95", "adam_weight_decay=0.4"),
        paces=tuple(rate.pace(batch) for batch in batches),
        devices=1,
    )
    betas = [(0.9 ** (batch / 64), 0.95 ** (batch / 64)) for batch in batches]
    # Of the learning rate times the decay the batch is left, its root being in the former.
    decays = [0.4 * (batch / 64) / (batch / 64) ** 0.5 for batch in batches]
    for name, weight in after.items():
        expected = adam(before[name], gradients[name], betas, decays)
        np.testing.assert_allclose(weight, expected, atol=2e-5, err_msg=name)


def test_a_constant_batch_is_its_own_reference():
    """So each half-life is exactly that of its key."""
    config = make_config(*CONSTANT, "batch_size_lr_scaling=sqrt", "steps=9")
    rate = LearningRate.from_keys(config.learning_rate, RampupBatchManager(config.batch))
    assert rate.pace(32) == STEADY


def test_the_noise_scale_beside_muon():
    """It has no kind of Adam's, as Adam updates no matrix."""
    metrics = trained("opt_type=muon", "log_gradient_noise_scale=True", accumulation=2).metrics
    kinds = {name.removesuffix("noise_signal") for name in metrics if name.endswith("noise_signal")}
    assert kinds == {"", "norms_"} and all(np.isfinite(x).all() for x in metrics.values())


def test_a_plan_counts_one_mean_for_a_matrix_of_muon():

    def planned(name):
        config = make_config(*CONSTANT, f"opt_type={name}")
        ramp = RampupBatchManager(config.batch, meshes=lambda devices, sample: config.mesh)
        return config, estimate(config.recipe, ramp.stages[0].spec)["optimizer"]

    config, adamw = planned("adamw")
    state = abstract_state(config.recipe, abstract_mesh(config.mesh.sizes))
    bytes_per_device = sum(4 * w.size // 8 for w in weights_of(state.model) if w.role == "matrix")
    assert (adamw - planned("muon")[1]) * 2**30 == pytest.approx(bytes_per_device, abs=16)


def test_a_constant_gradient_has_the_same_effect_at_any_batch():
    """With momentum whose half-life is in samples, in the end."""
    keys = make_config("opt_type=sgd", "sgd_momentum=0.9", "half_lives_in_samples=[sgd_momentum]")
    g = {"w": jnp.ones(1)}
    for batch in (0.25, 1.0, 4.0):
        momentum = sgd.transform(keys.optimizer, 1.0, Pace(batch))
        state = momentum.init(g)
        for _ in range(int(200 / batch)):
            updates, state = momentum.update(g, state)
        assert updates["w"] == pytest.approx(-10, rel=1e-3)
