"""A ramp that is replaced while batches are read has the rows of one known from the start."""

import contextlib
import shutil

import numpy as np
import pytest
from conftest import make_config, make_mesh

from maxramp.data.loader import Loader
from maxramp.data.opening import open_rows
from maxramp.data.relay import Expansion
from maxramp.rampup.schedule import RampupBatchManager, ResumePoint

STEPS = 13
KNOWN = "0:8 40:16 104:32"


def config(schedule="0:8", *arguments):
    keys = "dataset_type=synthetic step_batch_size_unit=samples per_device_batch_size=2"
    keys += f" steps={STEPS} eval_interval=-1 grain_prefetch_buffer_size=3"
    return make_config(*keys.split(), f"step_batch_size_schedule={schedule}", *arguments)


@pytest.fixture(scope="module")
def known():
    """Batches of 8, 16 and 32 rows from steps 0, 5 and 9 on, the last with accumulation."""
    ramp = RampupBatchManager(config(KNOWN).batch)
    assert [(s.first_step, s.global_batch_size) for s in ramp.stages] == [(0, 8), (5, 16), (9, 32)]
    assert ramp.stages[2].gradient_accumulation_steps == 2
    return ramp


@contextlib.contextmanager
def loading(keys, ramp):
    parts = keys.data, keys.reading, open_rows(keys.data, True), ramp
    with contextlib.closing(Loader(*parts, Expansion(make_mesh(keys), 1), 0)) as loader:
        yield loader


def rows(loader, step, ramp):
    return np.asarray(loader.batch(step, ramp)[0].tokens).tolist()


@pytest.fixture(scope="module")
def expected(known):
    with loading(config(), known) as loader:
        return [rows(loader, step, known) for step in range(STEPS)]


def ramps(known):
    """The ramp of each step, as if each stage was decided on at its first step."""
    ramp, replaced = RampupBatchManager(config().batch), []
    for step in range(STEPS):
        stage = known.stage_at_step(step)
        if step and stage.first_step == step:
            sample, size = stage.first_sample, stage.global_batch_size
            schedule = f"0:8 {sample}:{size}"
            point = ResumePoint(step, sample, ramp.to_json()["stages"])
            ramp = RampupBatchManager(config(schedule).batch, None, point)
        replaced.append(ramp)
    return replaced


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stage_that_is_decided_while_batches_are_read_has_its_rows(
    known, expected, workers, tmp_path
):
    """Also where somebody cleans the temporary folder, as a system does after some days."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        patch.setattr("tempfile.tempdir", None)
        keys, ramp_at = config("0:8", f"grain_worker_count={workers}"), ramps(known)
        assert ramp_at[-1].to_json()["stages"] == known.to_json()["stages"]
        with loading(keys, ramp_at[0]) as loader:
            for step in range(STEPS):
                assert rows(loader, step, ramp_at[step]) == expected[step]
                for path in tmp_path.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
