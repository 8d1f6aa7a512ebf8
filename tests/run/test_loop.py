"""What the loop saves, or says, when a step fails."""

import concurrent.futures
import threading
import types

import jax.numpy as jnp
import pytest
from conftest import make_config

from maxramp.checkpoints.saving import Saves
from maxramp.errors import StepError
from maxramp.job.loop import _StepEnd
from maxramp.run.jobs import Jobs


class Steps:
    """A job of steps of 8 samples, of which one fails."""

    def __init__(self, clock):
        self.saved, self.lines = [], []
        ramp = types.SimpleNamespace(
            samples_before=lambda step: 8 * step, to_json=lambda: {"stages": []}
        )
        checkpoints = types.SimpleNamespace(
            snapshots=None,
            newest=4,
            settle_alone=lambda: None,
            make_record=lambda done, *more, **numbers: done,
            save=lambda done, *more: self.saved.append(done),
        )
        output = types.SimpleNamespace(
            say=self.lines.append, files=types.SimpleNamespace(flush=None), jobs=Jobs(None)
        )
        job = types.SimpleNamespace(
            schedule=types.SimpleNamespace(ramp=ramp, first_step=2),
            checkpoints=checkpoints,
            config=types.SimpleNamespace(values={}),
            output=output,
        )
        log = types.SimpleNamespace(flush=lambda: None, restart_clock=lambda: None)
        numbers = types.SimpleNamespace(numbers_after=lambda step: {})
        trainer = types.SimpleNamespace(state=types.SimpleNamespace(consumed_samples=clock))
        self.after = _StepEnd(job, trainer, log, numbers, policy=None)


def clock(samples):
    return jnp.array([samples, 0], jnp.uint32)


@pytest.mark.parametrize("error", [StepError("it does not compile"), OSError("a file is gone")])
def test_an_error_that_leaves_the_state_saves_it(error):
    steps = Steps(clock(8 * 7))
    with pytest.raises(type(error)), steps.after.save_on_error(7):
        raise error
    assert (steps.saved, steps.lines) == ([7], [])


@pytest.mark.parametrize("what", ["its arrays", "its clock"])
def test_an_error_that_takes_the_state_says_what_is_lost(what):
    """The arrays were given to the step, or are those after it."""
    state = clock(8 * 8)
    if what == "its arrays":
        state.delete()
    steps = Steps(state)
    with pytest.raises(ValueError), steps.after.save_on_error(7):
        raise ValueError
    assert not steps.saved
    assert steps.lines == [
        "lost     3 steps since checkpoint 4: the error left no state to save; the next start "
        "trains them again"
    ]


def test_a_checkpoint_that_is_being_written_may_yet_count():
    steps = Steps(clock(8 * 8))
    steps.after._job.checkpoints.settle_alone = lambda: 6
    with pytest.raises(ValueError), steps.after.save_on_error(7):
        raise ValueError
    (line,) = steps.lines
    assert line.startswith(
        "lost     1 step since checkpoint 6 if that becomes whole, else 3 steps since checkpoint 4:"
    )


def test_a_save_that_this_process_has_done_counts_and_one_that_runs_does_not(tmp_path):
    saves = Saves(tmp_path, make_config().checkpoints, print)
    running = threading.Event()
    saves.begin(5, lambda: running.wait(30))
    assert (saves.settle_alone(), saves.newest) == (5, None)
    running.set()
    concurrent.futures.wait([saves._current[1]])
    assert (saves.settle_alone(), saves.newest) == (None, 5)


def test_before_the_first_step_there_is_nothing_to_save():
    steps = Steps(clock(8 * 2))
    with pytest.raises(ValueError), steps.after.save_on_error(2):
        raise ValueError
    assert not steps.saved and not steps.lines
