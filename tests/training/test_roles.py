"""What a step does with a weight follows from its role, and from whether it is trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_mesh
from test_step import ROWS, make_config, random_rows, train

from maxramp.model.keys import ROLES
from maxramp.model.parts.weights import new_weight, weights_of
from maxramp.training.keys import OPTIMIZERS, optimizer_names
from maxramp.training.optimizers.half_lives import STEADY, decay_weights
from maxramp.training.optimizers.table import make_optimizer
from maxramp.training.state import abstract_state

MESH = ("ici_data_parallelism=2", "ici_fsdp_parallelism=2")


def by_role(model):
    keys = {}
    for path, weight in jax.tree.leaves_with_path(model, is_leaf=lambda x: hasattr(x, "role")):
        keys[jax.tree_util.keystr(path), weight.role] = np.asarray(weight[...])
    return keys


def stepped(*keys):
    """The states before and after a step in two passes at rate 1/2, and the gradient's norm."""
    rate = ("learning_rate=0.5", "learning_rate_final_fraction=1")
    training = train(make_config(*MESH, *rate, *keys, devices=4), random_rows(1, ROWS), 2)
    return *training.states, training.metrics["grad_norm"][0]


def test_an_optimizer_is_a_record_and_a_module():
    for name, record in OPTIMIZERS.items():
        assert set(record.half_lives) <= set(record.keys.names())
        assert set(record.roles) <= set(ROLES) == optimizer_names(name).keys()
        kind = "optax.lion" if name == "optax" else name
        make_optimizer(make_config(f"opt_type={kind}").optimizer).init({})


def test_sinks_and_recurrences_never_decay():
    weights = {role: new_weight(jnp.ones((2, 2)), role, "D F") for role in ROLES}
    decay = decay_weights(make_config("adamw_mask=[]").optimizer, "adam_weight_decay", STEADY)
    updates, _ = decay.update(jax.tree.map(jnp.zeros_like, weights), decay.init(weights), weights)
    assert {x for x in ROLES if not updates[x][...].any()} == {"sink", "recurrence"}


def test_every_weight_has_a_role_and_letters_of_its_axes():
    """In a stack there is one axis more, of the layers."""
    config = make_config(devices=4)
    state = abstract_state(config.recipe, make_mesh(config))
    assert len(weights_of(state.model)) == len(jax.tree.leaves(state.model))
    assert {weight.role for weight in weights_of(state.model)} <= set(ROLES)
    for weight in weights_of(state.model.layers):
        assert weight.leading == "L" and weight.ndim == len(weight.axes)
    assert state.model.embedding_VD.axes == "VD"


def test_only_what_is_trained_has_a_gradient():
    """Frozen weights have no moments; the others move as beside trained ones, alone in the norm."""

    sgd = ("opt_type=sgd", "gradient_clipping_threshold=0")
    before, together, _ = stepped(*sgd)
    mask = "trainable_parameters_mask=[scale, head]"
    _, alone, norm = stepped(*sgd, mask)
    first, together, last = map(by_role, (before.model, together.model, alone.model))
    squares = 0.0
    for (path, role), weight in last.items():
        is_frozen = role not in ("scale", "head")
        expected = first if is_frozen else together
        tolerance = 0 if is_frozen else 1e-6  # other programs add in another order
        np.testing.assert_allclose(weight, expected[path, role], rtol=tolerance, err_msg=path)
        squares += np.square((weight - first[path, role]) / 0.5).sum()
    assert norm == pytest.approx(squares**0.5, rel=1e-4)
    config = make_config("opt_type=adamw", mask, devices=4)
    state = abstract_state(config.recipe, make_mesh(config))
    assert {weight.role for weight in weights_of(state.opt_state)} == {"scale", "head"}
