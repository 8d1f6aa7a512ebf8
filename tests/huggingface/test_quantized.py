"""Folders with weights of 4 and 8 bits: they are read as bfloat16, and written so."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from later import Later
from small_models import CONFIGS, tensors, write_file, write_folder
from test_weights import assert_same_tensors, on_mesh

from maxramp.errors import ConfigError
from maxramp.handover.export import export
from maxramp.handover.opening import open_model

VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [20, 12]}
SIZES = {"gpt_oss": {"intermediate_size": 64, "num_hidden_layers": 2}, "qwen3": {}}
LINES = {
    "gpt_oss": "4 tensors of MXFP4 are read as bfloat16, and an export has them so: model.layers.0",
    "qwen3": "28 tensors of fp8 are read as bfloat16, and an export has them so: model.layers.0",
}


def quantized(name) -> tuple[dict, dict, dict]:
    """A model's tensors in few bits and in bfloat16, and what its config.json says of the first."""
    random, kept, whole = np.random.default_rng(3), {}, {}
    for tensor, x in tensors(CONFIGS[name] | SIZES[name]).items():
        x = x.astype(ml_dtypes.bfloat16)
        kept[tensor] = whole[tensor] = x
        if name == "gpt_oss" and tensor.endswith(("gate_up_proj", "down_proj")):
            E, inputs, outputs = x.shape
            blocks = random.integers(0, 256, (E, outputs, inputs // 32, 16), np.uint8)
            scales = random.integers(118, 128, blocks.shape[:-1], np.uint8)
            del kept[tensor]
            kept |= {f"{tensor}_blocks": blocks, f"{tensor}_scales": scales}
            halves = np.stack([blocks & 15, blocks >> 4], -1).reshape(*scales.shape, 32)
            y = np.array(VALUES)[halves] * 2.0 ** (scales[..., None].astype(int) - 127)
            y = y.reshape(E, outputs, inputs).swapaxes(1, 2)
            whole[tensor] = y.astype(ml_dtypes.bfloat16)
        elif name == "qwen3" and tensor.endswith("proj.weight"):
            eight = (x.astype(np.float32) * 100).astype(ml_dtypes.float8_e4m3fn)
            shape = [
                -(-n // size) for n, size in zip(x.shape, FP8["weight_block_size"], strict=True)
            ]
            factors = random.uniform(0.005, 0.02, shape).astype(np.float32)
            kept |= {tensor: eight, f"{tensor}_scale_inv": factors}
            y = np.empty(x.shape, np.float32)
            for i, j in np.ndindex(x.shape):
                y[i, j] = np.float32(eight[i, j]) * factors[i // 20, j // 12]
            whole[tensor] = y.astype(ml_dtypes.bfloat16)
    return kept, whole, {"quant_method": "mxfp4"} if name == "gpt_oss" else FP8


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_few_bits_are_read_and_written_as_bfloat16(tmp_path, name):
    """In rows, by eight devices."""
    kept, whole, config = quantized(name)
    folder = write_folder(tmp_path / "in", name, quantization_config=config, **SIZES[name])
    write_file(folder / "model.safetensors", kept)
    source, notes = open_model(str(folder), ["hardware=cpu"]), []
    export(source, source.load(notes.append), tmp_path / "out")
    assert_same_tensors(tmp_path / "out", whole)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert any(LINES[name] in line for line in notes) and jax.device_count() == 8


def test_scales_of_another_form_are_refused(tmp_path):
    kept, _, config = quantized("gpt_oss")
    folder = write_folder(tmp_path, "gpt_oss", quantization_config=config, **SIZES["gpt_oss"])
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for scales in (kept[name][:, :-1], kept[name].view(np.int8), None):
        changed = {n: x for n, x in (kept | {name: scales}).items() if x is not None}
        write_file(folder / "model.safetensors", changed)
        with pytest.raises(ConfigError, match="down_proj_blocks of .* has scales of another form"):
            on_mesh(folder, "one")


@pytest.mark.slow
def test_mxfp4_is_what_transformers_makes_of_it():
    kept, whole, _ = quantized("gpt_oss")
    torch, mxfp4 = Later("torch"), Later("transformers.integrations.mxfp4")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    parts = (torch.tensor(kept[f"{name}_{part}"]) for part in ("blocks", "scales"))
    expected = mxfp4.convert_moe_packed_tensors(*parts).float().numpy()
    np.testing.assert_array_equal(expected, whole[name].astype(np.float32))
