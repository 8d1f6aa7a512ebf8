"""--inspect: rows of a set as the model sees them."""

import pathlib
import shlex

from conftest import make_config, open_sources
from rich.console import Console

from maxramp import prepare as prepare_lib
from maxramp.data import inspection

LINES = '{"text": "one"}\n{"text": "second text"}\n{"text": "3"}\n'


def prepared(tmp_path) -> str:
    (tmp_path / "in.jsonl").write_text(LINES)
    options = [str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "set"), "add_bos=False"]
    assert prepare_lib.main(options) == 0
    return str(tmp_path / "set")


def test_rows_are_shown_as_the_model_sees_them(tmp_path, capsys):
    """Of 18 tokens: "one" and its mark, "second text" and its, "3" and its; rows of 8."""
    folder = prepared(tmp_path)
    capsys.readouterr()
    assert prepare_lib.main(["--inspect", folder, "max_target_length=8"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    rows = lines[lines.index("rows 2 of max_target_length=8, documents apart") + 1 :]
    assert rows == [
        "row 0, 2 documents",
        "tokens 0 to 3, positions 0 to 3, 3 targets: 'one</s>' |",
        "tokens 4 to 7, positions 0 to 3, 4 targets: 'seco'",
        "row 1, 1 document",
        "tokens 0 to 7, positions 0 to 7, 7 targets: 'nd text</s>' |",
    ]
    options = ["--inspect", folder, "max_target_length=8", "separate_documents=False"]
    assert prepare_lib.main(options) == 0
    out = capsys.readouterr().out
    assert "each one text" in out and " | " not in out and "8 targets: 'one</s>seco'" in out
    assert "\x1b" not in out
    assert prepare_lib.main(["--inspect", folder, "add_bos=True"]) == 2
    assert "inspecting takes only max_target_length" in capsys.readouterr().err


def test_colours_where_a_terminal_has_them(tmp_path, monkeypatch, capsys):
    folder, errors = prepared(tmp_path), []
    for colours in (None, "standard"):
        console = Console(highlight=False, force_terminal=True, color_system=colours)
        monkeypatch.setattr(inspection, "Console", lambda console=console, **_: console)
        capsys.readouterr()
        assert prepare_lib.main(["--inspect", folder, "max_target_length=8"]) == 0
        errors.append(capsys.readouterr().out)
    assert "\x1b[36m'one</s>'" in errors[1] and "\x1b" not in errors[0]


def test_a_set_shorter_than_a_row_is_shown_without_rows(tmp_path, capsys):
    folder = prepared(tmp_path)
    assert prepare_lib.main(["--inspect", folder]) == 0
    assert "rows" not in capsys.readouterr().out


def test_a_name_may_have_any_character(tmp_path, capsys):
    """But the one that ends an entry of grain_train_files."""
    folder = pathlib.Path(prepared(tmp_path))
    for name in ("a,b", "set[1]", "c*,[?"):
        folder = folder.rename(tmp_path / name)
        assert prepare_lib.main(["--inspect", str(folder), "max_target_length=8"]) == 0
        assert "rows       2 of" in capsys.readouterr().out
        options = [str(tmp_path / "in.jsonl"), "--output", str(folder), "add_bos=False"]
        assert prepare_lib.main(options) == 0
        *_, line = capsys.readouterr().out.splitlines()
        (key,) = (word for word in shlex.split(line) if word.startswith("grain_train_files="))
        keys = ("dataset_type=grain", key, "max_target_length=8", "eval_interval=-1")
        assert len(open_sources(make_config(*keys).data).train[0].items) == 2
    assert prepare_lib.main(["in.jsonl", "--output", "a;b"]) == 2
    assert "--output a;b: a ; ends an entry of grain_train_files" in capsys.readouterr().err
