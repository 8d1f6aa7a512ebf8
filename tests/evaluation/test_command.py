"""The command line of maxramp.evaluate."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
from conftest import complete
from made_tasks import write_model, write_tasks

from maxramp import evaluate
from maxramp.data import tokenizers
from maxramp.errors import ConfigError
from maxramp.evaluation.server import DryRun
from maxramp.handover.opening import PromptTokenizer

NO_HARNESS = importlib.util.find_spec("lm_eval") is None


def dry_model(server):
    from maxramp.evaluation.harness import Model

    return Model(server, PromptTokenizer(tokenizers.Tokenizer("bytes", "", False, False, True)))


@pytest.mark.skipif(NO_HARNESS, reason="no lm-eval")
def test_a_folders_task_is_scored_by_its_answers(tmp_path, cache_dir, offline, monkeypatch):
    monkeypatch.setenv("HOME", str(write_tasks(tmp_path / "tasks").parent))
    model = write_model(tmp_path / "model")
    line = ("--tasks", "made_choices", "--include_path", "~/tasks", "--limit=3", "--num_fewshot=0")
    output = tmp_path / "new" / "found.json"
    assert evaluate.main([str(model), *line, "--log_samples"]) == 2  # of no run, so nowhere
    line += ("--output_path", str(output), "--log_samples", f"jax_cache_dir={cache_dir}")
    done = complete(str(model), *line, module="evaluate")
    assert f"{model}: limit: 3, num_fewshot: 0, " in done.stdout
    assert "|made_choices|" in done.stdout
    reading, *progress, last = done.stderr.splitlines()
    assert reading == f"loading the weights of {model}"
    assert last.startswith("made_choices: ")
    assert all(text.startswith(("ready", "tasks")) for text in progress)  # on a slow machine
    report = json.loads(output.read_text())
    answers = report["samples"]["made_choices"]
    best = [max(x["resps"], key=lambda resp: resp[0][0]) == x["resps"][0] for x in answers]
    assert len(best) == 3 and report["results"]["made_choices"]["acc,none"] == sum(best) / 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--limit", "2.5"), "--limit 2.5 must be a whole number"),
        (("--limit", "inf"), "--limit inf must be"),
        (("--num_fewshot", "-1"), "--num_fewshot -1 must be 0 or more"),
        (("--gen_kwargs", "a"), "a is not NAME=VALUE"),
        (("--gen_kwargs", "until=[a"), "until=[a cannot be read"),
        (("--gen_kwargs", 'until=["a,,b", [c]],top_k=3,x'), "top_k=3,x: x is not NAME=VALUE"),
        (("--tasks", ","), "--tasks names none"),
    ],
)
def test_a_wrong_option_is_one_line(options, expected, capsys):
    assert evaluate.main(["model", "--tasks", "one", *options]) == 2
    line = capsys.readouterr().err
    assert expected in line and line.count("\n") == 1


@pytest.mark.skipif(NO_HARNESS, reason="no lm-eval")
@pytest.mark.parametrize(
    ("continuation", "says"),
    [
        ("", "a task scores a continuation of 0 tokens; mend the task ("),
        (
            "12345",
            "a task scores a continuation of 5 tokens, not 1 to max_target_length=4; raise that, "
            "or mend the task (",
        ),
    ],
)
def test_a_continuation_of_no_length_that_can_be_scored_names_what_to_change(continuation, says):
    model = dry_model(DryRun(4, lambda: None))
    with pytest.raises(ConfigError) as caught:
        model.loglikelihood([SimpleNamespace(args=("context", continuation))])
    assert str(caught.value).startswith(says)


@pytest.mark.skipif(NO_HARNESS, reason="no lm-eval")
def test_a_context_of_spaces_is_scored_behind_the_prefix_token():
    """As an empty one: lm-eval moves its spaces to the continuation."""
    server = DryRun(8, lambda: None)
    model = dry_model(server)
    model.loglikelihood([SimpleNamespace(args=(" ", "abc")), SimpleNamespace(args=("", " abc"))])
    assert server.requests == [["score", [4, 4]]]


@pytest.mark.slow
@pytest.mark.skipif(NO_HARNESS, reason="no lm-eval")
def test_errors_of_lm_eval_are_one_line(tmp_path, capsys, offline):
    tasks, model = write_tasks(tmp_path / "tasks"), write_model(tmp_path / "model")
    good = (tasks / "made_choices.yaml").read_text()
    for name, text in (
        ("broken", "task: broken\n  - x: [\n"),
        ("unknown", good.replace("made_choices", "unknown") + "frobnicate: 3\n"),
        ("lost", good.replace("made_choices", "lost").replace("lines.jsonl", "none.jsonl")),
        ("undefined", good.replace("made_choices", "undefined").replace("{{choices}}", "{{no}}")),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.yaml").write_text(text)
    (tmp_path / "special").symlink_to("/dev/full")
    written = ("made_writing", tasks, "--gen_kwargs")
    for task, folder, *more, expected in (
        ("broken", tmp_path / "broken", "no task can be read: mapping values are not allowed"),
        ("unknown", tmp_path / "unknown", "unexpected keyword argument 'frobnicate'"),
        ("lost", tmp_path / "lost", "Unable to find"),
        ("undefined", tmp_path / "undefined", "'no' is undefined"),
        ("one", tmp_path / "nowhere", "is not a folder of tasks"),
        ("made_choices", tasks, "--output_path", str(tmp_path), "exists and is not a file"),
        ("made_choices", tasks, "--output_path", str(tmp_path / "special"), "is not a file"),
        ("made_choices", tasks, "--output_path", f"{model}/config.json/x", "cannot be written"),
        ("made_choices", tasks, "--num_fewshot", "100", "the tasks made_choices: Sample larger"),
        (*written, "max_gen_toks=0", "max_gen_toks=0: of a task or --gen_kwargs, must be a whole"),
        (*written, "max_gen_toks=2.5", "must be a whole number, 1 or more"),
        (*written, "max_gen_toks=9999", "leaves no room for a prompt"),
        (*written, "temperature=-1", "temperature=-1: of a task or --gen_kwargs"),
        (*written, "do_sample=maybe", "must be true or false"),
        (*written, "until=[3,4]", "until=[3, 4]: of a task or --gen_kwargs"),
        (*written, "nosuch=3", "nosuch=3: a task or --gen_kwargs sets how the model writes"),
    ):
        options = ("--tasks", task, "--include_path", str(folder), "--limit", "2")
        assert evaluate.main([str(model), *options, *more]) == 2, expected
        line = capsys.readouterr().err.rpartition("\r")[2]  # behind what datasets draws
        line = line[line.index("error: ") :]
        assert expected in line and line.count("\n") == 1, line
