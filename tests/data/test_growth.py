"""A ramp that grows while batches are read: the rows of one that was known from the start."""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import pickle
import shutil

import numpy as np
import pytest
from conftest import make_config, make_mesh

from maxramp.data.corpus import Corpus, Part
from maxramp.data.loader import Loader
from maxramp.data.opening import open_rows
from maxramp.data.prefetch import SharedRamp
from maxramp.data.relay import Expansion
from maxramp.data.rows import Row
from maxramp.errors import ConfigError, TrainingError
from maxramp.rampup.schedule import RampupBatchManager

STEPS = 13
GROWN_AT = {3: 1, 7: 2}  # before this step, stage 1 or 2 is added; each begins two steps later


def config(schedule="0:8", *arguments):
    keys = "dataset_type=synthetic step_batch_size_unit=samples per_device_batch_size=2"
    keys += f" steps={STEPS} eval_interval=-1 grain_prefetch_buffer_size=3"
    return make_config(*keys.split(), f"step_batch_size_schedule={schedule}", *arguments)


@pytest.fixture(scope="module")
def known():
    """Batches of 8, 16 and 32 rows from steps 0, 5 and 9 on, the last with accumulation."""
    ramp = RampupBatchManager(config("0:8 40:16 104:32").batch)
    assert [(s.first_step, s.global_batch_size) for s in ramp.stages] == [(0, 8), (5, 16), (9, 32)]
    assert ramp.stages[2].gradient_accumulation_steps == 2
    return ramp


@contextlib.contextmanager
def loading(keys, ramp, first_step=0, corpus=None):
    loader = Loader(
        keys.data,
        keys.reading,
        corpus or open_rows(keys.data, keys.reading, True),
        ramp,
        Expansion(make_mesh(keys), 1),
        first_step,
    )
    with contextlib.closing(loader):
        yield loader


def rows(loader, step):
    return np.asarray(loader.batch(step)[0].tokens).tolist()


@pytest.fixture(scope="module")
def expected(known):
    with loading(config(), known) as loader:
        return [rows(loader, step) for step in range(STEPS)]


def add(ramp, stage):
    ramp.rungs = [dataclasses.replace(stage, steps=None, samples=None)]
    ramp.grow(stage.first_step)


def grow(ramp, known, step):
    """What a policy does before a step: nothing is fixed further than two steps ahead."""
    if step in GROWN_AT:
        add(ramp, known.stages[GROWN_AT[step]])
    ramp.settle(step + 2)


@pytest.mark.parametrize("workers", (0, 2))
def test_a_stage_added_while_batches_are_read_has_its_rows(known, expected, workers):
    """Killed in its second stage, and started again, too: nothing is decided a second time."""
    keys = config("0:8", f"grain_worker_count={workers}")
    ramp = RampupBatchManager(keys.batch)
    ramp.settle(0)
    with loading(keys, ramp) as loader:
        for step in range(8):
            grow(ramp, known, step)
            assert rows(loader, step) == expected[step]
        if workers:
            for process in multiprocessing.active_children():
                process.kill()
            with pytest.raises(TrainingError, match="could not be read"):
                for step in range(8, STEPS):
                    grow(ramp, known, step)
                    rows(loader, step)
    again = RampupBatchManager(keys.batch)
    again.settle(0)
    for stage in ramp.stages[1:]:
        add(again, stage)
    assert again.stages == ramp.stages == known.stages
    with loading(keys, again, first_step=6) as loader:
        for step in range(6, STEPS):
            again.settle(step + 2)
            assert rows(loader, step) == expected[step]


def test_only_what_is_not_settled_can_change(known):
    with pytest.raises(ValueError, match="a stage from step 5 on: 13 steps are settled"):
        add(RampupBatchManager(config().batch), known.stages[1])
    ramp = RampupBatchManager(config().batch)
    ramp.settle(5)
    with pytest.raises(ValueError, match="5 steps are settled"):
        ramp.settle(4)
    add(ramp, known.stages[1])
    assert ramp.stages[0] == known.stages[0] and ramp.settled_steps == 5
    assert [ramp.samples_before(step) for step in (4, 5, 9)] == [32, 40, 104]


def test_a_ramp_that_outgrows_the_data_is_refused(known):
    keys = config()
    ramp, rows_there = RampupBatchManager(keys.batch), [Row(np.zeros(17, np.int32))] * 110
    ramp.settle(2)
    parts = (Part("a", 1.0, rows_there),)
    corpus = Corpus(parts, parts, "")
    with loading(keys, ramp, corpus=corpus) as loader:
        loader.batch(0)
        add(ramp, known.stages[1])
        with pytest.raises(ConfigError, match="steps=13 takes 168 rows, .* use num_epoch=2"):
            loader.batch(1)


@pytest.mark.parametrize("workers", (0, 1))
def test_who_cleans_the_temporary_folder_stops_no_run(known, expected, workers, tmp_path):
    """As a system does with files that are some days old."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        patch.setattr("tempfile.tempdir", None)
        keys = config("0:8", f"grain_worker_count={workers}")
        ramp = RampupBatchManager(keys.batch)
        ramp.settle(0)
        with loading(keys, ramp) as loader:
            for step in range(STEPS):
                grow(ramp, known, step)
                assert rows(loader, step) == expected[step]
                for path in tmp_path.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_worker_asks_the_ramp_of_its_loader(known):
    """It waits as threads do, and hears of the end."""
    ramp = RampupBatchManager(config().batch)
    ramp.settle(2)
    shared = SharedRamp(ramp)
    reader = pickle.loads(pickle.dumps(shared))
    assert reader.wait_for_step(1).stages == shared.wait_for_step(1).stages == ramp.stages
    with concurrent.futures.ThreadPoolExecutor(1) as waiting:
        later = waiting.submit(reader.wait_for_step, 4)
        add(ramp, known.stages[1])
        ramp.settle(5)
        shared.publish(ramp)
        assert later.result(timeout=60).stages == ramp.stages
        never = waiting.submit(reader.wait_for_step, 5)
        shared.close()
        with pytest.raises(TrainingError, match="nobody settled what step 5 takes"):
            never.result(timeout=60)
