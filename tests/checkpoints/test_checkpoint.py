"""Checkpoints: what is in them, on which mesh they can be read, which are kept and refused."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import threading

import jax
import numpy as np
import pytest
import tensorstore
from conftest import BASE, TINY, make_config, make_mesh, refused, run
from orbax.checkpoint import v1 as ocp

from maxramp import checkpoint as command
from maxramp.checkpoints import folder as folder_lib
from maxramp.checkpoints.arrays import compare, load, restore, stored_arrays
from maxramp.checkpoints.changes import changes_since
from maxramp.checkpoints.store import Checkpoints, versions
from maxramp.data.corpus import DataIdentity
from maxramp.errors import ConfigError
from maxramp.files.run_folder import RunFiles
from maxramp.handover.weights import open_weights
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.state import abstract_state, initial_state

# 8 rows to sample 80, then 16, then 24: stages end at steps 10 and 15.
RAMP = ("step_batch_size_schedule=0:8 80:16 160:24", "step_batch_size_unit=samples", "steps=40")


def config_of(*arguments, devices=8):
    return make_config(*RAMP, *arguments, devices=devices)


@functools.cache
def first_state(*arguments):
    """A first state, with a clock that stands where checkpoint 12 of the ramp does."""
    config = config_of(*arguments)
    with jax.set_mesh(make_mesh(config)):
        state = initial_state(config.recipe)
        clock = np.array([RampupBatchManager(config.batch).samples_before(12), 0], np.uint32)
        return dataclasses.replace(state, consumed_samples=jax.numpy.asarray(clock))


class Folder:
    """A folder of checkpoints, and the warnings about it."""

    def __init__(self, path: pathlib.Path, config, corpus_hash="data"):
        self.path, self.config, self.warnings = path, config, []
        path.mkdir(exist_ok=True)
        self.files = RunFiles(path.parent)
        self.checkpoints = Checkpoints(
            *(path, self.files, config.checkpoints, DataIdentity(corpus_hash)),
            *(print, self.warnings.append),
        )
        self.ramp = RampupBatchManager(config.batch, 8)

    def save(self, *steps: int, state=None):
        with jax.set_mesh(make_mesh(self.config)), self.checkpoints:
            self.checkpoints.start_saving()
            for step in steps:
                state = state or first_state()
                self.begin(step, state)
        return self

    def record(self, step: int):
        stages, samples = self.ramp.to_json()["stages"], self.ramp.samples_before(step)
        return self.checkpoints.make_record(step, samples, stages, self.config.values)

    def begin(self, step: int, state, last=False):
        self.checkpoints.save(self.record(step), state, last)

    def latest(self):
        with jax.set_mesh(make_mesh(self.config)):
            return self.checkpoints.latest()

    def restore(self):
        mesh = make_mesh(self.config)
        with jax.set_mesh(mesh):
            saved = self.checkpoints.latest()
            abstract = abstract_state(self.config.recipe, mesh)
            compare(saved, abstract, self.config.values)
            return saved, restore(saved, abstract), abstract

    @property
    def steps(self):
        return folder_lib.steps_in(self.path)


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory):
    """Checkpoints 8 and 12."""
    return Folder(tmp_path_factory.mktemp("runs") / "checkpoints", config_of()).save(8, 12)


@pytest.fixture
def copied(saved_folder, tmp_path):
    """A copy of them, to be damaged."""
    shutil.copytree(saved_folder.path, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


MESHES = {
    "one device": (1, []),
    "fsdp": (8, []),
    "tensor": (8, ["ici_tensor_parallelism=8"]),
    "all axes": (8, ["ici_tensor_parallelism=2", "ici_data_parallelism=2"]),
    "four devices": (4, ["ici_tensor_parallelism=2"]),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_read_on_another_mesh_it_is_the_same_bits(saved_folder, mesh):
    devices, keys = MESHES[mesh]
    folder = Folder(saved_folder.path, config_of(*keys, "micro_batch_size=1", devices=devices))
    saved, state, abstract = folder.restore()
    assert (saved.step, saved.consumed_samples) == (12, 80 + 2 * 16)
    assert equal(state, first_state())
    wanted = [x.sharding for x in jax.tree.leaves(abstract)]
    assert [x.sharding for x in jax.tree.leaves(state)] == wanted
    assert not folder.warnings


FOUR = "base_num_decoder_layers=4"
STAGES = {
    "four stages": ["ici_pipeline_parallelism=4"],
    "circular": ["ici_pipeline_parallelism=2", "num_pipeline_repeats=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
def test_layers_are_stored_in_their_own_order(tmp_path, stages):
    """What was saved without a pipeline goes on in stages and the other way, to the same bits."""
    state = first_state(FOUR)
    with jax.set_mesh(make_mesh(config_of(FOUR))):  # moments that differ from layer to layer
        moments = jax.tree.map(
            lambda m: m + jax.numpy.arange(m.size).reshape(m.shape), state.opt_state
        )
        state = dataclasses.replace(state, opt_state=moments)
    Folder(tmp_path / "plain", config_of(FOUR)).save(12, state=state)
    staged = config_of(FOUR, *STAGES[stages])
    _, restored, abstract = Folder(tmp_path / "plain", staged).restore()
    assert [x.sharding for x in jax.tree.leaves(restored)] == [
        x.sharding for x in jax.tree.leaves(abstract)
    ]
    Folder(tmp_path / "staged", staged).save(12, state=restored)
    _, back, _ = Folder(tmp_path / "staged", config_of(FOUR)).restore()
    assert equal(back, state)
    for mine, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(mine).reshape(theirs.shape), theirs)


def test_what_stands_beside_the_arrays(saved_folder):
    saved = folder_lib.read(saved_folder.path / "12")
    assert saved.config == json.loads(json.dumps(dict(saved_folder.config.values)))
    assert saved.stages == [stage.to_json() for stage in saved_folder.ramp.stages]
    assert saved.stage()["global_batch_size"] == 16 and saved.corpus_hash == "data"
    assert saved.versions["jax"] == jax.__version__


def test_reading_one_layer_reads_no_other(tmp_path):
    """As TensorStore counts the bytes that it reads; on a mesh that splits a layer, too."""
    keys = ("base_num_decoder_layers=8", "base_mlp_dim=512", "ici_tensor_parallelism=2")
    state = first_state(*keys)
    folder = Folder(tmp_path / "c", config_of(*keys)).save(12, state=state)

    def bytes_read() -> int:
        name = "/tensorstore/kvstore/file/bytes_read"
        return tensorstore.experimental_collect_matching_metrics(name)[0]["values"][0]["value"]

    base = {"driver": "ocdbt", "base": f"file://{folder.path}/12/model/"}
    keys = tensorstore.KvStore.open(base).result().list().result()
    (key,) = [key for key in keys if key.endswith(b"mlp.up_DF.value/zarr.json")]
    where = base | {"path": key.decode().removesuffix("zarr.json")}
    weights_LDF = tensorstore.open({"driver": "zarr3", "kvstore": where}, open=True).result()
    costs = []
    for _ in range(5):  # which reads of neighbours in a file are put together is a race
        before = bytes_read()
        layer_DF = weights_LDF[1].read().result()
        costs.append(bytes_read() - before)
    expected_LDF = np.asarray(state.model.layers["dense"].mlp.up_DF[...])
    np.testing.assert_array_equal(layer_DF, expected_LDF[1])
    assert weights_LDF.chunk_layout.read_chunk.shape[0] == 1
    assert 0 < min(costs) < 4 * layer_DF.nbytes  # of 8


def test_the_weights_alone(saved_folder):
    """For a run with another optimizer; a run's folder or a checkpoint says where."""
    config = config_of("opt_type=sgd")
    abstract = abstract_state(config.recipe, make_mesh(config))
    for path in (saved_folder.path, saved_folder.path / "12"):
        model = open_weights(str(path)).prepare(abstract.model, config.values)()
        assert equal(model, first_state().model)


@pytest.mark.parametrize(
    "keys, expected",
    [
        ("=7", [7, 10, 14, 15, 21, 28, 35]),
        ("=7 checkpoint_stage_ends=False", [7, 14, 21, 28, 35]),
        # Samples 100, 200, ... are passed by the steps that reach 112, 208, 304, 400, 520, 616, 712
        (
            "=-1 checkpoint_period_samples=100 checkpoint_stage_ends=False",
            [12, 17, 21, 25, 30, 34, 38],
        ),
        ("=-1", [10, 15]),
        ("=-1 checkpoint_period_minutes=1e-9", list(range(1, 40))),
        ("=7 enable_checkpointing=False", []),
    ],
)
def test_when_it_is_due(tmp_path, keys, expected):
    folder = Folder(tmp_path / "c", config_of(*f"checkpoint_period{keys}".split()))
    folder.checkpoints.start_saving()
    assert [s for s in range(1, 40) if folder.checkpoints.is_due(s, folder.ramp)] == expected


@pytest.mark.parametrize(
    "keys, expected",
    [
        ([], [2, 4, 6, 8, 10, 12]),
        (["max_num_checkpoints_to_keep=2"], [10, 12]),
        (["max_num_checkpoints_to_keep=1", "checkpoint_keep_period=5"], [6, 10, 12]),
        (["max_num_checkpoints_to_keep=2", "checkpoint_keep_period=4"], [4, 8, 10, 12]),
    ],
)
def test_how_long_it_stays(tmp_path, keys, expected):
    folder = Folder(tmp_path / "c", config_of(*keys)).save(2, 4, 6, 8, 10, 12)
    assert folder.steps == expected and not folder.warnings
    assert sorted(int(p.name) for p in folder.path.iterdir()) == expected, "nothing else is left"


def test_only_its_own_are_read_and_removed(copied, capsys):
    """What has a number for a name and no checkpoint.json is somebody's."""
    (copied / "1").mkdir()
    (copied / "1" / "notes.txt").write_text("notes")
    ocp.save_checkpointables(copied / "2", {"state": {"w": np.zeros(3)}})
    assert command.main(["ls", str(copied)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    states = ["complete", "complete", "1: no checkpoint.json", "2: no checkpoint.json"]
    assert all(state in line for state, line in zip(states, lines, strict=True)), lines
    Folder(copied, config_of("max_num_checkpoints_to_keep=1")).save(14)
    assert sorted(p.name for p in copied.iterdir()) == ["1", "14", "2"]


def test_what_a_kill_left_is_removed(copied):
    (copied / "14" / "model").mkdir(parents=True)
    (copied / "8" / folder_lib.FILE).unlink()  # as a removal begins
    mine = ["notes", "012", "\N{SUPERSCRIPT TWO}", "13"]
    for name in mine[:-1]:
        (copied / name).mkdir()
    (copied / mine[-1]).write_text("a file")
    folder = Folder(copied, config_of())
    assert folder.restore()[0].step == 12
    assert len(list(copied.iterdir())) == 7 and not folder.warnings, "not before a start is certain"
    folder.checkpoints.start_saving()
    assert {p.name for p in copied.iterdir()} == {"12", *mine}


def test_a_save_prints_one_line_when_it_counts(tmp_path, capsys):
    """Saves that follow within seconds print none, the last of a job always does."""
    folder = Folder(tmp_path / "checkpoints", config_of()).save(4, 6, 8)
    first = capsys.readouterr().out.splitlines()
    with jax.set_mesh(make_mesh(folder.config)):
        folder.begin(10, first_state(), last=True)
    lines = first + capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["save", "checkpoint", n] for n in ("4", "10")]
    assert folder.checkpoints.newest == 10


def test_minutes_count_from_the_end_of_a_save(tmp_path):
    """However long the files take: no save is due while one is written."""
    folder = Folder(tmp_path / "c", config := config_of("checkpoint_period_minutes=1e-9"))
    go_on = threading.Event()
    with jax.set_mesh(make_mesh(config)), folder.checkpoints as checkpoints:
        checkpoints.start_saving()
        assert checkpoints.is_due(4, folder.ramp)
        folder.files.publish = lambda: go_on.wait(60)
        folder.begin(4, first_state())
        assert not checkpoints.is_due(5, folder.ramp)
        go_on.set()
        folder.begin(4, first_state(), last=True)  # waits
        assert checkpoints.is_due(5, folder.ramp) and folder.steps == [4]


def largest(path: pathlib.Path) -> pathlib.Path:
    return max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "arrays truncated": lambda path: truncate(largest(path / "model")),
    "arrays emptied": lambda path: largest(path / "optimizer").write_bytes(b""),
    "arrays deleted": lambda path: largest(path / "model").unlink(),
    "index deleted": lambda path: (path / "model" / "manifest.ocdbt").unlink(),
    "a part deleted": lambda path: shutil.rmtree(path / "optimizer"),
    "Orbax's metadata truncated": lambda path: truncate(path / "_CHECKPOINT_METADATA"),
    "Orbax's metadata deleted": lambda path: (path / "_CHECKPOINT_METADATA").unlink(),
    "metadata truncated": lambda path: truncate(path / folder_lib.FILE),
    "metadata emptied": lambda path: (path / folder_lib.FILE).write_text(""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_checkpoint_is_passed_over(copied, damage, capsys):
    """The one before takes its place, one line says so, and nothing is thrown away."""
    DAMAGE[damage](copied / "12")
    folder = Folder(copied, config_of())
    # The clock of both states stands at 12's samples: only where to go on from is asked.
    assert folder.latest().step == 8
    assert len(folder.warnings) == 1 and len(folder.warnings[0].splitlines()) == 1
    assert str(copied / "12") in folder.warnings[0] and folder.warnings[0].endswith("before it, 8")
    assert command.main(["ls", str(copied)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed if "torn" in line] == ["12"]
    assert [line.split()[0] for line in listed if "complete" in line] == ["8"]
    assert command.main(["verify", str(copied)]) == 1
    (copied / f"12{folder_lib.TORN}").mkdir()  # what was moved aside before stays
    folder.checkpoints.start_saving()
    assert sorted(p.name for p in copied.iterdir()) == ["12-2.torn", "12.torn", "8"]


@pytest.mark.parametrize("kept", ["model", "model optimizer", "all"])
def test_a_kill_in_a_save_stops_no_restart(copied, kept):
    """At any moment, also after Orbax was done and where there is no checkpoint before it."""
    shutil.rmtree(copied / "8")
    (copied / "12" / folder_lib.FILE).unlink()
    for path in (copied / "12").iterdir():
        if kept != "all" and path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder = Folder(copied, config_of())
    assert folder.latest() is None
    assert folder.checkpoints.start_saving() == [copied / "12"]
    assert not list(copied.iterdir()) and not folder.warnings


def test_arrays_that_were_moved_and_linked(copied, tmp_path):
    """To a disk with more room, where a link leads to the run: from there, too, it is whole."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    copied.rename(run / "checkpoints")
    (run / "checkpoints" / "12" / "model").rename(disk)
    (run / "checkpoints" / "12" / "model").symlink_to(disk)
    (disk / "run").symlink_to(run)
    assert folder_lib.read(folder_lib.find(disk / "run")).step == 12


def test_a_checkpoint_under_another_number(copied, capsys):
    """It would stand before those that are saved next, and they would be removed as older."""
    shutil.copytree(copied / "12", copied / "20")
    folder = Folder(copied, config_of())
    assert folder.latest().path.name == "12"
    (warning,) = folder.warnings
    assert "it is checkpoint 12, under another number" in warning
    assert command.main(["verify", str(copied / "20")]) == 1


def test_another_version(copied):
    values = json.loads((copied / "12" / folder_lib.FILE).read_text())
    (copied / "12" / folder_lib.FILE).write_text(json.dumps(values | {"format": 2}))
    with pytest.raises(ConfigError, match="12: not a checkpoint of this version of maxramp"):
        Folder(copied, config_of()).checkpoints.latest()


def test_a_checkpoint_that_may_not_be_read_is_not_torn(copied, monkeypatch):
    """It counts as one, and is refused, not put aside."""
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    monkeypatch.chdir(copied)  # for another user, the folders above are closed
    pathlib.Path("12", folder_lib.FILE).chmod(0o600)
    pathlib.Path("8").chmod(0o700)
    copied.chmod(0o755)
    os.seteuid(65534)
    try:
        assert folder_lib.steps_in(pathlib.Path()) == [8, 12]
        with pytest.raises(ConfigError, match="12/checkpoint.json: Permission denied; give"):
            folder_lib.read(pathlib.Path("12"))
    finally:
        os.seteuid(0)


def test_with_no_whole_checkpoint_nothing_starts_anew(copied):
    for step in ("8", "12"):
        truncate(largest(copied / step))
    before = sorted(copied.rglob("*"))
    folder = Folder(copied, config_of())
    with pytest.raises(ConfigError, match="12 is torn .* no checkpoint before it is whole"):
        folder.checkpoints.latest()
    assert sorted(copied.rglob("*")) == before


def test_damage_that_keeps_the_sizes(copied, capsys):
    """Only reading the values finds it: a restore and `verify` do, in one line each."""
    path = largest(copied / "12" / "model")
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ConfigError, match="^.*12: cannot be read: .*, or move it away"):
        Folder(copied, config_of()).restore()
    assert command.main(["verify", str(copied / "12")]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_too_little_memory_is_no_damage(saved_folder, monkeypatch):
    """Nobody shall move a checkpoint away because a device was too small for it."""
    path = folder_lib.find(saved_folder.path)
    monkeypatch.setattr(ocp, "load_checkpointables", lambda *arguments: np.ones(2**50))
    with pytest.raises(MemoryError):
        load(path, {})
    with pytest.raises(MemoryError):
        list(stored_arrays(path))


@pytest.mark.parametrize(
    "keys, names",
    [
        (["base_mlp_dim=128"], ["mlp", "[2, 32, 64]", "base_mlp_dim=128 (there 64)"]),
        (["base_num_decoder_layers=4"], ["[2, ", "[4, ", "base_num_decoder_layers=4 (there 2)"]),
        (["vocab_size=272"], ["264", "vocab_size=272"]),
        (["mu_dtype=bfloat16"], ["mu", "float32", "mu_dtype=bfloat16"]),
        (["opt_type=sgd"], ["opt_state", "missing", "opt_type=sgd"]),
        (["opt_type=optax.lion"], ["opt_state", "missing", "opt_type=optax.lion"]),
        (["logits_via_embedding=True"], ["missing", "logits_via_embedding=True"]),
    ],
)
def test_other_arrays_are_refused(saved_folder, keys, names):
    folder = Folder(saved_folder.path, config_of(*keys))
    with refused(*names):
        folder.restore()


@pytest.mark.parametrize(
    "key, value",
    {
        **{"data_shuffle_seed": 1, "init_weights_seed": 1, "max_target_length": 8},
        **{"enable_data_shuffling": False, "eval_fraction": 0.1, "dataset_type": "synthetic"},
    }.items(),
)
def test_changes_of_history_are_refused(saved_folder, key, value):
    saved = folder_lib.read(saved_folder.path / "12")
    before, values = saved_folder.config.values[key], config_of(f"{key}={value}").values
    with pytest.raises(ConfigError, match=rf"{key}={before} \(now {value}\).*allow_changed="):
        changes_since(saved, values, [], DataIdentity("data"), versions())
    changes = changes_since(saved, values, [key], DataIdentity("data"), versions())
    assert changes == f"{key}={before} (now {value})"


def test_another_corpus_is_refused(saved_folder):
    saved = folder_lib.read(saved_folder.path / "12")
    with pytest.raises(ConfigError, match=r"corpus=data \(now other\).*allow_changed=\[corpus\]"):
        changes_since(saved, saved_folder.config.values, [], DataIdentity("other"), versions())
    parts = [["web", 0.7, "ab"], ["code", 0.3, "cd"], ["held out", 1.0, ""]]
    saved = dataclasses.replace(saved, parts=parts)
    now = [["moved/web", 0.7, "ab"], ["code", 0.3, "ef"], ["held out", 1.0, ""], ["more", 1.0, ""]]
    changed = "corpus=code weight 0.3 (hash cd) (now code weight 0.3 (hash ef), more)"
    today = saved_folder.config.values, ["corpus"], DataIdentity("other", now), versions()
    assert changes_since(saved, *today) == changed
    seen, moved = ([[4, [[path, 1.0, "ab"]]]] for path in ("web", "moved/web"))
    saved = dataclasses.replace(saved, parts=[], mixtures=seen)
    data = DataIdentity("data", mixtures=moved)
    assert not changes_since(saved, saved_folder.config.values, [], data, versions())


def test_other_changes_are_listed(saved_folder):
    saved = folder_lib.read(saved_folder.path / "12")
    data, values = DataIdentity("data"), saved_folder.config.values
    assert not changes_since(saved, values, [], data, versions())
    values = config_of("learning_rate=2e-2", "eval_interval=7").values
    data = dataclasses.replace(data, evaluations={"eval": "cd"})
    saved = dataclasses.replace(saved, evaluations={"eval": "ab"})
    assert changes_since(saved, values, [], data, versions() | {"jax": "99.0"}) == (
        "eval_interval=80 (now 7), learning_rate=0.01 (now 0.02), eval hash=ab (now cd), "
        f"jax={jax.__version__} (now 99.0)"
    )


def test_show_and_verify(saved_folder, capsys):
    assert command.main(["show", str(saved_folder.path)]) == 0
    shown = capsys.readouterr().out
    assert "12 steps, 112 samples, 1,792 tokens" in shown and "base_emb_dim=32" in shown
    assert "stage     1 (of 0 to 2)" in shown
    assert command.main(["verify", str(saved_folder.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    leaves = jax.tree.leaves(first_state())
    size = sum(x.size for x in leaves)
    assert [f"complete, {size:,} values" in line for line in lines] == [True, True]
    arrays = list(stored_arrays(saved_folder.path / "12"))
    assert sorted(a.nbytes for a in arrays) == sorted(x.nbytes for x in leaves)


def test_a_run_with_a_number_for_a_name(saved_folder, tmp_path, capsys):
    run_folder = tmp_path / "2024"
    (run_folder / "checkpoints").mkdir(parents=True)
    assert command.main(["ls", str(run_folder)]) == 2
    assert "2024: no checkpoint there" in capsys.readouterr().err
    (run_folder / "checkpoints").rmdir()
    (run_folder / "checkpoints").symlink_to(saved_folder.path)
    for path in (run_folder, run_folder / "checkpoints", run_folder / "checkpoints" / "12"):
        assert folder_lib.find(path).name == "12"
        assert command.main(["ls", str(path)]) == command.main(["verify", str(path)]) == 0
    assert "torn" not in capsys.readouterr().out
    (tmp_path / "100").symlink_to(saved_folder.path)  # a folder of checkpoints, too
    assert folder_lib.find(tmp_path / "100") == tmp_path / "100" / "12"


@pytest.mark.slow
def test_the_state_of_a_finished_run_leaves_nothing_to_do(tmp_path, cache_dir):
    """Also nothing to export: no state is the new run's own."""
    keys = [*TINY, "steps=1", "global_batch_size=8", "export_huggingface=True"]
    keys += [f"jax_cache_dir={cache_dir}", f"base_output_directory={tmp_path}"]
    keys += ["enable_rampup_batch_size=False", "eval_interval=-1", "micro_batch_size=8"]
    for name, *more in (["a"], ["b", f"load_full_state_path={tmp_path / 'a'}"]):
        done = run(BASE, *keys, f"run_name={name}", *more)
        assert done.returncode == 0 and "error" not in done.stderr, done.stderr
    finished = "finished, 1 steps are done of 1 (steps=1); "
    assert f"{tmp_path}/a/checkpoints/1: {finished}there is" in done.stdout
    (tmp_path / "a" / "ramp.png").unlink()  # as where a run is killed before it
    done = run(BASE, *keys, "run_name=a")
    assert done.returncode == 0 and f"{finished}for a new run" in done.stdout
    assert (tmp_path / "a" / "ramp.png").exists()
    assert (tmp_path / "a/exported/1").is_dir() and not (tmp_path / "b/exported").exists()
