"""How JAX is started."""

import subprocess
import sys

from conftest import environment

START = """
from maxramp.parallel.keys import BackendKeys
from maxramp.parallel.mesh import start_backend
start_backend(BackendKeys("cpu", "gs://bucket/cache", 1))
"""


def test_a_cache_far_away_makes_no_folder_here(tmp_path):
    subprocess.run([sys.executable, "-c", START], cwd=tmp_path, env=environment(), check=True)
    assert not list(tmp_path.iterdir())
