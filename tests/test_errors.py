"""What a library raises, in a line that a person can act on."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxramp.errors import reason_of


def too_much_for_the_device():
    jnp.zeros((2**20, 2**26)).block_until_ready()


def too_much_for_the_host():
    np.ones(2**50)


@pytest.mark.parametrize("allocate", [too_much_for_the_device, too_much_for_the_host])
def test_too_little_memory_is_one_line_with_the_remedy(allocate):
    with pytest.raises((jax.errors.JaxRuntimeError, MemoryError)) as caught:
        allocate()
    line = reason_of(caught.value)
    assert re.match(r"out of memory: \w.*\d.*; use a smaller per_device_batch_size", line), line
    assert "remat_policy=full" in line and "ici_fsdp_parallelism" in line
    assert reason_of(ValueError("a\nb")) == "a b" and reason_of(KeyError()) == "KeyError"
