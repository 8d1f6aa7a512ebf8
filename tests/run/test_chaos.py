"""The chaos driver as a user runs it: kills at random, then the proof that nothing was lost.

Longer ones, and of starts that are all alike: benchmarks/chaos.py --kills 25 --same-shape."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, environment


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--kills=3", "--seed=2"],
        pytest.param(["--kills=3", "--seed=3", "--pipelines"], marks=pytest.mark.long),
        pytest.param(["--kills=3", "--seed=4", "--adaptive"], marks=pytest.mark.long),
    ],
)
def test_nothing_is_lost(tmp_path, cache_dir, options):
    line = [*options, f"--folder={tmp_path}", f"--json={tmp_path / 'report.json'}"]
    driver = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "chaos.py"),
            *line,
            f"jax_cache_dir={cache_dir}",
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert driver.returncode == 0, driver.stdout + driver.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert sum(report["ends"].values()) == int(options[0].partition("=")[2])
    assert report["missing_steps"] == report["repeated_steps"] == 0 and not report["bad"]
