"""Claims: of two that want one folder one gets it, and who was killed does not keep it."""

import concurrent.futures
import json
import os
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from maxramp.errors import TrainingError
from maxramp.files import run_folder
from maxramp.files.place import place
from maxramp.files.run_folder import Claim, is_gone, this_process

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(run_folder, "_BEAT", 0.2)
    monkeypatch.setattr(run_folder, "_SILENCE", 2.0)


def test_one_of_many_gets_it(storage):
    path, claims, refused = place(f"{storage.address}/many/.lock"), [], []

    def try_it(number):
        try:
            claims.append(Claim(path, f"claimant {number}"))
        except BlockingIOError as error:
            refused.append(str(error))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        [*pool.map(try_it, range(6))]
    (held,) = claims
    owner = json.loads(path.read_bytes())["owner"]
    assert refused == [owner] * 5
    held.release()
    assert not path.exists()
    Claim(path, "the next").release()


def test_a_silent_owner_loses_it(storage):
    """As a machine that lost its network: it learns so before it writes again."""
    path = place(f"{storage.address}/silent/.lock")
    silent = Claim(path, "the first")
    silent._ending.set()  # its heart beats no more
    began = time.monotonic()
    second = Claim(path, "the second")
    assert time.monotonic() - began >= 2
    silent._renewed = 0.0
    with pytest.raises(TrainingError, match="was taken over by the second"):
        silent.renew()
    second.renew()
    second.release()


def test_a_killed_owner_on_this_machine_is_known(storage, monkeypatch):
    """Its claim is taken over without a wait."""
    path = place(f"{storage.address}/killed/.lock")
    program = (
        "import sys, time\n"
        "from maxramp.files.run_folder import Claim\n"
        "from maxramp.files.place import place\n"
        "Claim(place(sys.argv[1]), 'it'); print('claimed', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout.readline() == "claimed\n"
    monkeypatch.setattr(run_folder, "_SILENCE", 40.0)
    with pytest.raises(BlockingIOError, match="it"):
        Claim(path, "too early")
    owner.kill()
    owner.wait()
    began = time.monotonic()
    Claim(path, "in time").release()
    assert time.monotonic() - began < 20


def test_processes_are_told_apart():
    own = this_process()
    assert not is_gone(own)
    assert is_gone(own | {"started": "1"}) and is_gone(own | {"pid": 2**22 + 1})
    assert not is_gone(own | {"machine": "another", "pid": 2**22 + 1})
    assert not is_gone(None) and not is_gone({})
