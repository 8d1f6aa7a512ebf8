"""Drivers that try runs at random; longer: benchmarks/chaos.py --kills 25 --same-shape."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, environment

LONG = pytest.mark.long


def drive(name, *arguments):
    """Runs a driver of benchmarks that must succeed."""
    line = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "count"), [(11, 1), pytest.param(1, 5, marks=LONG), pytest.param(2, 5, marks=LONG)]
)
def test_what_holds_of_every_run_where_features_meet(tmp_path, seed, count):
    pytest.importorskip("transformers")
    drive("joints.py", f"--seed={seed}", f"--count={count}", "--tries=0", f"--folder={tmp_path}")


@LONG
@pytest.mark.parametrize(
    ("kills", "options"),
    [(2, ["--seed=2"]), (3, ["--seed=3", "--pipelines"]), (3, ["--seed=4", "--adaptive"])],
)
def test_nothing_is_lost_by_kills_at_random(tmp_path, cache_dir, kills, options):
    report = tmp_path / "report.json"
    line = [*options, f"--folder={tmp_path}", f"--json={report}", f"jax_cache_dir={cache_dir}"]
    drive("chaos.py", f"--kills={kills}", *line)
    report = json.loads(report.read_text())
    assert sum(report["ends"].values()) == kills
    assert report["missing_steps"] == report["repeated_steps"] == 0 and not report["bad"]
