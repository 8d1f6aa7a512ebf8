"""Reinforcement learning: what cutting a batch into parts saves where rewards wait.

python benchmarks/overlap.py [--json FILE]

Steps of the shipped config with a batch of 32 prompts, whole and in 4 parts, with rewards that wait
5 ms for each answer, as those of a service do, and with rewards that are there at once. Steps are
interleaved, and medians are reported: of the seconds of a step, of the sum of its phases, and of
the ratio of the two.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import contextlib
import statistics
import time
import types

import figures
import jax

from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.data import tokenizers
from maxramp.handover.opening import PromptTokenizer
from maxramp.objectives.rewards import REWARDS
from maxramp.parallel import mesh as mesh_lib
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.rl.programs import PolicyPrograms
from maxramp.rl.prompts import Sums
from maxramp.rl.rewards import Rewards
from maxramp.rl.tasks import brevity
from maxramp.rl.trainer import AnswerScorer, PolicyTrainer, generation_config
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.learning_rate import LearningRate
from maxramp.training.state import abstract_state, initial_state

CONFIG = str(figures.ROOT / "configs" / "post_train" / "rl.yml")
WAIT, ROUNDS = 0.005, 9
PHASES = ("rollout_seconds", "reward_seconds", "training_seconds")


def waiting(prompts, answers, truths):
    """Rewards answers after a wait, as a distant server does."""
    time.sleep(WAIT * len(prompts))
    return brevity(prompts, answers, truths)


class Steps:
    """Steps with rewards of a function, in parts of so many prompts."""

    def __init__(self, reward: str, part: int, closing: contextlib.ExitStack):
        keys = ("rampup_batch_size=none", f"micro_batch_size={part}", f"rewards=[{reward}]")
        keys += ("base_num_decoder_layers=2",)  # of configs/pre_train/sums.yml
        config = resolve(load([CONFIG, *keys], note=lambda line: None), 1, 1, 1)
        self._ramp = RampupBatchManager(config.batch, 1, fields=REWARDS.fields)
        self._mesh = mesh_lib.make_mesh(config.mesh)
        tokenizer = PromptTokenizer(tokenizers.load("bytes", "", True, True))
        rewards = Rewards(config.rollout.rewards, 1, 60.0)
        closing.callback(rewards.close)
        compiler = BackgroundCompiler(0, lambda line: None, lambda: None)
        closing.callback(compiler.close)
        with jax.set_mesh(self._mesh):
            state = abstract_state(config.recipe, self._mesh)
            programs = PolicyPrograms(
                config,
                LearningRate.from_keys(config.learning_rate, self._ramp),
                state,
                generation_config(config, tokenizer),
                compiler,
                {},
            )
            programs.announce(self._ramp.stages[0])
            watchdog = types.SimpleNamespace(beat=lambda: None)
            self._trainer = PolicyTrainer(
                types.SimpleNamespace(watchdog=watchdog, is_asked_to_stop=lambda: False),
                programs,
                AnswerScorer(config, programs.generator, tokenizer, rewards),
                {"prompt_file": Sums(10, 0)},
                initial_state(config.recipe),
                initial_state(config.recipe).model,
            )

    def step(self) -> dict:
        begin = time.perf_counter()
        dispatched = self._trainer.step(0, self._ramp.stages[0], 0)
        read = jax.device_get(dispatched.numbers)
        return dispatched.to_record(read, begin, time.perf_counter())


def main() -> None:
    options = figures.parser("overlap", __doc__).parse_args()
    reward = "overlap:waiting"
    rewards = {"rewards that wait": reward, "quick rewards": "maxramp.rl.tasks:brevity"}
    report = {}
    with contextlib.ExitStack() as closing:
        runs = {
            (name, parts): Steps(function, 32 // parts, closing)
            for name, function in rewards.items()
            for parts in (1, 4)
        }
        records = {key: [] for key in runs}
        for run in runs.values():
            run.step()  # compiles
        for _ in range(ROUNDS):
            for key, run in runs.items():
                records[key].append(run.step())
    for (name, parts), steps in records.items():
        ratios = [r["step_seconds"] / sum(r[phase] for phase in PHASES) for r in steps]
        report[f"{name}, {parts} part{'s' if parts > 1 else ''}"] = {
            "step_seconds": statistics.median(r["step_seconds"] for r in steps),
            "phases_seconds": statistics.median(sum(r[p] for p in PHASES) for r in steps),
            "ratio": statistics.median(ratios),
            "largest_ratio": max(ratios),
        }
    for name, medians in report.items():
        print(f"{name:<30}", "  ".join(f"{key} {value:.3f}" for key, value in medians.items()))
    waits = [
        report[f"rewards that wait, {parts}"]["step_seconds"] for parts in ("1 part", "4 parts")
    ]
    print(f"where rewards wait, a step in 4 parts takes {waits[1] / waits[0]:.2f} of a whole one")
    figures.save(options.json, report)


if __name__ == "__main__":
    main()
