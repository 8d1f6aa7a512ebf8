"""GGUF files that cannot be unpacked: a line for each, and nothing is left."""

import numpy as np
import pytest
from conftest import refused

from maxramp.convert import main
from maxramp.huggingface.gguf import unpack

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.slow

D, F, V = 256, 512, 5
# What is wrong: fields that it has in the place of others, or tensors by their names.
CASES = {
    "no types of tokens": ({"types": None}, "is torn"),
    "too few types": ({"types": [3, 3, 1, 1]}, "is torn"),
    "no merges": ({"merges": None}, "is torn"),
    "a merge of three": ({"merges": ["a b c"]}, "is torn"),
    "an unknown merge": ({"merges": ["x y"]}, "is torn"),
    "a mark beyond the tokens": ({"bos": 99}, "is torn"),
    "no heads": ({"heads": 0}, "is torn"),
    "heads that do not divide": ({"heads": 7}, "q_proj.weight is (256, 256)"),
    "a layer too many": ({"layers": 2}, "layers.1.input_layernorm.weight is not there"),
    "numbers beyond float16": ({"value": 1e5}, "embed_tokens.weight cannot be converted: has"),
    "no keys": ({"blk.0.attn_k": None}, "self_attn.k_proj.weight is not there"),
    "rows that are no tokens": ({"token_embd": (7, D)}, "embed_tokens.weight is (7, 256)"),
    "an odd number of rows": ({"blk.0.attn_q": (250, D)}, "self_attn.q_proj.weight is (250, 256)"),
}


def write(path, value=1, **wrong):
    fields = {"layers": 1, "heads": 4, "types": [3, 3, 1, 1, 1], "merges": ["a b"], "bos": 0}
    fields |= {name: value for name, value in wrong.items() if name in fields}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(fields["layers"])
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(fields["heads"])
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab"])
    if fields["types"]:
        writer.add_token_types(fields["types"])
    if fields["merges"]:
        writer.add_token_merges(fields["merges"])
    writer.add_bos_token_id(fields["bos"])
    layer_shapes = {"attn_norm": (D,), "ffn_norm": (D,), "attn_q": (D, D), "attn_k": (D // 2, D)}
    layer_shapes |= {"attn_v": (D // 2, D), "attn_output": (D, D), "ffn_gate": (F, D)}
    layer_shapes |= {"ffn_up": (F, D), "ffn_down": (D, F)}
    shapes = {f"blk.0.{name}": shape for name, shape in layer_shapes.items()}
    shapes |= {"token_embd": (V, D), "output_norm": (D,)}
    shapes |= {name: value for name, value in wrong.items() if name in shapes}
    for name, shape in shapes.items():
        if shape:
            writer.add_tensor(f"{name}.weight", np.full(shape, value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", CASES)
def test_a_torn_file_is_refused_in_one_line(case, tmp_path):
    wrong, says = CASES[case]
    write(tmp_path / "m.gguf", **wrong)
    with refused(f"{tmp_path}/m.gguf: ", says):
        unpack(str(tmp_path / "m.gguf"), tmp_path / "out", "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_nothing_of_others_is_removed(tmp_path):
    """A folder with the name of what is unfinished elsewhere, which holds the file itself."""
    folder = tmp_path / "out.unfinished"
    folder.mkdir()
    write(folder / "m.gguf")
    assert main([str(folder / "m.gguf"), "--to", str(tmp_path / "out")]) == 0
    assert (folder / "m.gguf").exists() and (tmp_path / "out" / "config.json").exists()
