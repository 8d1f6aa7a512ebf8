"""How far a reader goes to follow a call: files of maxramp that are entered, and returns to them.

python benchmarks/ways.py [--json FILE] [--functions]

Real runs of two steps are followed with `sys.setprofile`. Every function counts once, where it is
called first, as it would be read; comprehensions and lambdas belong to the function that they stand
in, and what looks like a value or an expression (properties, `__len__`) is passed by. A file is
entered when a function stands in another file than the one before it in that thread; each time
after the first is a return.

  config       the command line to a `Config`
  data         opening a prepared set
  chats        opening a file of chats
  weights      the first weights of a run that adapts a Hugging Face folder: what its keys and
               files say of them, up to the state; not how arrays are read or made
  row          the `__getitem__`s of maxramp that stand on each other while a row is read
  checkpoint   a checkpoint to an emulated gs:// (`pip install '.[storage-test]'`), over all
               threads, and the clients that the run has for its bucket: fsspec's file systems, of
               which Orbax makes its own, and TensorStore
"""

import collections
import contextlib
import functools
import inspect
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from figures import ROOT, parser, save

import maxramp
from maxramp import train
from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.data import opening

sys.path.append(str(ROOT / "tests"))
import object_stores
import preference_pairs

PACKAGE = str(pathlib.Path(maxramp.__file__).parent) + os.sep
ROOTS = {
    "config": [("config/load.py", "load")],
    "data": [("data/opening.py", "open_rows")],
    "checkpoint": [("checkpoints/store.py", "Checkpoints.save")],
}
FIRST_WEIGHTS = {
    "weights": [
        ("config/load.py", "_read_folder"),
        *(("handover/first_weights.py", f"{do}_first_weights") for do in ("check", "pin")),
        ("handover/weights.py", "open_weights"),
        ("handover/weights.py", "keep_released"),
        ("handover/weights.py", "ReleasedWeights.prepare"),
        ("job/start.py", "Job.first_state"),
    ]
}
# Files of arrays: what they call is not followed on the way to first weights.
ENDS = ("huggingface/reading.py", "training/state.py", "checkpoints/arrays.py")
CHATS = {"chats": ROOTS["data"]}
TINY = [
    "base_emb_dim=32",
    "base_num_query_heads=2",
    "base_num_kv_heads=2",
    "head_dim=8",
    "base_mlp_dim=64",
    "base_num_decoder_layers=1",
    "vocab_size=320",
    "max_target_length=16",
    "global_batch_size=8",
    "steps=2",
    "eval_interval=-1",
    "enable_tensorboard=False",
    "tokenizer_type=bytes",
]


class Walk:
    """The functions that one call leads to, by thread, each where it is called first."""

    def __init__(self, roots: list[tuple[str, str]], ends: tuple[str, ...] = ()):
        self.waiting, self.ends = set(roots), ends
        self.depth = self.ended = 0  # of roots, and of functions in `ends`
        self.seen: set[tuple[str, str]] = set()
        self.threads: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)

    def add(self, thread: str, function: tuple[str, str]) -> None:
        """Notes a function, by file and name, unless it is known."""
        if function not in self.seen:
            self.seen.add(function)
            self.threads[thread].append(function)

    def files(self) -> int:
        """Counts the files that are entered."""
        return len({file for file, _ in self.seen})

    def stays(self) -> int:
        """Counts how often a thread enters a file."""
        return sum(map(len, self._entered()))

    def returns(self) -> int:
        """Counts how often a thread enters a file again."""
        return sum(len(files) - len(set(files)) for files in self._entered())

    def _entered(self) -> Iterator[list[str]]:
        for way in self.threads.values():
            files = [file for file, _ in way]
            yield [b for a, b in zip([None, *files], files, strict=False) if a != b]


class Follower:
    """What `sys.setprofile` calls: notes the functions below the roots, and the lookups."""

    def __init__(self, walks: dict[str, Walk]):
        self.walks = walks
        self.lookups: list[str] = []  # the deepest stack
        self.clients: list[str] = []
        self._stacks = threading.local()
        self._frames: dict[int, list[tuple[Walk, str]]] = {}  # the depths that end with them

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            if event == "call" and code.co_qualname == "AbstractFileSystem.__init__":
                self.clients.append(f"fsspec: {type(frame.f_locals['self']).__name__}")
            return
        file = code.co_filename.removeprefix(PACKAGE)
        if code.co_qualname == "Claim.__init__" and "TensorStore" not in self.clients:
            self.clients.append("TensorStore")
        if code.co_name == "__getitem__":
            self._look_up(event, f"{file}: {code.co_qualname}")
        if event == "return":
            for walk, what in self._frames.pop(id(frame), ()):
                setattr(walk, what, getattr(walk, what) - 1)
            return
        thread, function = threading.current_thread(), (file, code.co_qualname)
        for walk in self.walks.values():
            if walk.ends and thread is not threading.main_thread():
                continue
            counted = ["depth"] * (function in walk.waiting)
            walk.waiting.discard(function)
            if walk.depth + len(counted) and not walk.ended and not _is_expression(frame):
                walk.add(thread.name, function)
            counted += ["ended"] * (file in walk.ends)
            for what in counted:
                setattr(walk, what, getattr(walk, what) + 1)
                self._frames.setdefault(id(frame), []).append((walk, what))

    def _look_up(self, event: str, name: str) -> None:
        stack = self._stacks.__dict__.setdefault("lookups", [])
        stack.append(name) if event == "call" else stack.pop()
        if len(stack) > len(self.lookups):
            self.lookups = list(stack)


def _is_expression(frame: Any) -> bool:
    """Returns whether a call looks like an expression: an operator, a property, a lambda."""
    name, owner = frame.f_code.co_name, type(frame.f_locals.get("self"))
    return name.startswith(("<", "__")) or isinstance(
        inspect.getattr_static(owner, name, None), property | functools.cached_property
    )


@contextlib.contextmanager
def followed(walks: dict[str, Walk]) -> Iterator[Follower]:
    """Follows every call of this thread, and of those that begin meanwhile."""
    follower = Follower(walks)
    threading.setprofile(follower)
    sys.setprofile(follower)
    try:
        yield follower
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def figures(show: bool) -> dict[str, dict[str, int]]:
    """Returns the figures of every way, by its name."""
    with contextlib.ExitStack() as closing:
        folder = closing.enter_context(tempfile.TemporaryDirectory())
        texts, prepared = pathlib.Path(folder, "texts.jsonl"), f"{folder}/prepared"
        texts.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(200)))
        prepare = [sys.executable, "-m", "maxramp.prepare", str(texts), "--output", prepared]
        subprocess.run([*prepare, "tokenizer_type=bytes"], check=True, stdout=subprocess.DEVNULL)
        storage = closing.enter_context(object_stores.running("gs"))
        os.environ |= storage.environment
        keys = [*TINY, "dataset_type=grain", f"grain_train_files={prepared}", "run_name=ways"]
        keys += [f"base_output_directory={storage.address}", f"jax_cache_dir={folder}/cache"]
        config = str(ROOT / "configs" / "base.yml")
        with followed({name: Walk(roots) for name, roots in ROOTS.items()}) as follower:
            assert train.main([config, *keys]) == 0
        keys = [f"base_output_directory={folder}", f"jax_cache_dir={folder}/cache"]
        keys += ["dataset_type=synthetic", "global_batch_size=8", "max_target_length=16", "steps=2"]
        first = ["run_name=first", "export_huggingface=True", *TINY]
        assert train.main([config, *keys, *first]) == 0
        lora = ["run_name=lora", "lora_rank=2", "model_name=hf", "eval_interval=-1"]
        lora += [f"load_parameters_path={folder}/first/exported/2", "enable_tensorboard=False"]
        weights = {name: Walk(roots, ENDS) for name, roots in FIRST_WEIGHTS.items()}
        with followed(weights):
            assert train.main([config, *keys, *lora]) == 0
        chats = {name: Walk(roots) for name, roots in CHATS.items()}
        with followed(chats):
            open_chats(pathlib.Path(folder))
    ways = {}
    for name, walk in (follower.walks | chats | weights).items():
        ways[name] = {"files": walk.files(), "stays": walk.stays(), "returns": walk.returns()}
        if show:
            for thread, way in walk.threads.items():
                print(f"{name}, thread {thread}:")
                print("".join(f"  {file:32}{function}\n" for file, function in way), end="")
    ways["checkpoint"]["clients"] = len(follower.clients)
    ways["row"] = {"lookups": len(follower.lookups)}
    if show:
        print("row and clients:", *follower.lookups, *follower.clients, sep="\n  ")
    return ways


def open_chats(folder: pathlib.Path) -> None:
    """Opens a file of chats, with a tokenizer that has marks for their turns."""
    preference_pairs.write_tokenizer(folder)
    chats = [{"prompt": f"{n}?", "completion": "yes"} for n in range(20)]
    file = preference_pairs.write_pairs(folder / "chats.jsonl", chats)
    keys = ["use_sft=True", f"tokenizer_path={folder}", "grain_packing_type=best_fit"]
    keys += ["dataset_type=grain", f"grain_train_files={file}", "tokenizer_type=huggingface"]
    keys += ["max_target_length=64", "enable_rampup_batch_size=False"]
    config = resolve(load([str(ROOT / "configs" / "base.yml"), *TINY, *keys]), 1, 1, 1)
    opening.open_rows(config.data, True)


def main() -> None:
    """Prints the figures, and writes them where they are asked for."""
    options = parser("ways", __doc__)
    options.add_argument("--functions", action="store_true", help="print every one")
    arguments = options.parse_args()
    ways = figures(arguments.functions)
    for name, numbers in ways.items():
        print(f"{name:12}" + ", ".join(f"{count} {what}" for what, count in numbers.items()))
    save(arguments.json, ways)


if __name__ == "__main__":
    main()
