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
from collections.abc import Callable, Mapping, Sequence

import jax

from maxramp.commandline import parse_config, print_note, shell_quote
from maxramp.config.keys import Config
from maxramp.config.load import load
from maxramp.data.corpus import Corpus, Part, hash_of
from maxramp.errors import ConfigError
from maxramp.files.place import place
from maxramp.handover.opening import ModelSource, PromptTokenizer, open_model
from maxramp.handover.weights import check_first_weights, find_first_weights, key_of_first_weights
from maxramp.job import start
from maxramp.job.loop import train
from maxramp.keys import base
from maxramp.model.keys import MODEL_KEYS
from maxramp.parallel.compiler import compiler_options
from maxramp.processes import agreement
from maxramp.processes.ending import Preemption, run
from maxramp.rl.programs import PolicyPrograms
from maxramp.rl.prompts import Prompts, check_enough, open_prompts
from maxramp.rl.rewards import Rewards, sources
from maxramp.rl.trainer import AnswerScorer, PolicyTrainer, generation_config
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.device_memory import device_memory
from maxramp.training.learning_rate import LearningRate

# Keys of the documents that weights were trained on, and of their tokenizer.
_DOCUMENT_KEYS = (
    *("dataset_type", "text_files", "grain_train_files", "grain_file_type", "hf_path", "hf_name"),
    *("tokenizer_type", "tokenizer_path", "tokenize_train_data", "add_bos", "add_eos"),
)
_SUMS = "configs/pre_train/sums.yml"  # trains a model for the prompts that come from no file


def main(arguments: Sequence[str] | None = None, preemption: Preemption | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments

    def load_config(note: Callable[[str], None]) -> Config:
        config = load(parse_config(__doc__, arguments), "grpo", note)
        check_first_weights(config)
        return _inherit_keys(config, note)

    return start.run(load_config, _run, preemption)


def _inherit_keys(config: Config, note: Callable[[str], None]) -> Config:
    """Returns a loaded configuration with the sizes and the tokenizer of its first weights, which
    replace those given; raises a ConfigError if the path has no weights.

    Reads the pinned weights: their run may have trained on, with other keys.
    """
    key = key_of_first_weights(config)
    path = config.values[key]
    try:
        weights = find_first_weights(config)
        config = config.replace(**{name: path for name, (path, _) in weights.items()})
        inherited = open_model(config.values[key], []).config.values
    except ConfigError as error:
        run = place(path)
        if config.rollout.prompt_file or run.exists():
            raise
        where = shell_quote([f"base_output_directory={run.parent}", f"run_name={run.name}"])
        raise ConfigError(
            f"{key}={path}: no checkpoint there; this trains one that can add at times: "
            f"python -m maxramp.train {_SUMS} {where}"
        ) from error
    other = [
        f"{name}={inherited[name]}"
        for name, default in base.base().items()
        if name in MODEL_KEYS and config.values[name] not in (inherited[name], default)
    ]
    if other:
        note(f"{path} has {', '.join(other)}; these sizes are taken")
    keys = {name: inherited[name] for name in (*MODEL_KEYS, *_DOCUMENT_KEYS)}
    if not config.rollout.eval_prompt_file:
        keys["eval_interval"] = -1
    config = config.replace(**keys)
    config.check()
    return config


def _run(context: start.JobContext) -> int:
    config = context.config
    keys = [f"split_special_tokens={config.rollout.split_special_tokens}"]
    source = agreement.raise_everywhere(lambda: ModelSource(context.first.weights, keys))
    tokenizer = agreement.raise_everywhere(source.tokenizer)
    if not tokenizer.ends and jax.process_index() == 0:
        print_note(
            f"{source.path} was trained on documents without an end token (add_eos=False): "
            f"no answer ends before max_completion_length={config.rollout.max_completion_length} "
            "tokens; begin with weights that were trained with add_eos=True"
        )
    prompts = agreement.raise_everywhere(
        lambda: open_prompts(config.rollout, tokenizer, config.model)
    )
    for name, one in prompts.items():
        hashes = {*agreement.all_gather_json(one.hash)}
        if len(hashes) > 1:
            raise ConfigError(
                f"{name}={config.values[name]}: {len(hashes)} different files on the processes of "
                "the job; give all of them the same one"
            )
    corpus = _corpus(prompts)
    data = corpus.identity({"eval": _evaluation(config, corpus)})
    job = context.open_run(data, config.objective.fields)
    if not job.has_work:
        return job.end()
    check_enough(prompts["prompt_file"], config.rollout, job.schedule.ramp.total_samples)
    return train(job, _trainer(job, tokenizer, corpus, prompts))


def _corpus(prompts: Mapping[str, Prompts]) -> Corpus:
    """Returns a corpus without rows, which identifies the prompts."""
    train, held_out = prompts["prompt_file"], prompts.get("eval_prompt_file")
    parts = (Part("", 1.0, (), held_out.hash, rows_id=held_out.hash),) if held_out else ()
    return Corpus((Part("prompts", 1.0, (), train.hash),), parts, train.description)


def _evaluation(config: Config, corpus: Corpus) -> str:
    """Returns a hash of all but the weights that an evaluation's numbers depend on."""
    values = [config.values[name] for name in config.objective.in_evaluations]
    return hash_of([corpus.held_out_hash, values, sources(config.rollout.rewards)])


def _trainer(
    job: start.Job, tokenizer: PromptTokenizer, corpus: Corpus, prompts: Mapping[str, Prompts]
) -> PolicyTrainer:
    config, output, schedule = job.config, job.output, job.schedule
    abstract, read = job.abstract_state()
    rewards = agreement.run_on_first(lambda: _rewards(job), job.watchdog.beat)
    options = compiler_options(job.mesh.devices.flat[0].platform)
    compiler = BackgroundCompiler(
        device_memory(config.planning.device_memory_gib), output.say, job.preemption.ask
    )
    job.closing.callback(compiler.close)
    rate = LearningRate.from_keys(config.learning_rate, schedule.ramp)
    how = generation_config(config, tokenizer)
    programs = PolicyPrograms(config, rate, abstract, how, compiler, options)
    for stage in schedule.stages:
        programs.announce(stage)
    compiler.lower()
    output.say_start(corpus, abstract, config.recipe, schedule, job.changes)
    reference = job.load_reference(abstract.model) if config.policy.grpo_beta else None
    scorer = AnswerScorer(config, programs.generator, tokenizer, rewards)
    state = job.first_state(abstract, read)
    return PolicyTrainer(job, programs, scorer, prompts, state, reference)


def _rewards(job: start.Job) -> Rewards:
    keys = job.config.rollout
    rewards = Rewards(keys.rewards, keys.reward_workers, keys.reward_timeout_seconds)
    return job.closing.enter_context(contextlib.closing(rewards))


if __name__ == "__main__":
    run(functools.partial(main, preemption=_PREEMPTION))
