"""Improves a model by rewards for its answers: GRPO, group relative policy optimization.

python -m maxramp.grpo CONFIG.yml [key=value ...]

It begins with the weights of load_parameters_path, or continues the run of that run_name.
configs/post_train/rl.yml is an example, explained in docs/reinforcement.md.
"""

import sys

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console
    from maxramp.processes.ending import Preemption

    console.outlive_readers()
    _PREEMPTION = Preemption()

import contextlib
import functools
from collections.abc import Callable, Sequence

import jax

from maxramp.commandline import parse_config, print_note
from maxramp.config.keys import Config
from maxramp.config.load import load
from maxramp.data.corpus import Corpus, Part, hash_of
from maxramp.errors import ConfigError
from maxramp.handover.opening import PromptTokenizer, open_model
from maxramp.job import start
from maxramp.job.loop import train
from maxramp.processes import agreement
from maxramp.processes.ending import Preemption, run
from maxramp.rl import first_weights
from maxramp.rl.programs import PolicyPrograms
from maxramp.rl.prompts import Prompts, check_enough, open_prompts
from maxramp.rl.rewards import Rewards, sources
from maxramp.rl.trainer import PolicyTrainer, Scorer, policy_fields, writing
from maxramp.training.ahead import Ahead
from maxramp.training.device_memory import device_memory
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import compiler_options


def main(arguments: Sequence[str] | None = None, preemption: Preemption | None = None) -> int:
    """Runs a command line; returns the exit status of `errors`, 0 when training is finished."""
    given = sys.argv[1:] if arguments is None else arguments

    def load_config(note: Callable[[str], None]) -> Config:
        config = load(parse_config(__doc__, given), "grpo", note)
        _refuse(config)
        return first_weights.with_weights(config, note)

    return start.run(load_config, _run, preemption)


def _refuse(config: Config) -> None:
    """Refuses what reinforcement learning cannot do.

    Raises:
      ConfigError: a key asks for it.
    """
    if config.model.max_target_length <= config.rollout.max_completion_length:
        raise ConfigError(
            f"max_completion_length={config.rollout.max_completion_length} leaves no room for a "
            f"prompt in max_target_length={config.model.max_target_length}; raise that, or lower it"
        )
    if config.model.lora_rank:
        raise ConfigError(
            f"lora_rank={config.model.lora_rank}: reinforcement learning trains all weights; leave "
            "it out"
        )
    hang, reward = config.run.hang_timeout_seconds, config.rollout.reward_timeout_seconds
    if 0 < hang <= reward:
        raise ConfigError(
            f"reward_timeout_seconds={reward:g} must be below hang_timeout_seconds={hang:g}, or "
            "rewards that may take so long would end the run as one that hangs; lower it, or raise "
            "hang_timeout_seconds"
        )
    asked = ["rampup_policy=noise"] * (config.batch.rampup_policy == "noise")
    if asked or config.optimizer.log_gradient_noise_scale:
        raise ConfigError(
            f"{(*asked, 'log_gradient_noise_scale=True')[0]}: steps of reinforcement learning do "
            "not measure the noise scale; leave it out, and give a ramp or rampup_policy=seesaw"
        )


def _run(begun: start.Start) -> int:
    """Opens the prompts and the run's folder, and trains from where it stands."""
    config = begun.config
    weights = first_weights.path_of(config)
    given = [f"split_special_tokens={config.rollout.split_special_tokens}"]
    tokenizer = agreement.raise_everywhere(lambda: open_model(str(weights), given).tokenizer())
    if not tokenizer.ends and jax.process_index() == 0:
        print_note(
            f"{weights} was trained on documents without a mark at their end (add_eos=False): no "
            f"answer ends before max_completion_length={config.rollout.max_completion_length} "
            "tokens; begin with weights that were trained with add_eos=True"
        )
    opened = agreement.raise_everywhere(
        lambda: open_prompts(config.rollout, tokenizer, config.model)
    )
    prompts, held_out = opened["prompt_file"], opened.get("eval_prompt_file")
    for name, of_key in opened.items():
        if len(hashes := {*agreement.all_gather_json(of_key.hash)}) > 1:
            raise ConfigError(
                f"{name}={config.values[name]}: {len(hashes)} different files on the processes of "
                "the job; give all of them the same one"
            )
    corpus = _corpus(prompts, held_out)
    data = corpus.identity({"eval": _evaluation(config, corpus)})
    job = begun.open_run(data, policy_fields)
    if not job.has_work:
        return job.end()
    check_enough(prompts, config.rollout, job.span.ramp.total_samples)
    return train(job, _trainer(job, tokenizer, corpus, prompts, held_out))


def _corpus(prompts: Prompts, held_out: Prompts | None) -> Corpus:
    """What identifies the prompts, which are not rows."""
    parts = (Part("", 1.0, (), held_out.hash),) if held_out else ()
    return Corpus((Part("prompts", 1.0, (), prompts.hash),), parts, prompts.description)


def _evaluation(config: Config, corpus: Corpus) -> str:
    """A hash of what the numbers of evaluations depend on but the weights."""
    names = "rewards", "reward_weights", "num_generations", "max_completion_length", "rollout_seed"
    values = [config.values[name] for name in (*names, "decode_sampling_temperature")]
    return hash_of([corpus.hash, values, sources(config.rollout.rewards)])


def _trainer(
    job: start.Job,
    tokenizer: PromptTokenizer,
    corpus: Corpus,
    prompts: Prompts,
    held_out: Prompts | None,
) -> PolicyTrainer:
    """What takes the steps, with its programs announced to the compiler."""
    config, output, span = job.config, job.output, job.span
    abstract = job.abstract_state()
    rewards = agreement.raise_everywhere(lambda: _rewards(job))
    options = compiler_options(job.mesh.devices.flat[0].platform)
    memory = device_memory(config.planning.device_memory_gib)
    ahead = Ahead(memory, output.say, job.preemption.ask)
    job.closing.callback(ahead.close)
    programs = PolicyPrograms(
        config.recipe,
        config.policy,
        LearningRate.from_keys(config.learning_rate, span.ramp),
        abstract,
        writing(config.rollout, config.policy, config.model, tokenizer),
        ahead,
        options,
    )
    for stage in span.stages:
        programs.announce(stage)
    ahead.lower()
    output.say_start(corpus, abstract, config.recipe, span, job.changes)
    beta = config.policy.grpo_beta
    reference = first_weights.load_reference(job, abstract.model) if beta else None
    return PolicyTrainer(
        programs,
        config.rollout,
        prompts,
        held_out,
        Scorer(config.rollout, config.policy, programs.generator, tokenizer, rewards),
        job.checkpoints.first_state(span.position, abstract, config.recipe),
        reference,
        job.watchdog.beat,
        job.is_asked_to_stop,
    )


def _rewards(job: start.Job) -> Rewards | None:
    """The reward functions, on process 0."""
    keys = job.config.rollout
    if jax.process_index():
        return None
    rewards = Rewards(keys.rewards, keys.reward_workers, keys.reward_timeout_seconds)
    return job.closing.enter_context(contextlib.closing(rewards))


if __name__ == "__main__":
    run(functools.partial(main, preemption=_PREEMPTION))
