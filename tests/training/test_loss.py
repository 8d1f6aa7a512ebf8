"""The loss in blocks against a plain one in float64, and Gemma's caps of logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, make_config, make_mesh
from jax.sharding import NamedSharding

from maxramp.data.rows import PADDING
from maxramp.model.decoder import Decoder
from maxramp.model.size import loss_blocks
from maxramp.parallel.sharding import HEAD_DV, X_BTD
from maxramp.training.log_probs import scores, token_log_probs
from maxramp.training.loss import cross_entropy_sums, next_token_prediction

B, T, D, V = 8, 5, 16, 24


def inputs():
    random = np.random.default_rng(0)
    x, head = random.normal(size=(B, T, D)), random.normal(size=(D, V))
    targets = random.integers(0, V, (B, T), dtype=np.int32)
    targets[random.random((B, T)) < 0.3] = PADDING
    return x, head, targets


def mesh_of(data, fsdp, tensor):
    sizes = (f"ici_data_parallelism={data}", f"ici_fsdp_parallelism={fsdp}")
    keys = (*sizes, f"ici_tensor_parallelism={tensor}", "enable_rampup_batch_size=False")
    return make_mesh(make_config(*keys, devices=data * fsdp * tensor))


def place(mesh, x, head, targets):
    pairs = zip((x, head), (X_BTD, HEAD_DV), strict=True)
    return *(jax.device_put(np.float32(a), NamedSharding(mesh, s)) for a, s in pairs), targets


def reference(z_loss):
    """Sums and gradients of the objective to x and head, written out in float64."""
    x, head, targets = inputs()
    logits = x @ head
    probabilities = np.exp(logits)
    z = probabilities.sum(-1)
    probabilities /= z[..., None]
    counts = targets != PADDING
    picked = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    cross_entropy = ((np.log(z) - picked) * counts).sum()
    objective = cross_entropy + z_loss * (np.log(z) ** 2 * counts).sum()
    slope = probabilities * (1 + 2 * z_loss * np.log(z))[..., None] - np.eye(V)[targets]
    slope *= counts[..., None]
    gradients = slope @ head.T, np.einsum("btd,btv->dv", x, slope)
    return (objective, cross_entropy, counts.sum()), gradients


# Every size of a block on one device and over all axes; on the others whole rows and odd blocks.
CASES = [
    *((mesh, block, 0.1) for mesh in ((1, 1, 1), (2, 2, 2)) for block in (0, 1, 3, 7, 1000)),
    *((mesh, block, 0.1) for mesh in ((1, 1, 8), (8, 1, 1)) for block in (0, 3)),
    *(((2, 2, 2), block, 0.0) for block in (0, 3)),
]


@pytest.mark.parametrize("mesh, block_tokens, z_loss", CASES)
def test_blocks_change_nothing(mesh, block_tokens, z_loss):
    mesh = mesh_of(*mesh)

    def loss(x, head, targets):
        sums = cross_entropy_sums(x, head, targets, z_loss, block_tokens)
        return 3 * sums[0], sums

    with jax.set_mesh(mesh):
        x, head, targets = place(mesh, *inputs())
        gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
        gradients, sums = jax.jit(gradient)(x, head, targets)
        alone = jax.jit(lambda *a: loss(*a)[1])(x, head, targets)
    expected_sums, expected_gradients = reference(z_loss)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-5)
    np.testing.assert_allclose(alone, sums, rtol=1e-6)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, 3 * expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_statistics_of_tokens(mesh):
    """As numpy counts them from all logits; the other sums stay what they are."""
    mesh = mesh_of(*mesh)
    x, head, targets = inputs()
    targets[0, :2] = np.einsum("btd,dv->btv", x, head)[0, :2].argmax(-1)
    logits = np.einsum("btd,dv->btv", x, head)[targets >= 0]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = (logits.argmax(-1) == targets[targets >= 0]).sum(), -(p * np.log(p)).sum()
    with jax.set_mesh(mesh):
        x, head, targets = place(mesh, x, head, targets)
        sums = jax.jit(lambda *a: cross_entropy_sums(*a, 0.1, 3, True))(x, head, targets)
        without = jax.jit(lambda *a: cross_entropy_sums(*a, 0.1, 3))(x, head, targets)
    assert sums[3] == expected[0] >= 1
    np.testing.assert_allclose(sums[4], expected[1], rtol=1e-5)
    np.testing.assert_array_equal(sums[:3], without)


@pytest.mark.parametrize(
    "tokens, block_tokens, width, expected",
    [
        (8 * 2048, 2048, 3072, (4, 2, 2048)),  # 3 blocks of gradients would fit, 2 divide 8
        (8 * 2048, 2048, 4096, (1, 8, 2048)),  # 2 groups of 4 would need as much
        (16 * 2048, 2048, 4096, (4, 4, 2048)),
        (2048, 2048, 64, (1, 1, 2048)),
        (7 * 512, 512, 1536, (1, 7, 512)),
        (7 * 512, 512, 768, (7, 1, 512)),
        (1000, 300, 4096, (1, 4, 250)),
        (1000, 0, 64, (1, 1, 1000)),
    ],
)
def test_blocks_are_as_large_as_asked_for(tokens, block_tokens, width, expected):
    """Groups, blocks of a group, tokens of a block; gradients of logits in bfloat16."""
    assert loss_blocks(tokens, block_tokens, width, 2) == expected


def test_logits_exist_for_one_block_at_a_time():
    """By the compiler's account: a vocabulary of 4096, 1,024 tokens, and 16 MiB of logits."""

    def temporary_bytes(block_tokens):
        def loss(x, head, targets):
            return cross_entropy_sums(x, head, targets, 0.0, block_tokens)[0]

        shapes = ((8, 128, 16), jnp.float32), ((16, 4096), jnp.float32), ((8, 128), jnp.int32)
        arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    with jax.set_mesh(mesh_of(1, 1, 1)):
        whole, blocks = temporary_bytes(0), temporary_bytes(64)
    logits = 1024 * 4096 * 4
    assert whole >= logits
    assert blocks < whole - 0.9 * logits * (1 - 64 / 1024)


TINY = ("decoder_block=gemma2", "sliding_window_size=6", "mlp_activations=[gelu,linear]")
TINY += ("logits_via_embedding=True", "attn_logits_soft_cap=50", "dataset_type=synthetic")
TINY += ("enable_rampup_batch_size=False", "per_device_batch_size=1")


@pytest.mark.parametrize(
    "mesh", [(), pytest.param(("ici_tensor_parallelism=2",), marks=pytest.mark.slow)]
)
def test_caps_of_logits_are_in_all_that_is_made_of_them(mesh):
    """The loss, log-probabilities and scores, with gradients; beside plain formulas of logits."""
    keys = ("final_logits_soft_cap=0.7", "loss_block_tokens=6", "z_loss_multiplier=0.1")
    config = make_config(*TINY, *keys, *mesh, devices=2 if mesh else 1)
    batch = batch_of((np.arange(34, dtype=np.int32) * 7 % 264).reshape(2, 17))
    execution = config.model
    objective = next_token_prediction(config.recipe.loss, execution)

    def minimize(model):
        log_p_BT, _, _ = token_log_probs(model, execution, batch, 6, temperature=0.5)
        return log_p_BT.sum() + objective(model, batch)[0], log_p_BT

    def plain(model):
        logits_BTV = model(batch.tokens, execution)
        chosen_BTV = np.eye(264)[batch.targets]
        warm, cold = (jax.nn.log_softmax(logits_BTV / t) for t in (1, 0.5))
        chosen, log_p_BT = ((x * chosen_BTV).sum(-1) for x in (warm, cold))
        z = jax.nn.logsumexp(logits_BTV, -1)
        return log_p_BT.sum() - chosen.sum() + 0.1 * (z**2).sum(), (log_p_BT, chosen)

    with jax.set_mesh(make_mesh(config)):
        model = jax.jit(lambda: Decoder(execution, jax.random.key(0)))()
        gradient, log_p_BT = jax.jit(jax.grad(minimize, has_aux=True))(model)
        expected, (cold, warm) = jax.jit(jax.grad(plain, has_aux=True))(model)

        @jax.jit
        def score(model):
            x_BTD, _ = model.hidden(batch.tokens, execution)
            return scores(x_BTD, model.head("float32"), batch.targets, 6, model.logits_cap)[0]

        np.testing.assert_allclose(score(model), warm, atol=1e-5)
    np.testing.assert_allclose(log_p_BT, cold, atol=1e-5)
    for own, other in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4 * np.abs(other).max())
