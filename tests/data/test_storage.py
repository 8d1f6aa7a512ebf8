"""Files that are written at once, by several processes."""

import subprocess
import sys

from conftest import environment

WRITER = """
import pathlib, sys
from maxramp.files.place import write_whole
path, letter = pathlib.Path(sys.argv[1]), sys.argv[2].encode()
for _ in range(300):
    write_whole(path, letter * 10_000)
    there = path.read_bytes()
    assert len(there) == 10_000 and len(set(there)) == 1
"""


def test_two_processes_write_one_file(tmp_path):
    """Each of them writes all of it, and neither takes away what the other is writing."""
    path = tmp_path / "file"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), letter],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for letter in "ab"
    ]
    assert [writer.communicate(timeout=60)[1] for writer in writers] == ["", ""]
    assert path.read_bytes() in (b"a" * 10_000, b"b" * 10_000)
    assert list(tmp_path.iterdir()) == [path]
