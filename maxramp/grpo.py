"""Reinforcement learning with GRPO: group relative policy optimization.

python -m maxramp.grpo configs/post_train/rl.yml [key=value ...]
"""

import sys

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console
    from maxramp.run.preemption import Preemption

    console.outlive_readers()
    _PREEMPTION = Preemption()

import contextlib
import functools
from collections.abc import Sequence

import jax

from maxramp.checkpoints.resume import Schedule, take_up
from maxramp.checkpoints.store import Checkpoints
from maxramp.commandline import print_note
from maxramp.config.keys import Config
from maxramp.config.load import load, to_yaml
from maxramp.config.resolve import mesh_checker, resolve
from maxramp.data.corpus import Corpus
from maxramp.errors import (
    EXIT_PREEMPTED,
    EXIT_STAGE_END,
    ConfigError,
    NotFiniteError,
    TrainingError,
    report,
)
from maxramp.generation.loading import PromptTokenizer, TrainedRun
from maxramp.parallel import agreement, cpu, lifeline
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.processes import run
from maxramp.planning.cost import PassCost
from maxramp.rampup.numbers import plain_number
from maxramp.rl import first_model
from maxramp.rl.programs import PolicyPrograms
from maxramp.rl.prompts import Prompts, check_enough, check_lengths, open_prompts
from maxramp.rl.rewards import Rewards
from maxramp.rl.rollout import GeneratorRollout
from maxramp.rl.trainer import PolicyTrainer
from maxramp.run.metrics import check_numbers
from maxramp.run.output import Output
from maxramp.run.preemption import Preemption
from maxramp.run.watchdog import Watchdog
from maxramp.training.ahead import Ahead
from maxramp.training.device_memory import device_memory
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import compiler_options
from maxramp.training.state import TrainState, abstract_state


def main(arguments: Sequence[str] | None = None, preemption: Preemption | None = None) -> int:
    """Runs a command line; returns the exit status of `errors`, 0 when training is finished."""
    preemption = preemption or Preemption()
    notes: list[str] = []
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        loaded = load(arguments, program="grpo", note=notes.append)
        _refuse(loaded)
        weights = first_model.weights_of(loaded)
        if first_model.is_ours(loaded) and (
            status := first_model.train(loaded, weights, preemption)
        ):
            return status
        loaded = first_model.with_weights(loaded, weights, notes.append)
        hang, join = loaded.run.hang_timeout_seconds, loaded.backend.join_timeout_seconds
        with Watchdog(hang, join) as watchdog:
            return _run(loaded, notes, preemption, watchdog)
    except (ConfigError, TrainingError, jax.errors.JaxRuntimeError, MemoryError, OSError) as error:
        return report(error)


def _refuse(config: Config) -> None:
    """Refuses what reinforcement learning cannot be done with, before a model is trained for it.

    Raises:
      ConfigError: a key asks for it.
    """
    room = config.model.max_target_length - config.rollout.max_completion_length
    if room < 1:
        raise ConfigError(
            f"max_completion_length={config.rollout.max_completion_length} leaves no room for a "
            f"prompt in max_target_length={config.model.max_target_length}; raise that, or lower it"
        )
    if config.optimizer.log_gradient_noise_scale:
        raise ConfigError(
            "log_gradient_noise_scale=True: steps of reinforcement learning do not measure it, and "
            "rampup_policy=noise rests on it; use False, and a ramp that is given"
        )


def _run(loaded: Config, notes: list[str], preemption: Preemption, watchdog: Watchdog) -> int:
    """Starts the backend, opens the run's folder, and trains from where it stands."""
    mesh_lib.start_backend(loaded.backend)
    for line in notes if jax.process_index() == 0 else ():
        print_note(line)
    watchdog.beat()
    preemption.begin(jax.process_count() > 1, lifeline.end_now)
    config = resolve(loaded, jax.device_count(), mesh_lib.num_slices(), jax.process_count())
    mesh = mesh_lib.make_mesh(config.mesh)
    jax.set_mesh(mesh)
    weights = first_model.weights_of(config)
    tokenizer = agreement.raise_everywhere(lambda: TrainedRun(weights, []).tokenizer())
    if not tokenizer.ends and jax.process_index() == 0:
        print_note(
            f"{weights} was trained on documents without a mark at their end (add_eos=False): no "
            f"answer ends before max_completion_length={config.rollout.max_completion_length} "
            "tokens; begin with weights that were trained with add_eos=True"
        )
    prompts = agreement.raise_everywhere(lambda: _prompts(config, tokenizer))
    if len(hashes := {*agreement.all_gather_json(prompts.hash)}) > 1:
        raise ConfigError(
            f"prompt_file={config.rollout.prompt_file}: {len(hashes)} different files on the "
            "processes of the job; give all of them the same one"
        )
    with contextlib.ExitStack() as closing:
        output = closing.enter_context(Output(config.run, to_yaml(config)))
        if jax.process_index() == 0:
            preemption.say = output.say
        config = first_model.settled(config, output.folder)
        folder = output.folder / "checkpoints"
        checkpoints = closing.enter_context(
            Checkpoints(config.checkpoints, folder, prompts.hash, config.values, output.warn)
        )
        closing.enter_context(agreement.noticing_lost_peers())
        position = checkpoints.latest()
        changes = checkpoints.changes_since(position) if position else ""
        schedule = take_up(
            config.batch,
            config.checkpoints,
            jax.device_count(),
            mesh_checker(loaded),
            PassCost(config.batch, config.planning, config.model).restart,
            position,
        )
        if schedule.first_step >= schedule.ramp.total_steps:
            output.say_finished(schedule)
            return 0
        if schedule.first_step == schedule.last_step:
            output.write_next_stage(schedule)
            return EXIT_STAGE_END
        check_enough(prompts, config.rollout, config.data.num_epoch, schedule.ramp.total_samples)
        abstract = abstract_state(config.recipe, mesh)
        if position:
            checkpoints.compare(position, abstract)
        rewards = agreement.raise_everywhere(lambda: _rewards(config, closing))
        options = compiler_options(mesh.devices.flat[0].platform)
        ahead = Ahead(
            {},  # each program has the options
            device_memory(config.planning.device_memory_gib),
            output.say,
            preemption.ask,
        )
        closing.callback(ahead.close)
        rollout = GeneratorRollout(
            config.rollout,
            config.policy.decode_sampling_temperature,
            config.model,
            abstract.model,
            tokenizer,
            options,
        )
        programs = PolicyPrograms(
            config.recipe,
            config.policy,
            LearningRate.of(config.schedule, schedule.ramp),
            abstract,
            rollout,
            ahead,
            options,
        )
        for stage in schedule.stages:
            programs.announce(stage)
        ahead.lower()
        corpus = Corpus((), (), prompts.description, prompts.hash)
        output.say_start(corpus, abstract.model, config.model.dtype, schedule, changes)
        reference = None
        if config.policy.grpo_beta:
            began = first_model.weights_of(config)
            reference = checkpoints.load_parameters(began, abstract.model)
        trainer = PolicyTrainer(
            programs,
            config.rollout,
            prompts,
            tokenizer,
            rewards,
            reference,
        )
        state = checkpoints.first_state(position, abstract, config.recipe)
        return train(config, trainer, state, schedule, checkpoints, output, preemption, watchdog)


def train(
    config: Config,
    trainer: PolicyTrainer,
    state: TrainState,
    schedule: Schedule,
    checkpoints: Checkpoints,
    output: Output,
    preemption: Preemption,
    watchdog: Watchdog,
) -> int:
    """Trains the steps of a schedule, on the set mesh.

    Args:
      config: a resolved config.
      trainer: takes the steps.
      state: before the first one.
      schedule: the steps, and the checkpoint that they go on from.
      checkpoints: saves.
      output: the run's folder and display.
      preemption: whether somebody asked the run to stop.
      watchdog: gets a beat at every step.

    Returns:
      0, EXIT_PREEMPTED after a signal or EXIT_STAGE_END at the end of a stage (everything is
      saved).

    Raises:
      TrainingError: the run cannot go on.
    """
    ramp, first_step, last_step = schedule.ramp, schedule.first_step, schedule.last_step
    cpu.keep()
    checkpoints.start_saving()
    writers = output.open_files(ramp, first_step)
    for step in schedule.steps():
        stage = ramp.stage_at_step(step)
        try:
            state, metrics = trainer.step(state, stage, ramp.samples_before(step))
        except NotFiniteError:  # nothing that is worth saving
            raise
        except TrainingError:  # of a reward, or a program: every process comes here
            if step > first_step:
                checkpoints.save(step, state, ramp, output.flush, last=True)
            raise
        done, consumed = step + 1, ramp.samples_before(step + 1)
        check_numbers(config.run, step, metrics)  # a state whose loss ends the run is never saved
        record = {
            "step": step,
            "stage": stage.index,
            "per_device_batch_size": plain_number(stage.per_device_batch_size),
            "gradient_accumulation_steps": stage.gradient_accumulation_steps,
            "global_batch_size": stage.global_batch_size,
            "consumed_samples": consumed,
            **metrics,
        }
        for write in writers:
            write(record)
        watchdog.beat()
        output.check()
        checkpoints.check()
        stopping = preemption.reached(done)
        last = stopping or done == last_step
        if checkpoints.is_due(done, ramp) or last:
            checkpoints.save(done, state, ramp, output.flush, last)
        if stopping and done < last_step:
            trainer.raise_failure()  # which asked for the end
            output.say_stopped(step)
            return EXIT_PREEMPTED
    if last_step < ramp.total_steps:
        output.write_next_stage(schedule)
        return EXIT_STAGE_END
    return 0


def _prompts(config: Config, tokenizer: PromptTokenizer) -> Prompts:
    prompts = open_prompts(config.rollout, config.data)
    check_lengths(prompts, tokenizer, config.rollout, config.model)
    return prompts


def _rewards(config: Config, closing: contextlib.ExitStack) -> Rewards | None:
    """The reward functions, on process 0."""
    if jax.process_index():
        return None
    keys = config.rollout
    rewards = Rewards(keys.rewards, keys.reward_workers, keys.reward_timeout_seconds)
    closing.callback(rewards.close)
    return rewards


if __name__ == "__main__":
    run(functools.partial(main, preemption=_PREEMPTION))
