"""Families of experts beside transformers: every feature bites, and DeepSeek-V3's own module."""

import jax
import numpy as np
import pytest
from conftest import make_config, make_mesh
from later import Later
from opened import config_of, load, logits
from peers import TOLERANCE, assert_near, opened, theirs
from small_models import CONFIGS, TOKENS_BT, fuse_experts, tensors, write_file, write_folder
from test_weights import assert_same_tensors, write

from maxramp.huggingface.safetensors import find_tensors
from maxramp.model.parts.experts import Experts
from maxramp.parallel.sharding import X_BTD

torch = Later("torch")
transformers = Later("transformers")
pytestmark = pytest.mark.slow

# What takes each feature away: other values of config.json, tensors that become zeros, and modules
# of transformers' attention that then do nothing.
WITHOUT = {
    "mixtral": {"windows": {"sliding_window": None}, "a second expert": {"num_experts_per_tok": 1}},
    "qwen3_moe": {"sums of 1": {"norm_topk_prob": False}, "norms": ("q_norm", "k_norm")},
    "olmoe": {"sums of any size": {"norm_topk_prob": True}, "norms": ("q_norm", "k_norm")},
    "dots1": {
        "sums of 1": {"norm_topk_prob": False},
        "groups": {"n_group": 1, "topk_group": 1},
        "scaling": {"routed_scaling_factor": 1.0},
        "biases": "e_score_correction_bias",
        "shared experts": "shared_experts.down_proj.weight",
        "a dense layer": "layers.0.mlp.down_proj.weight",
        "norms": ("q_norm", "k_norm"),
    },
}


@pytest.mark.parametrize(
    "name, feature", [(name, feature) for name, features in WITHOUT.items() for feature in features]
)
def test_every_feature_bites(tmp_path, name, feature):
    """Ours are theirs with and without it, and the two differ by 100 times the tolerance."""
    change, held = WITHOUT[name][feature], tensors(CONFIGS[name])
    expected = theirs(opened(write_folder(tmp_path / "a", name)))
    values = change if isinstance(change, dict) else {}
    folder = write_folder(tmp_path / "b", name, **values)
    if isinstance(change, str):
        held = {key: 0 * x if key.endswith(change) else x for key, x in held.items()}
        write_file(folder / "model.safetensors", held)
    without, config = opened(folder), config_of(folder)
    model = load(folder, config)
    if isinstance(change, tuple):
        for layer in without.model.layers:
            for module in change:
                setattr(layer.self_attn, module, torch.nn.Identity())
        for block in model.layers.values():
            block.mixer.has_norms = False
    actual = theirs(without)
    assert_near(logits(model, config, TOKENS_BT), actual)
    assert np.abs(actual - expected).max() > 100 * TOLERANCE * (expected.max() - expected.min())


@pytest.mark.parametrize("name", WITHOUT)
def test_both_layouts_of_experts_are_read(tmp_path, name):
    """transformers saves experts in a tensor each and, asked for, in one a layer: we read both."""
    model = opened(write_folder(tmp_path / "in", name))
    held = tensors(CONFIGS[name])
    for is_fused in (False, True):
        folder = tmp_path / f"{is_fused}"
        model.save_pretrained(folder, save_original_format=not is_fused)
        assert {*find_tensors(str(folder))} == {*(fuse_experts(held) if is_fused else held)}
        config = config_of(folder)
        assert_near(logits(load(folder, config), config, TOKENS_BT), theirs(model))


@pytest.mark.parametrize("name", WITHOUT)
def test_experts_written_in_one_tensor_a_layer(tmp_path, name):
    """transformers opens them, with the tensors that it would write itself."""
    folder = write_folder(tmp_path / "in", name)
    config = config_of(folder)
    write(tmp_path / "out", config, load(folder, config), file_bytes=30_000, fuse_experts=True)
    assert_same_tensors(tmp_path / "out", fuse_experts(tensors(CONFIGS[name])))
    np.testing.assert_array_equal(theirs(opened(tmp_path / "out")), theirs(opened(folder)))


def test_a_layer_computes_what_that_of_deepseek_does():
    """Of one layer by itself: outputs, and gradients of inputs and weights."""
    E, D, F, sizes = 8, 32, 24, {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
    torch.manual_seed(0)
    peer = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE(
        transformers.DeepseekV3Config(
            **sizes,
            hidden_size=D,
            moe_intermediate_size=F,
            n_routed_experts=E,
            n_shared_experts=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
    )
    with torch.no_grad():
        for x in peer.state_dict().values():
            x.copy_(0.3 * torch.randn(x.shape))
    random = np.random.default_rng(0)
    x_BTD, dy_BTD = random.standard_normal((2, 2, 24, D)).astype(np.float32)
    theirs_BTD = torch.tensor(x_BTD, requires_grad=True)
    y_BTD = peer(theirs_BTD)
    (y_BTD * torch.tensor(dy_BTD)).sum().backward()

    config = make_config(
        *(
            "decoder_block=dots1",
            "use_qk_norm=true",
            "routed_bias=true",
            "routed_score_func=sigmoid",
        ),
        *(
            f"num_experts={E}",
            "num_experts_per_tok=3",
            "n_routing_groups=4",
            "topk_routing_group=2",
        ),
        *(f"base_emb_dim={D}", f"base_moe_mlp_dim={F}", "shared_experts=2", "norm_topk_prob=true"),
        *("routed_scaling_factor=2.5", "enable_rampup_batch_size=False", "per_device_batch_size=1"),
        devices=1,
    )
    gate_up = {name: x for name, x in peer.experts.named_parameters()}["gate_up_proj"]
    own = {
        "router.matrix_DE": (peer.gate.weight, None),
        "router.bias_E": (peer.gate.e_score_correction_bias, None),
        "gate_EDF": (gate_up, slice(0, F)),
        "up_EDF": (gate_up, slice(F, None)),
        "out_EFD": (peer.experts.down_proj, None),
        "shared.gate_DF": (peer.shared_experts.gate_proj.weight, None),
        "shared.up_DF": (peer.shared_experts.up_proj.weight, None),
        "shared.out_FD": (peer.shared_experts.down_proj.weight, None),
    }

    def peer_gradients(path, read):
        tensor, rows = own[
            jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        ]
        x = read(tensor)
        x = np.zeros(tensor.shape, np.float32) if x is None else x.detach().numpy()
        x = x if rows is None else x[:, rows]
        return x.swapaxes(-1, -2) if x.ndim > 1 else x

    with jax.set_mesh(make_mesh(config)):
        experts = Experts(config.model, jax.random.key(0))
        experts = jax.tree_util.tree_map_with_path(
            lambda path, x: jax.device_put(peer_gradients(path, lambda x: x), x.sharding), experts
        )

        def product(experts, x_BTD):
            y_BTD, _ = experts(jax.reshard(x_BTD, X_BTD))
            return (y_BTD * dy_BTD).sum(), y_BTD

        gradient = jax.jit(jax.grad(product, argnums=(0, 1), has_aux=True))
        (weight_gradients, x_gradient), actual = gradient(experts, x_BTD)
    assert_near(np.asarray(actual), y_BTD.detach().numpy())
    assert_near(np.asarray(x_gradient), theirs_BTD.grad.numpy(), 1e-4)
    for path, x in jax.tree_util.tree_leaves_with_path(weight_gradients):
        expected = peer_gradients(path, lambda x: x.grad)
        np.testing.assert_allclose(x, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)
