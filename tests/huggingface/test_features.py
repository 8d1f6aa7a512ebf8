"""What sets the dense families apart from a Llama: every feature moves the logits."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_config
from flax import nnx
from later import Later
from opened import config_of, load, logits
from small_models import CONFIGS, TOKENS_BT, write_folder

from maxramp.huggingface import config_json
from maxramp.model.parts import rotary
from maxramp.model.parts.norm import RMSNorm
from maxramp.model.pattern import Rope

transformers = Later("transformers")
modeling_rope_utils = Later("transformers.modeling_rope_utils")
pytestmark = pytest.mark.slow


def with_norms(model, norms):
    model.layers["dense"].norms = norms


def with_offset(model, offset):
    for _, module in nnx.iter_modules(model):
        if isinstance(module, RMSNorm):
            module.offset = offset


def without_norms_of_heads(model):
    model.layers["dense"].mixer.has_norms = False


def without_biases(model):
    model.layers["dense"].mixer.has_biases = False


def without_norms_after(model):
    for name in ("mixer_post_norm", "mlp_post_norm"):
        delattr(model.layers["dense"], name)
        setattr(model.layers["dense"], name, lambda x: x)


def without_scaled_embedding(model):
    model.embedding_scale = 1.0


_FULL = {"full_attention": {"rope_theta": 100.0}}
_LOCAL = {"sliding_attention": CONFIGS["olmo3"]["rope_parameters"]["sliding_attention"]}
_GEMMA = {
    "windows": {"sliding_window": 64},
    "scale of scores": {"query_pre_attn_scalar": 16},
    "gelu": {"hidden_activation": "silu"},
    "norms after": functools.partial(with_norms, norms="before"),
    "norms before": functools.partial(with_norms, norms="after"),
    "1 + w": functools.partial(with_offset, offset=0.0),
    "embedding": without_scaled_embedding,
}
_OLMO = {"norms after": without_norms_after}
_OLMO |= {"norms of heads": without_norms_of_heads}
# What takes each feature away: other values of config.json, or a change of our model, which with
# all of them is that of transformers (test_beside_transformers.py).
WITHOUT = {
    "gemma2": _GEMMA
    | {"cap of scores": {"attn_logit_softcapping": None}}
    | {"cap of logits": {"final_logit_softcapping": None}},
    "gemma3": _GEMMA
    | {"norms of heads": without_norms_of_heads}
    | {"own base": {"rope_local_base_freq": 100.0}, "linear factor": {"rope_scaling": None}},
    "olmo2": _OLMO,
    "llama3.1": {"scaled positions": {"rope_scaling": None}},
    "mistral": {"windows": {"sliding_window": None}},
    "qwen2.5": {"biases": without_biases},
    "qwen3": {"norms of heads": without_norms_of_heads},
    "olmo3": _OLMO
    | {"windows": {"sliding_window": 64}, "yarn": {"rope_parameters": _FULL | _LOCAL}}
    | {"yarn in layers of a window": {"rope_parameters": {"full_attention": None}}},
}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    @functools.cache
    def find(name):
        folder = write_folder(tmp_path_factory.mktemp(name), name)
        return logits(load(folder, config_of(folder)), config_of(folder), TOKENS_BT)

    return find


@pytest.mark.parametrize(
    "name, feature", [(name, feature) for name, features in WITHOUT.items() for feature in features]
)
def test_every_feature_bites(tmp_path, before, name, feature):
    """Without it logits move by 100 times the tolerance."""
    change = WITHOUT[name][feature]
    values = change if isinstance(change, dict) else {}
    folder = write_folder(tmp_path, name, **values)
    config = config_of(folder)
    model = load(folder, config)
    if not values:
        change(model)
    moved = np.abs(logits(model, config, TOKENS_BT) - before(name)).max()
    assert moved > 1e-3 * np.ptp(before(name))


SCALINGS = (
    {"rope_type": "linear", "factor": 8.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
)


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_positions_are_those_of_transformers(scaling, head_dim):
    """At position 1, their amplitude too; and config.json says them as it did."""
    values = {**CONFIGS["qwen3"], "head_dim": head_dim, "rope_theta": 5e5, "rope_scaling": scaling}
    theirs = transformers.AutoConfig.for_model(**values)
    inverse, amplitude = modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs)
    keys = config_json.read_keys(values, "FILE")
    arguments = [f"{name}={str(value).replace(' ', '')}" for name, value in keys.items()]
    arguments += ["enable_rampup_batch_size=False", "dataset_type=synthetic"]
    config = make_config(*arguments).model
    cos, sin = rotary.angles(Rope.from_keys(config), jnp.array([1]), head_dim)
    np.testing.assert_allclose(cos[0], np.cos(inverse.numpy()) * amplitude, atol=1e-6)
    np.testing.assert_allclose(sin[0], np.sin(inverse.numpy()) * amplitude, rtol=2e-6)
    for original in (values, {}, values | {"rope_scaling": None}):  # the last one has to change
        written = config_json.make_config(config, original, "float32")
        assert config_json.read_keys(written, "FILE") == keys
