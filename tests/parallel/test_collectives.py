"""What is sent where there is nobody to send to."""

import re

import jax
import pytest
from conftest import make_config

from maxramp.parallel import mesh as mesh_lib
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import lower_step

SENDS = r"stablehlo\.(all_gather|all_reduce|all_to_all|collective_\w+|reduce_scatter)"


@pytest.mark.parametrize("devices", [1, 2])
def test_one_device_sends_nothing(devices):
    config = make_config("log_gradient_noise_scale=True", devices=devices)
    ramp = RampupBatchManager(config.batch, devices)
    rate, spec = LearningRate.from_keys(config.learning_rate, ramp), ramp.stages[0].spec
    spec = spec.resize(2, 4 * devices)
    mesh = mesh_lib.make_mesh(config.mesh, jax.devices()[:devices])
    text = lower_step(config.recipe, rate, spec, mesh).as_text()
    assert bool(re.search(SENDS, text)) == (devices > 1)
