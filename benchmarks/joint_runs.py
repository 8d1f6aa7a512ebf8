"""The files that the cases of joints.py read, and their runs."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import object_stores
from conftest import BASE, command, run
from jobs import finish, start
from joint_cases import COMMON, Case, Shape, keys_of
from preference_pairs import pairs, write_pairs, write_tokenizer
from small_models import write_folder

from maxramp import plan
from maxramp.data.files.megatron import MegatronWriter
from maxramp.errors import EXIT_LOST, EXIT_PREEMPTED
from maxramp.run.metrics import read_records

# Trains, and sends its process a signal at a step, or at a change of the run's folder.
STRUCK = """
import os, runpy, signal, sys
module, name, number, what, count, *rest = sys.argv[1:]
PROCESS = ("PROCESS_ID", 0), ("NUM_PROCESSES", 1)
number, count, seen = getattr(signal, "SIG" + number), int(count), 0

def strike():
    index, all_ = (int(os.environ.get(f"MAXRAMP_{name}", d)) for name, d in PROCESS)
    if index == count % all_:
        os.kill(os.getpid(), number)

def changed(event, given):
    global seen
    if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        return
    written = event != "open" or (given[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    if written and f"/{name}/" in str(given[0]) + "/":
        seen += 1
        if seen == count:
            strike()

if what == "file":
    sys.addaudithook(changed)
else:
    from maxramp.run import metrics
    log_step = metrics.MetricsLog.log_step
    def log(self, step, *others):
        if step == count:
            strike()
        return log_step(self, step, *others)
    metrics.MetricsLog.log_step = log
sys.argv = [module, *rest]
sys.modules.pop(f"maxramp.{module}", None)
runpy.run_module(f"maxramp.{module}", run_name="__main__", alter_sys=True)
"""


_CHATS = ["use_sft=true"]


# Notes, what a client of Google's storage says of credentials, and what a process says of one that
# says why.
_NO_ERROR = re.compile(
    r"note: |E\d{4} .*google_auth|error: process \d+ of the job ended with exit status 2; its own"
)


class Failed(Exception):
    """What does not hold: `what` in a few words, which name the fault; and all that is known."""

    def __init__(self, what: str, text: str = ""):
        super().__init__(what, text)
        self.what, self.text = what, text


class Refused(Exception):
    """The run was refused in one line, before step 0."""


class Missing(Exception):
    """A case needs what is not installed."""


# --- The files that runs read --------------------------------------------------------------------


class World:
    """A folder with data, a released model and runs; made once."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self._closing = folder, contextlib.ExitStack()
        self.cache = os.environ.get("MAXRAMP_TEST_CACHE", str(folder / "cache"))
        if not (folder / "made").exists():
            self._make()

    def close(self) -> None:
        self._closing.close()

    @functools.cache  # noqa: B019
    def storage(self, scheme: str) -> object_stores.Storage:
        """Starts an object storage at its first use."""
        if lacks := object_stores.missing(scheme):
            raise Missing(lacks)
        storage = self._closing.enter_context(object_stores.running(scheme))
        os.environ |= storage.environment
        return storage

    @functools.cached_property
    def measured(self) -> pathlib.Path:
        """A run with a noise scale and branches, for suggest."""
        folder, text = self.folder / "measured", f"text_files={self.folder / 'text.txt'}"
        sizes = [f"{k}={v}" for k, v in COMMON.items() if "world" not in v]
        keys = ["global_batch_size=4", "steps=60", "checkpoint_period=20", text]
        keys += ["log_gradient_noise_scale=True", f"jax_cache_dir={self.cache}"]
        where = [f"base_output_directory={self.folder}", "run_name=measured"]
        if not (folder / "made").exists():
            done = run(BASE, *sizes, *keys, *where)
            assert done.returncode == 0, done.stderr
            branch = (str(folder), "--at", "20", "--sizes", "4,16", "--tokens", "512")
            done = run(*branch, module="branch")
            assert done.returncode == 0, done.stderr
            (folder / "made").touch()
        return folder

    def _make(self) -> None:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        words = [f"to be or not {n % 7} {'x' * (n % 23)}" for n in range(900)]
        (folder / "text.txt").write_text("\n".join(words))
        documents = [" ".join(words[n : n + 1 + n % 5]) for n in range(0, 900, 3)]
        for name, texts in (("docs", documents), ("code", words[:300]), ("few", documents[:40])):
            write_pairs(folder / f"{name}.jsonl", [{"text": text} for text in texts])
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist([{"text": text} for text in documents])
        pyarrow.parquet.write_table(table, folder / "docs.parquet", row_group_size=30)
        with MegatronWriter(str(folder / "megatron"), np.uint16) as writer:
            writer.add([np.frombuffer(t.encode(), np.uint8).astype(np.int32) for t in documents])
            writer.finish()
        released = {"released": "llama2", "released_experts": "mixtral"}
        hybrids = {"released_hybrid": "qwen3_5", "released_next": "qwen3_next"}
        drafting = {"released_glm": "glm4_moe", "released_deepseek": "deepseek_v3"}
        others = {"released_gpt_oss": "gpt_oss", **drafting}
        for name, family in (released | hybrids | others).items():
            more = {"num_hidden_layers": 8, "rms_norm_eps": 0.1} if name in hybrids else {}
            more |= {"drafts": name in drafting}
            write_folder(folder / name, family, vocab_size=272, max_position_embeddings=128, **more)
            assert write_tokenizer(folder / name) <= 272
        records = pairs(240)
        write_pairs(folder / "pairs.jsonl", records)
        write_pairs(folder / "chats.jsonl", [{"messages": record["chosen"]} for record in records])
        tokenizer = f"tokenizer_path={folder / 'released'}"
        for name, to, keys in (("docs", "prepared", []), ("chats", "prepared_chats", _CHATS)):
            line = [str(folder / f"{name}.jsonl"), "--output", str(folder / to), tokenizer, *keys]
            done = run(*line, module="prepare")
            assert done.returncode == 0, done.stderr
        prompts = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(60)]
        write_pairs(folder / "prompts.jsonl", prompts)
        (folder / "made").touch()


# --- Runs ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Runs:
    """The runs of one case, in a folder of their own."""

    case: Case
    world: World
    folder: pathlib.Path
    # a storage keeps what an earlier case left in it
    remote: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))
    # those of which checkpoints are missing, as a storage was slow
    left_out_saves: set[str] = dataclasses.field(default_factory=set)

    @property
    def program(self) -> str:
        return "grpo" if self.case.has("data") == "grpo" else "train"

    def arguments(self, name: str, shape: Shape, notation: str = "", **keys: Any) -> list[str]:
        """Returns the command line of a run."""
        scheme = self.case.has("storage")
        output = str(self.folder)
        if scheme != "disk":
            output = f"{self.world.storage(scheme).address}/{self.remote}"
        arguments = keys_of(self.case, shape, notation)
        arguments |= {"base_output_directory": output, "run_name": name}
        arguments |= {k: str(v) for k, v in keys.items()}
        arguments = {k: v.replace("{world}", str(self.world.folder)) for k, v in arguments.items()}
        arguments["jax_cache_dir"] = str(self.world.cache)
        return [BASE, *(f"{k}={v}" for k, v in arguments.items())]

    def other_keys(self) -> dict[str, str]:
        """Returns the keys of every second start, which finds elsewhere what the first one left."""
        link = self.folder.with_name("link")
        link.unlink(missing_ok=True)
        link.symlink_to(self.folder)
        pairs = [pair for choice in self.case.choices for pair in choice.between.items()]
        return {name: str(value).replace("{link}", str(link)) for name, value in pairs}

    def train(self, name: str, shape: Shape, moment: str = "", **others: Any) -> list[int]:
        """Starts a run, struck at a moment; returns the exit statuses.

        Raises:
          Failed: it ends as no run may.
          Refused: it does not begin.
        """
        arguments = self.arguments(name, shape, **others)
        line = command(*arguments, module=self.program)
        if moment:
            line = [sys.executable, "-c", STRUCK, self.program, name, *moment.split(), *arguments]
        folders = [self.folder] * shape.processes
        ended = finish(start(line, shape.processes, shape.devices, folders), timeout=600)
        self._fetch(name)
        self._judge(name, ended, moment)
        return [status for _, _, status in ended]

    def _fetch(self, name: str) -> None:
        """Copies a run of an object storage to where it would be on the disk."""
        if (scheme := self.case.has("storage")) == "disk":
            return
        import fsspec

        client, path = fsspec.core.url_to_fs(f"{self.world.storage(scheme).address}")
        client.invalidate_cache()
        shutil.rmtree(self.folder / name, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            client.get(f"{path}/{self.remote}/{name}/", f"{self.folder / name}/", recursive=True)

    def _judge(self, name: str, ended: list[tuple[str, str, int]], moment: str) -> None:
        statuses = [status for _, _, status in ended]
        complaint = "\n".join(err for _, err, _ in ended)
        shown = f"{name}: statuses {statuses}\n{complaint[-3000:]}"
        if any("is still being written" in out + err for out, err, _ in ended):
            self.left_out_saves.add(name)
        if {*statuses} == {2} and not moment:
            lines = {x for _, err, _ in ended for x in err.splitlines() if not _NO_ERROR.match(x)}
            if len(lines) != 1 or not min(lines).startswith("error: "):
                raise Failed("an error is no line", shown)
            if steps_of(self.folder / name):
                raise Failed("an error after step 0", shown)
            raise Refused(min(lines))
        if "Traceback" in complaint and {*statuses} <= {0, 2, EXIT_PREEMPTED}:
            raise Failed("a traceback", shown)
        fine = {0}
        if moment:
            fine |= {EXIT_PREEMPTED} if "TERM" in moment else {-signal.SIGKILL}
            fine |= {EXIT_LOST, -signal.SIGABRT, EXIT_PREEMPTED} if len(statuses) > 1 else set()
        if not {*statuses} <= fine:
            raise Failed("an exit status", shown)

    def planned(self, *arguments: str) -> dict[str, Any]:
        """Returns the plan of a command line."""
        return json.loads(answer(plan.main, [*arguments, "--json"]))


def answer(main: Callable[[list[str]], int], arguments: list[str]) -> str:
    """Returns what a command prints that trains nothing.

    Raises:
      Refused: in one line.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    if status:
        raise Refused(err.getvalue().strip())
    return out.getvalue()


def records_of(folder: pathlib.Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return read_records(path) if path.exists() else []


def steps_of(folder: pathlib.Path) -> list[dict]:
    """Reads the records of steps."""
    return [record for record in records_of(folder) if "loss" in record]
