"""Log-probabilities of rows by length, on meshes."""

import jax
import numpy as np
import pytest
from conftest import make_config, make_mesh

from maxramp.data import tokenizers
from maxramp.errors import ConfigError
from maxramp.evaluation.scorer import Scored, Scorer
from maxramp.evaluation.server import DryRun, compile_ahead
from maxramp.generation.generator import GenerationConfig
from maxramp.generation.sampling import Sampling
from maxramp.handover.opening import PromptTokenizer
from maxramp.model.decoder import Decoder
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.state import abstract_state, initial_state

RANDOM = np.random.default_rng(0)
ROWS = [
    Scored(RANDOM.integers(0, 257, length + 1).tolist(), max(1, length // 3))
    for length in (16, 3, 9, 1, 16, 12, 5, 16, 2, 16, 7)
]


def scorer_of(*keys: str, compiler: BackgroundCompiler | None = None):
    config = make_config(*keys, "loss_block_tokens=7")
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        model = initial_state(config.recipe).model
    tokenizer = PromptTokenizer(tokenizers.load("bytes", "", True, True))
    abstract = abstract_state(config.recipe, mesh).model
    compiler = compiler or BackgroundCompiler(0, lambda line: None, lambda: None)
    return Scorer(config.recipe, abstract, tokenizer, compiler), model, config


PIPELINE = ("ici_fsdp_parallelism=4", "ici_pipeline_parallelism=2")
ALL_AXES = ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "ici_data_parallelism=2")


@pytest.mark.parametrize(
    "keys",
    [
        (),
        pytest.param(ALL_AXES, marks=pytest.mark.long),
        pytest.param(PIPELINE, marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_the_logits(keys):
    """Row by row, whatever is beside it; the flags are those of the likeliest tokens."""
    scorer, model, config = scorer_of(*keys)
    rows = list(ROWS)
    tokens = np.zeros((16, 16), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row.tokens) - 1] = row.tokens[:-1]
    with jax.set_mesh(make_mesh(config)):
        run = jax.jit(lambda model, x: Decoder.__call__(model, x, config.model))
        logits = np.asarray(run(model, tokens), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    likely = Scored([*rows[0].tokens[:-1], int(logits[0, 15].argmax())], 1)
    scored = scorer.score(model, [*rows, likely])
    for b, row in enumerate(rows):
        last = len(row.tokens) - 1
        at = range(last - row.count, last)
        expected = sum(log_p[b, i, row.tokens[i + 1]] for i in at)
        assert scored[b][0] == pytest.approx(expected, abs=1e-4)
        assert scored[b][1] == all(log_p[b, i].argmax() == row.tokens[i + 1] for i in at)
    assert scored[-1][1] and scored[-1][0] == pytest.approx(log_p[0, 15].max(), abs=1e-4)


@pytest.mark.slow
def test_scorers_of_other_positions_share_a_compiler():
    """As those of a run do whose phases change what a token sees: each has programs of its own."""
    compiler = BackgroundCompiler(0, lambda line: None, lambda: None)
    family = "decoder_block=mistral"
    first, model, _ = scorer_of(family, compiler=compiler)
    keys = (family, "rope_max_timescale=10.0", "sliding_window_size=3")
    second, *_ = scorer_of(*keys, compiler=compiler)
    alone, *_ = scorer_of(*keys)
    firsts, seconds, expected = (scorer.score(model, ROWS) for scorer in (first, second, alone))
    assert seconds == expected and firsts != expected


def test_an_answer_without_room_for_a_prompt_is_refused():
    scorer, model, _ = scorer_of()
    with pytest.raises(ConfigError, match="max_gen_toks=16 .* max_target_length=16"):
        scorer.write(model, [[1]], GenerationConfig(16, Sampling(0.0)), [])
    dry_run = DryRun(16, lambda: None)  # of a run, which learns of it before the first step
    assert dry_run.write([[1]], GenerationConfig(16, Sampling(0.0)), []) == [""]
    with pytest.raises(ConfigError, match="max_gen_toks=16 .* max_target_length=16"):
        compile_ahead(scorer, dry_run.requests)
