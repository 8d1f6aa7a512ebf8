"""Runs in which features meet: a few of the cases that benchmarks/joints.py draws."""

import subprocess
import sys

import pytest
from conftest import ROOT, environment


@pytest.mark.slow
@pytest.mark.parametrize("seed", (1, pytest.param(2, marks=pytest.mark.long)))
def test_what_holds_of_every_run(tmp_path, seed):
    pytest.importorskip("transformers")
    cases = f"--seed={seed} --count=5 --tries=0 --folder={tmp_path}".split()
    script = str(ROOT / "benchmarks" / "joints.py")
    done = subprocess.run(
        [sys.executable, script, *cases], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
