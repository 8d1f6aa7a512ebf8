"""Steps of GRPO: one update however the prompts are cut, and the same bits when it is repeated."""

import contextlib
import functools
import threading
import time
import types

import jax
import numpy as np
import pytest
from conftest import make_config, make_mesh

from maxramp.data import tokenizers
from maxramp.handover.opening import PromptTokenizer
from maxramp.objectives.rewards import REWARDS
from maxramp.parallel.mesh import Jitted
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.rl.programs import PolicyPrograms
from maxramp.rl.prompts import FilePrompts, Sums
from maxramp.rl.rewards import Rewards
from maxramp.rl.trainer import AnswerScorer, PolicyTrainer, generation_config
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.learning_rate import LearningRate
from maxramp.training.state import abstract_state, init_state

KEYS = ("program=grpo", "num_generations=4", "max_completion_length=6", "opt_type=sgd")
KEYS += ("warmup_steps_fraction=0", "steps=4", "global_batch_size=4", "max_target_length=16")
KEYS += ("base_num_decoder_layers=1", "learning_rate=1")


@pytest.fixture(scope="module")
def rewards():
    # As good as chance: no answer of random weights is right, but they differ in length.
    with contextlib.closing(Rewards(["maxramp.rl.tasks:brevity"], 1, 60.0)) as functions:
        yield functions


def record_of(dispatched, begin):
    """As the log makes it of a step or an evaluation."""
    read = jax.device_get(dispatched.numbers)
    shown = {name: value.tolist() for name, value in read.items() if not value.ndim}
    return shown | dispatched.to_record(read, begin, time.perf_counter())


class Run:
    """A tiny model and what takes its steps; a step of it can be repeated from the same weights."""

    def __init__(self, rewards, micro, *keys, devices=1, held_out=None):
        config = make_config(*KEYS, f"micro_batch_size={micro}", *keys, devices=devices)
        self.ramp = RampupBatchManager(config.batch, devices, fields=REWARDS.fields)
        self.mesh = make_mesh(config)
        bytes_ = PromptTokenizer(tokenizers.load("bytes", "", True, True))
        make = functools.partial(init_state, config.recipe)
        self._make = Jitted(self.mesh, make)
        compiler = BackgroundCompiler(0, lambda line: None, lambda: None)
        state = abstract_state(config.recipe, self.mesh)
        rate = LearningRate.from_keys(config.learning_rate, self.ramp)
        how = generation_config(config, bytes_)
        programs = PolicyPrograms(config, rate, state, how, compiler, {})
        for stage in self.ramp.stages:
            programs.announce(stage)
        self.scorer = AnswerScorer(config, programs.generator, bytes_, rewards)
        job = types.SimpleNamespace(
            watchdog=types.SimpleNamespace(beat=lambda: self.beats.append(1)),
            is_asked_to_stop=lambda: next(self._stops, False),
        )
        self.trainer = PolicyTrainer(
            job,
            programs,
            self.scorer,
            {"prompt_file": Sums(100, 0), "eval_prompt_file": held_out},
            self._make(),
            self._make().model if config.policy.grpo_beta else None,
        )

    def __call__(self, steps=1, stops=()):
        """The metrics of each step, and the change of the weights. `stops`: the answers to whether
        to stop; a step that did is repeated."""
        self.beats, self._stops = [], iter(stops)
        self.trainer.state, records = self._make(), []
        before = [np.array(x) for x in jax.tree.leaves(self.trainer.state.model)]
        for step in range(steps):
            stage = self.ramp.stage_at_step(step)
            dispatched = None
            while dispatched is None:
                dispatched = self.trainer.step(step, stage, self.ramp.samples_before(step))
            # A log whose disk was slow saw the step before end as late as this.
            records.append(record_of(dispatched, time.perf_counter()))
            assert records[-1]["rollout_seconds"] > 0 < records[-1]["training_seconds"]
        state = self.trainer.state
        assert np.array(state.consumed_samples).tolist() == [self.ramp.samples_before(steps), 0]
        after = [np.array(x) for x in jax.tree.leaves(state.model)]
        return records, [a - b for a, b in zip(after, before, strict=True)]


MEASURED = ("seconds", "per_second")


def numbers(record):
    return {k: v for k, v in record.items() if not k.endswith(MEASURED)}


def test_the_sampler_sees_the_window_that_training_does(rewards):
    (record,), _ = Run(rewards, 4, "decoder_block=mistral", "sliding_window_size=3")()
    assert record["sampler_difference"] < 1e-5


MIXTURE = ("decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2")
MIXTURE += ("load_balance_loss_weight=0.1", "load_balance_loss_scope=step", "learning_rate=0.1")
HYBRID = "decoder_block=qwen3_5 use_qk_norm=True base_num_decoder_layers=4 gdn_num_key_heads=2 "
HYBRID += "gdn_num_value_heads=4 gdn_key_head_dim=8 gdn_value_head_dim=8 "
HYBRID += "normalization_layer_epsilon=0.1"


@pytest.mark.slow
@pytest.mark.parametrize(
    "micro, model, keys, devices",
    [
        (1, (), ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"), 4),
        (1, MIXTURE, ("ici_expert_parallelism=2",), 2),
        (1, tuple(HYBRID.split()), ("ici_context_parallelism=2",), 2),
        (2, (), ("ici_context_parallelism=2", "context_parallel_strategy=all_gather"), 2),
        pytest.param(2, (), (), 1, marks=pytest.mark.long),
    ],
)
def test_the_update_does_not_depend_on_parts_or_mesh(rewards, micro, model, keys, devices):
    model += ("grpo_beta=0.1",)
    steps = 2 if "load_balance_loss_scope=step" in model else 1
    (*_, whole), change = Run(rewards, 4, *model)(steps)
    (*_, cut), other = Run(rewards, micro, *model, *keys, devices=devices)(steps)
    assert whole["sampler_difference"] < 1e-5 and whole["reward_std"] > 0
    results = numbers(cut)
    assert results.pop("batch_fingerprint") == whole["batch_fingerprint"]
    for name, value in results.items():
        assert value == pytest.approx(whole[name], rel=1e-5, abs=1e-5), name
    for one, two in zip(change, other, strict=True):
        assert np.abs(one).max() > 0
        rounding = 1.2e-7  # of a weight of 1
        assert np.abs(one - two).max() <= 1e-5 * np.abs(one).max() + rounding


def test_a_step_repeats_to_the_last_bit(rewards):
    """As restarts in a rollout rely on; programs compile in the background, the watchdog hears."""
    compiled = []

    def listen(event, seconds, fun_name="", **more):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append((threading.current_thread().name, fun_name))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run = Run(
            rewards, 2, "rampup_batch_size=[1,3,1]", "global_batch_size=4", "num_iterations=2"
        )
        first, change = run(steps=2)
        parts = sum(run.ramp.stage_at_step(step).gradient_accumulation_steps for step in (0, 1))
        assert parts == 3 and len(run.beats) >= 3 * parts  # answers, rewards, gradients
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    names = [name for thread, name in compiled if thread == "compile_0"]
    assert [names.count(f"jit({name})") for name in ("_write", "add", "update")] == [2, 2, 2]
    assert {name for thread, name in compiled if thread != "compile_0"} == {"jit(init_state)"}
    again, other = run(steps=2)
    assert list(map(numbers, first)) == list(map(numbers, again))
    assert all(np.array_equal(a, b) for a, b in zip(change, other, strict=True))
    given_up, other = run(steps=2, stops=[True, False, False, True])  # as SIGTERM does
    assert list(map(numbers, first)) == list(map(numbers, given_up))
    assert all(np.array_equal(a, b) for a, b in zip(change, other, strict=True))
    assert first[0]["batch_fingerprint"] != first[1]["batch_fingerprint"]
    assert first[0]["compile_seconds"] > 0 == again[1]["compile_seconds"]


def test_each_pass_has_every_prompt_once(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "p{i}", "answer": {i}}}\n' for i in range(7)))
    prompts = FilePrompts(str(path), 3)
    passes = [[prompts[7 * n + i].truth for i in range(7)] for n in range(3)]
    assert all(sorted(order) == list(range(7)) for order in passes)
    assert len(set(map(tuple, passes))) == 3
    assert [prompts[i].text for i in range(3)] == [f"p{i}" for i in passes[0][:3]]
    in_order = FilePrompts(str(path), None)
    assert [in_order[i].truth for i in range(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_an_evaluation_is_on_all_held_out_prompts_and_changes_nothing(rewards, tmp_path):
    """Also where they fill no part: what fills it up does not count."""
    path = tmp_path / "held_out.jsonl"
    asked = [f"{i}+{i}=" for i in range(5)]
    path.write_text("".join(f'{{"prompt": "{x}", "answer": "{x}"}}\n' for x in asked))
    run = Run(rewards, 4, "log_answers=2", held_out=FilePrompts(str(path), None))
    (record,), _ = run()
    answers = record["answers"]
    assert [a["reward"] for a in answers] == sorted((a["reward"] for a in answers), reverse=True)
    assert len(answers) == 4 and answers[0]["reward"] > record["reward"] > answers[-1]["reward"]
    assert all(a["reward"] == -abs(len(a["answer"]) - len(truth(a["prompt"]))) for a in answers)
    asking, calls = run.scorer.ask, []
    run.scorer.ask = lambda *arguments: calls.append(asking(*arguments)) or calls[-1]
    results = [record_of(run.trainer.evaluate(run.ramp.stages[0]), 0.0) for _ in range(2)]
    assert results[0] == results[1] and [len(part.answers) for part in calls] == [16] * 4
    answers = [answer for part in calls[:2] for answer in part.answers][:20]
    texts = [text for part in calls[:2] for text in part.texts][:20]
    assert results[0]["eval_tokens"] == sum(len(answer.tokens) for answer in answers)
    assert results[0]["eval_reward"] == pytest.approx(np.mean([-abs(len(x) - 4) for x in texts]))


def truth(prompt):
    a, b = prompt.rstrip("=").split("+")
    return str(int(a) + int(b))
