"""Generation: the model's own words in any batch, on any mesh. B rows, T tokens, V vocabulary."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_config, make_mesh

from maxramp.errors import ConfigError, TrainingError
from maxramp.generation.generator import GenerationConfig, Generator, rounded_up
from maxramp.generation.sampling import Sampling, sample
from maxramp.model.decoder import Decoder
from maxramp.training.state import abstract_state

LENGTH, VOCAB = 48, 264
# Grouped queries; more slots than the shapes that the prompts are read with.
KEYS = ("enable_rampup_batch_size=False", "per_device_batch_size=1", "base_num_kv_heads=4")
KEYS += (f"max_target_length={LENGTH}",)
MESHES = {
    "one device": (1, ()),
    "two layers on all axes": (8, ("ici_data_parallelism=2", "ici_tensor_parallelism=2")),
    "experts": (2, ("ici_expert_parallelism=2",)),
}
MESHES["all axes"] = (8, (*MESHES["two layers on all axes"][1], "base_num_decoder_layers=1"))
MIXTURE = ("decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2")
GEMMA2 = ("decoder_block=gemma2", "sliding_window_size=4", "final_logits_soft_cap=0.5")
GEMMA3 = ("decoder_block=gemma3", "use_qk_norm=True", "sliding_window_size=4")
GEMMA3 += ("base_num_decoder_layers=7", "local_rope_max_timescale=10")
QWEN3_5 = ("decoder_block=qwen3_5", "use_qk_norm=True", "gdn_num_key_heads=2")
QWEN3_5 += ("gdn_num_value_heads=4", "gdn_key_head_dim=8", "gdn_value_head_dim=8")
QWEN3_5 += ("base_num_decoder_layers=4",)
GPT_OSS = ("decoder_block=gpt_oss", "attention_bias=True", "routed_bias=True", *MIXTURE[1:])
GPT_OSS += ("sliding_window_size=4",)
LATENT = ("decoder_block=deepseek_v3", "base_num_kv_heads=8", "kv_lora_rank=16")
LATENT += ("qk_nope_head_dim=6", "qk_rope_head_dim=4", "v_head_dim=5", "num_experts=4")
LATENT += ("routed_score_func=sigmoid", "routed_bias=True", "base_num_decoder_layers=2")
LATENT += ("rope_type=yarn", "first_num_dense_layers=1", "q_lora_rank=24", "head_dim=32")
MOST = 10  # tokens of an answer
GREEDY = Sampling(temperature=0)
PROMPTS = [np.arange(1, 1 + n, dtype=np.int32) * 7 % VOCAB for n in (1, 5, 9, 14, 3)]


class Writer:
    """A tiny model on a mesh, and its generator."""

    def __init__(self, mesh, *keys):
        devices, axes = MESHES[mesh]
        config = make_config(*KEYS, *axes, *keys, devices=devices)
        self.mesh, self.execution = make_mesh(config), config.model
        with jax.set_mesh(self.mesh):
            make = functools.partial(Decoder, config.model, jax.random.key(0))
            self.model = jax.jit(make)()
        self.generator = Generator(config.model, self.model, GenerationConfig(MOST, GREEDY))
        self.weights = self.generator.prepare(self.model)

    def __call__(self, prompts, *generation, samples=None, **more):
        self.generator.config = GenerationConfig(*generation, **more)
        return self.generator.answer(self.weights, prompts, samples)

    def logits(self, rows):
        """Of the forward pass that training takes, over whole rows."""
        tokens_BT = np.zeros((8, LENGTH), np.int32)
        for row_T, row in zip(tokens_BT, rows, strict=False):
            row_T[: len(row)] = row
        with jax.set_mesh(self.mesh):
            forward = jax.jit(functools.partial(Decoder.__call__, execution=self.execution))
            return np.asarray(forward(self.model, tokens_BT))[: len(rows)]


writer = functools.cache(Writer)


@pytest.mark.parametrize(
    "mesh, keys",
    [
        ("one device", ()),
        ("all axes", ()),
        ("one device", ("decoder_block=mistral", "sliding_window_size=4")),
        ("one device", ("decoder_block=qwen3", "use_qk_norm=True")),
        ("one device", GEMMA2),
        ("one device", QWEN3_5),
        ("one device", LATENT),
        pytest.param("all axes", QWEN3_5, marks=pytest.mark.slow),
        pytest.param("two layers on all axes", LATENT, marks=pytest.mark.slow),
        pytest.param(
            "one device",
            (*LATENT, "lora_rank=2", "lora_targets=[kv_b_proj]"),
            marks=pytest.mark.slow,
        ),
        pytest.param("all axes", GEMMA3, marks=pytest.mark.slow),
        pytest.param("all axes", GPT_OSS, marks=pytest.mark.slow),
        pytest.param("experts", MIXTURE, marks=pytest.mark.slow),
    ],
)
def test_greedy_is_the_argmax_of_the_forward_pass(mesh, keys):
    """Token by token, in float32, with log-probabilities; texts are longer than the window."""
    answers = writer(mesh, *keys)(PROMPTS, MOST, GREEDY)
    rows = [np.concatenate([p, a.tokens]) for p, a in zip(PROMPTS, answers, strict=True)]
    logits_BTV = writer(mesh, *keys).logits(rows)
    for prompt, answer, logits_TV in zip(PROMPTS, answers, logits_BTV, strict=True):
        own_TV = logits_TV[len(prompt) - 1 :][: len(answer.tokens)]
        assert answer.tokens.tolist() == own_TV.argmax(-1).tolist()
        assert len(answer.tokens) == MOST and answer.done and answer.truncated
        log_probs = own_TV.max(-1) - np.asarray(jax.nn.logsumexp(own_TV, axis=-1))
        np.testing.assert_allclose(answer.log_probs, log_probs, atol=1e-4)
    assert len({tuple(a.tokens) for a in answers}) == len(answers)
    if (mesh, keys) == ("one device", ()):  # whose answers do not depend on the shapes
        padded = writer(mesh)(PROMPTS, MOST, GREEDY, shortest=128)
        assert [a.tokens.tolist() for a in answers] == [a.tokens.tolist() for a in padded]
    if mesh == "experts":
        alone = writer("one device", *keys)(PROMPTS, MOST, GREEDY)
        assert [a.tokens.tolist() for a in answers] == [a.tokens.tolist() for a in alone]


def test_the_state_of_latent_attention_is_a_latent_and_a_key():
    written = writer("one device", *LATENT)
    traced = written.generator.trace_programs(written.model, len(PROMPTS), 16)
    caches = jax.tree.leaves(traced["reading prompts"]().out_info)
    assert [cache.shape[1:] for cache in caches] == [(1, 32, 16 + 4)] * 2


def test_the_state_of_a_window_has_no_more_slots():
    written = writer("one device", *GEMMA2)
    traced = written.generator.trace_programs(written.model, len(PROMPTS), 16)
    caches, _ = traced["reading prompts"]().out_info
    assert [cache.keys_BKSh.shape[2] for cache in caches] == [4, 32]


@pytest.mark.slow
def test_bfloat16_rounds_as_the_forward_pass_does():
    """The log-probabilities of the sampler are those of the model, up to bfloat16's last bits."""
    coarse = writer("one device", "dtype=bfloat16")
    answers = coarse(PROMPTS, MOST, Sampling(), 0)
    rows = [np.concatenate([p, a.tokens]) for p, a in zip(PROMPTS, answers, strict=True)]
    cases = zip(PROMPTS, answers, rows, coarse.logits(rows), strict=True)
    for prompt, answer, row, logits_TV in cases:
        index = np.arange(len(prompt), len(row))
        log_probs = np.asarray(jax.nn.log_softmax(logits_TV))[index - 1, row[index]]
        np.testing.assert_allclose(answer.log_probs, log_probs, atol=0.15)


@pytest.mark.parametrize(
    "mesh, parts",
    [
        ("one device", [[3, 1], [4, 2], [2, 0]]),
        pytest.param("one device", [[4], [3], [2, 0, 1]], marks=pytest.mark.slow),
        pytest.param("two layers on all axes", [[4, 3, 2], [1, 0]], marks=pytest.mark.slow),
    ],
)
def test_sampled_text_is_the_same_for_every_split(mesh, parts):
    """And on every mesh: a draw depends on the seed, the sample and the position alone."""
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95)

    def texts(mesh, parts, seed=3):
        texts = {}
        for part in parts:
            prompts = [PROMPTS[i] for i in part]
            answers = writer(mesh)(prompts, MOST, sampling, seed, samples=part)
            texts |= {i: a.tokens.tolist() for i, a in zip(part, answers, strict=True)}
        return texts

    whole = texts("one device", [[0, 1, 2, 3, 4]])
    assert texts(mesh, parts) == whole
    assert texts("one device", [[0, 1, 2, 3, 4]], seed=4) != whole
    again = writer("one device")([PROMPTS[1]] * 5, MOST, sampling, 3)
    assert again[0].tokens.tolist() != again[1].tokens.tolist()


@pytest.mark.parametrize(
    "mesh, proposed, keys, draws",
    [
        ("one device", 2, ("base_num_decoder_layers=1",), [(0, ())]),
        *(
            pytest.param("one device", 2, keys, [(0, ()), (1, (2,))], marks=pytest.mark.slow)
            for keys in (QWEN3_5, (*QWEN3_5, "base_num_decoder_layers=1"), LATENT, GEMMA2)
        ),
        pytest.param("all axes", 1, GPT_OSS, [(0.7, ())], marks=pytest.mark.slow),
    ],
)
def test_a_draft_that_proposes_tokens_changes_none(mesh, proposed, keys, draws):
    """In float32: of three tokens alone, some of which it proposes right."""
    one = writer(mesh, *keys, "mtp_num_layers=1")
    for temperature, stop_ids in draws:
        sampling = Sampling(temperature, vocab_size=3)
        plain = one(PROMPTS, 20, sampling, 3, stop_ids)
        config = dataclasses.replace(one.generator.config, num_speculative_tokens=proposed)
        generator = Generator(one.execution, one.model, config)
        answers = generator.answer(generator.prepare(one.model), PROMPTS)
        for answer, alone in zip(answers, plain, strict=True):
            assert answer.tokens.tolist() == alone.tokens.tolist()
            np.testing.assert_allclose(answer.log_probs, alone.log_probs, atol=1e-5)
            assert (answer.done, answer.truncated) == (alone.done, alone.truncated)
            assert alone.passes == len(alone.tokens) <= (1 + proposed) * answer.passes
        passes, tokens = sum(a.passes for a in answers), sum(len(a.tokens) for a in answers)
        assert passes < tokens < (1 + proposed) * passes


def test_a_stream_yields_the_answers_so_far():
    whole = writer("one device")(PROMPTS, MOST, GREEDY)
    one = writer("one device")
    pieces = list(one.generator.stream(one.weights, PROMPTS, every=4))
    assert [len(answers[0].tokens) for answers in pieces] == [4, 8, 10]
    assert [answers[1].done for answers in pieces] == [False, False, True]
    for answers in pieces:
        for part, answer in zip(answers, whole, strict=True):
            n = len(part.tokens)
            assert part.tokens.tolist() == answer.tokens[:n].tolist()
            np.testing.assert_array_equal(part.log_probs, answer.log_probs[:n])


def test_without_a_limit_every_answer_fills_its_row():
    several = writer("one device")(PROMPTS, None, GREEDY)
    (alone,) = writer("one device")(PROMPTS[4:], None, GREEDY)
    assert [len(a.tokens) for a in several] == [LENGTH - len(p) for p in PROMPTS]
    assert several[4].tokens.tolist() == alone.tokens.tolist()


def test_a_row_ends_at_a_stop_id():
    free = writer("one device")(PROMPTS, MOST, GREEDY)
    stops = int(free[1].tokens[4]), int(free[3].tokens[7])
    answers = writer("one device")(PROMPTS, MOST, GREEDY, stop_ids=stops)
    for answer, alone in zip(answers, free, strict=True):
        stopped = np.flatnonzero(np.isin(alone.tokens, stops))
        end = stopped[0] + 1 if len(stopped) else MOST
        assert answer.tokens.tolist() == alone.tokens[:end].tolist()
        assert answer.done and answer.truncated == (not len(stopped))


def test_prompts_of_about_a_length_share_two_programs():
    sizes = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 7: 8, 9: 12, 13: 16, 25: 32, 33: 48}
    assert {n: rounded_up(n) for n in sizes} == sizes
    one = writer("one device")

    def count_programs():
        programs = one.generator._prefill, one.generator._decode
        return [program.jitted._cache_size() for program in programs]

    one(PROMPTS, MOST, GREEDY)
    before = count_programs()
    for count, length, most in ((5, 3, 20), (6, 9, 14), (5, 16, 8)):
        one([np.arange(length, dtype=np.int32)] * count, most, GREEDY)
    assert before == count_programs()


@pytest.mark.parametrize(
    "prompts, max_new_tokens, error",
    [
        ([np.array([1]), np.array([], int)], 4, "prompt 1 has no tokens"),
        ([np.arange(40)], 9, "prompt 0 of 40 tokens and an answer of up to 9 make 49, but max_"),
        ([np.array([3, VOCAB])], 4, f"its token ids are 3 to {VOCAB}, and vocab_size={VOCAB}"),
        ([np.array([-1])], 4, "prompt 0: its token ids"),
        ([np.arange(21)], 4, "prompt 0 has 21 tokens, more than the 20"),
    ],
)
def test_impossible_prompts_are_refused(prompts, max_new_tokens, error):
    with pytest.raises(ConfigError, match=error):
        writer("one device")(prompts, max_new_tokens, GREEDY, max_prompt_tokens=20)


def test_weights_that_are_not_finite_are_an_error():
    one = writer("one device")
    broken = [jnp.full_like(w, jnp.nan) for w in one.weights]
    with pytest.raises(TrainingError, match="not numbers"):
        one.generator.answer(broken, PROMPTS)


def test_a_pipeline_is_refused():
    config = make_config(*KEYS, "ici_pipeline_parallelism=2", devices=2)
    model = abstract_state(config.recipe, make_mesh(config)).model
    with pytest.raises(ConfigError, match="ici_pipeline"):
        Generator(config.model, model, GenerationConfig(MOST, GREEDY))


LOGITS = np.log([0.05, 0.3, 0.02, 0.25, 0.2, 0.08, 0.1]).astype(np.float32)


@pytest.mark.parametrize(
    "sampling, left",
    [
        (Sampling(), [0, 1, 2, 3, 4, 5, 6]),
        (Sampling(temperature=2.0), [0, 1, 2, 3, 4, 5, 6]),
        (Sampling(top_k=3), [1, 3, 4]),
        (Sampling(top_p=0.6), [1, 3, 4]),  # 0.3 + 0.25 is less
        (Sampling(top_k=3, top_p=0.7), [1, 3]),  # 0.55 of 0.75
        (Sampling(vocab_size=3, top_k=2), [0, 1]),
        (Sampling(temperature=0, vocab_size=1), [0]),
    ],
)
def test_draws_follow_the_distribution(sampling, left):
    """Counts of 4,000 draws lie within 5 standard deviations; log-probabilities are of all."""
    n = 4000
    draw = jax.jit(sample, static_argnums=1)
    seeds, positions = np.array([(1, i) for i in range(n)], np.uint32), np.full(n, 5, np.int32)
    tokens, log_probs = draw(np.tile(LOGITS, (n, 1)), sampling, seeds, positions)
    scaled = LOGITS.astype(np.float64) / (sampling.temperature or 1)
    np.testing.assert_allclose(
        log_probs, (scaled - np.log(np.exp(scaled).sum()))[np.asarray(tokens)], atol=1e-5
    )
    weights = np.where(np.isin(np.arange(7), left), np.exp(scaled), 0)
    expected = n * weights / weights.sum()
    counts = np.bincount(tokens, minlength=7)
    assert np.all(np.abs(counts - expected) <= 5 * np.sqrt(expected * (1 - expected / n)) + 1e-9)
