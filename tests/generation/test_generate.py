"""`python -m maxramp.generate`: the weights of a run, from its folder alone."""

import json
import pathlib

import jax
import numpy as np
import pytest
from conftest import complete, make_config, make_mesh, run

from maxramp import generate, prepare
from maxramp.checkpoints.store import Checkpoints
from maxramp.data.corpus import DataIdentity
from maxramp.errors import ConfigError
from maxramp.files.run_folder import RunFiles
from maxramp.generate import AnswerText
from maxramp.generation.generator import Answer
from maxramp.handover.opening import open_model
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.state import initial_state


def save_run(folder, *keys):
    """The folder of a run of the tiny model that ended where it began."""
    config = make_config("enable_rampup_batch_size=False", "per_device_batch_size=1", *keys)
    (folder / "checkpoints").mkdir(parents=True)
    ramp = RampupBatchManager(config.batch, 8)
    with jax.set_mesh(make_mesh(config)):
        saving = Checkpoints(
            *(folder / "checkpoints", RunFiles(folder), config.checkpoints, DataIdentity("data")),
            *(print, print),
        )
        with saving:
            saving.start_saving()
            record = saving.make_record(0, 0, ramp.to_json()["stages"], config.values)
            saving.save(record, initial_state(config.recipe), last=True)
    return str(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    # Trained on eight devices, with tensors sharded; generation has one.
    keys = ("ici_tensor_parallelism=2", "max_target_length=24", "attention=dot_product")
    return save_run(tmp_path_factory.mktemp("runs") / "tiny", *keys)


def test_answers_as_json_and_as_text(trained, cache_dir):
    """The same tokens; text is written in the order of the prompts, behind them."""
    arguments = (trained, "--prompt", "ab", "--prompt", "hello wor\u00fcld", "--samples", "2")
    arguments += ("--seed", "5", "--max_new_tokens", "9", f"jax_cache_dir={cache_dir}")
    done = run(*arguments, "--json", module="generate")
    assert (done.returncode, done.stderr.count("\n")) == (0, 2) and "tokens in" in done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [a["prompt"] for a in answers] == ["ab"] * 2 + ["hello wor\u00fcld"] * 2
    for answer in answers:
        assert len(answer["tokens"]) == len(answer["log_probs"]) == 9
        assert answer["truncated"] and max(answer["tokens"]) < 258
        text = bytes(t for t in answer["tokens"] if t < 256).decode(errors="replace")
        assert answer["answer"].replace("<s>", "").replace("</s>", "") == text
    assert answers[0]["tokens"] != answers[1]["tokens"]
    done = complete(*arguments, "ici_fsdp_parallelism=2", devices=2, module="generate")
    assert done.stdout == "".join(
        f"--- {i + 1} of 4\n{a['prompt']}{a['answer']}\n" for i, a in enumerate(answers)
    )


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["--temperature", "-1"], "--temperature=-1 must be 0, which is greedy, or 0.001 or more"),
        (["--temperature", "nan"], "--temperature=nan"),
        (["--temperature", "1e-30"], "--temperature=1e-30"),
        (["--top_k", "-1"], "--top_k=-1"),
        (["--top_p", "0"], "--top_p=0 must be above 0 and at most 1"),
        (["--max_new_tokens", "0"], "--max_new_tokens 0 must be 1 or more"),
        (["--seed", "-3"], "--seed -3 must be 0 or more"),
        (["--num_speculative_tokens", "-1"], "--num_speculative_tokens -1 must be 0 to 16; each"),
        (["--num_speculative_tokens", "2"], "has no draft to propose tokens (mtp_num_layers=0); l"),
        (["--stop", ""], "--stop '' would end every answer"),
        (["--prompt_file", "none.jsonl"], "prompt_file=none.jsonl: cannot be read"),
        (["steps=3"], "steps=3 does not change what a run generates"),
        (["tokenizer_path=none.json"], "tokenizer_path=none.json: dataset_type=text trains on byt"),
        (["itci_data=3"], "is not a known key"),
        (["data"], '"data" is not of the form key=value'),
        (["--samples", "many"], "argument --samples: invalid int value: 'many'"),
        (["--max_new", "3"], '"--max_new": no such option'),
    ],
)
def test_wrong_arguments_are_one_line(trained, arguments, error, capsys):
    assert generate.main([trained, "--prompt", "a", *arguments]) == 2
    line = capsys.readouterr().err
    assert error in line and line.count("\n") == 1


@pytest.mark.slow
def test_a_stop_text_ends_answers(trained, cache_dir, tmp_path):
    """Before it, wherever tokens begin; prompts of a file are those of the command line."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "cd"}\n')
    line = [trained, "--seed", "5", "--max_new_tokens", "20", f"jax_cache_dir={cache_dir}"]
    from_file = [*line, "--prompt_file", str(tmp_path / "prompts.jsonl")]
    free = run(*line, "--prompt", "ab", "--prompt", "cd", "--json", module="generate")
    assert free.stdout == run(*from_file, "--json", module="generate").stdout != ""
    free = [json.loads(text) for text in free.stdout.splitlines()]
    stop = free[0]["answer"][7:10]
    done = run(*from_file, "--json", "--stop", stop, "--stop", "nowhere", module="generate")
    answers = [json.loads(text) for text in done.stdout.splitlines()]
    for answer, whole in zip(answers, free, strict=True):
        text, stopped, _ = whole["answer"].partition(stop)
        assert answer["answer"] == text and answer["truncated"] == (not stopped)
        size = len(answer["tokens"])
        assert answer["tokens"] == whole["tokens"][:size] and len(answer["log_probs"]) == size
    assert len(answers[0]["tokens"]) < 20
    done = run(*from_file, "--stop", stop, "--stop", "nowhere", module="generate")
    assert done.stdout == "".join(
        f"--- {i + 1} of 2\n{a['prompt']}{a['answer']}\n" for i, a in enumerate(answers)
    )


def show(shown, data, size):
    """Yields what is printed of an answer that comes in pieces of bytes, and whether it ends."""
    for end in range(size, len(data) + size, size):
        tokens, done = np.frombuffer(data[:end], np.uint8), end >= len(data)
        shown.read(Answer(tokens, np.zeros(len(tokens)), done, done))
        yield shown.new(), done


def decode(ids):
    return bytes(map(int, ids)).decode(errors="replace")


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize(
    "stops, text, tokens",
    [
        ((), "abc END d", 9),
        (("END",), "abc ", 7),
        (("ENDE", "END d"), "abc ", 9),
        (("c", "END"), "ab", 3),
        (("ENDE",), "abc END d", 9),
    ],
)
def test_printed_text_stays_part_of_the_answer(stops, text, tokens, size):
    """What may begin a stop text waits, and the tokens are those up to its last one."""
    shown, printed = AnswerText(decode, np.zeros(0, np.uint8), stops), ""
    for piece, _ in show(shown, b"abc END d", size):
        printed += piece
        assert text.startswith(printed)
    assert printed == text and (shown.tokens, shown.done) == (tokens, True)
    assert shown.stopped == (text != "abc END d")


@pytest.mark.parametrize("size", [1, 2, 5])
def test_characters_come_whole(size):
    """Of bytes that come in pieces; and what is no character at the end shows as such."""
    text = "a\u00fc\u20ac\U0001f600b"
    shown = AnswerText(decode, np.frombuffer("\u00e9x".encode(), np.uint8), ())
    pieces = list(show(shown, text.encode() + b"\xe2\x82", size))
    assert all("\ufffd" not in piece or done for piece, done in pieces)
    assert "".join(piece for piece, _ in pieces) == text + "\ufffd"


def test_special_tokens_follow_the_data_or_the_keys(trained, tmp_path, monkeypatch, capsys):
    """A set's own tokenizer, even if the run names another; both for text. Without the set that of
    the run, or one line."""
    assert open_model(trained, []).tokenizer().ends == [257]
    bare = open_model(trained, ["add_bos=False", "add_eos=False"]).tokenizer()
    assert bare.ends == [] and bare.encode(["a"])[0].tolist() == [97]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "a first text"}\n' * 50)
    arguments = ["texts.jsonl", "--output", "set", "--train_bpe", "260", "add_bos=False"]
    assert prepare.main(arguments) == 0
    (tmp_path / "kept.json").write_bytes((tmp_path / "set" / "tokenizer.json").read_bytes())
    keys = ("dataset_type=grain", "grain_train_files=set", "tokenizer_path=kept.json")
    run_folder = pathlib.Path(save_run(tmp_path / "run", *keys, "eval_interval=-1"))

    def begins(*keys):
        (ids,) = open_model(str(run_folder), keys).tokenizer().encode([""])
        return ids.tolist() == [0]

    own = open_model(save_run(tmp_path / "own", *keys[:2], "eval_interval=-1"), [])
    (ids,) = own.tokenizer().encode(["a text"])
    assert own.tokenizer().tokenizer.decode(ids) == "a text" and own.tokenizer().ends == [1]
    assert not begins() and begins("add_bos=True") and begins("tokenizer_path=kept.json")
    assert "note" not in capsys.readouterr().err
    (tmp_path / "set").rename("elsewhere")
    assert begins() and "tokenizer_path=kept.json add_bos=True" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="grain_train_files: set: no such file"):
        open_model(str(tmp_path / "own"), []).tokenizer()


@pytest.mark.parametrize(
    "kind", [pytest.param("megatron", marks=pytest.mark.slow), "set", "jsonl", "hf"]
)
def test_a_tokenizer_is_never_guessed(kind, tmp_path):
    """If neither the run nor the command names one."""
    path = tmp_path / "ids.jsonl"
    path.write_text('{"text": [1, 2, 3]}\n' * 50)
    keys = ["dataset_type=grain", f"grain_train_files={path}", "tokenize_train_data=False"]
    if kind in ("set", "megatron"):
        assert prepare.main([str(path), "--output", str(tmp_path / "set"), keys[2]]) == 0
        source = tmp_path / "set" / ("shard-00000" if kind == "megatron" else "")
        keys[1:] = [f"grain_train_files={source}"]
    if kind == "hf":
        keys[:2] = ["dataset_type=hf", "hf_path=an-org/a-set"]
    run_folder = pathlib.Path(save_run(tmp_path / "run", *keys, "eval_interval=-1"))
    with pytest.raises(ConfigError, match="holds tokens and has no tokenizer; give tokenizer_path"):
        open_model(str(run_folder), []).tokenizer()
    assert open_model(str(run_folder), ["tokenizer_type=bytes"]).tokenizer().ends == [257]
