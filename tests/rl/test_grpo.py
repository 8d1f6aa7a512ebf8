"""`python -m maxramp.grpo`: the weights it begins with, its restarts, and what it refuses."""

import json
import shutil
import signal
import subprocess
import time
import types

import pytest
from conftest import ROOT, TINY, command, complete, environment, table
from preference_pairs import write_tokenizer

from maxramp import grpo
from maxramp.checkpoints.folder import Checkpoint, commit
from maxramp.config.load import load
from maxramp.data import tokenizers
from maxramp.errors import EXIT_PREEMPTED, ConfigError
from maxramp.handover.opening import PromptTokenizer
from maxramp.handover.weights import pin_first_weights
from maxramp.rl.prompts import FilePrompts, Sums, check_enough, open_prompts
from maxramp.run.metrics import read_records
from maxramp.stage import ROPE_KEYS

RL = str(ROOT / "configs" / "post_train" / "rl.yml")
SUMS = str(ROOT / "configs" / "pre_train" / "sums.yml")
JOB = (
    *TINY,
    *("base_num_decoder_layers=1", "rewards=[maxramp.rl.tasks:brevity]"),
    *("rampup_batch_size=[2,2,8]", "global_batch_size=4", "micro_batch_size=2", "steps=14"),
    *("num_generations=4", "max_completion_length=6", "checkpoint_period=5", "grpo_beta=0.1"),
    *("opt_type=optax.lion", "opt_arguments={weight_decay: 0.01}"),
)


def job(folder, name, *keys):
    weights = f"load_parameters_path={folder / 'sums'}"
    return (RL, *JOB, f"base_output_directory={folder}", f"run_name={name}", weights, *keys)


def what_happened(folder, name):
    """The records of every step, without what the clock measured and where a start began."""
    records = read_records(folder / name / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(14))
    own = "second", "restarted", "time", "goodput"
    return [{k: v for k, v in r.items() if not any(x in k for x in own)} for r in records]


@pytest.mark.slow
def test_stopped_and_killed_it_is_the_same_run(tmp_path, cache_dir):
    """To the last bit of prompts, answers and losses; and it stays near to the same weights."""
    keys = (f"jax_cache_dir={cache_dir}",)
    sums = (SUMS, *TINY, "base_num_decoder_layers=1", f"base_output_directory={tmp_path}")
    complete(*sums, "steps=2", *keys)
    done = complete(*job(tmp_path, "whole", *keys), module="grpo")
    assert "reward -" in done.stdout and (tmp_path / "whole" / "ramp.png").exists()
    records = tmp_path / "stopped" / "metrics.jsonl"
    for number, step in ((signal.SIGTERM, 3), (signal.SIGKILL, 9)):
        process = subprocess.Popen(
            command(*job(tmp_path, "stopped", *keys), module="grpo"),
            env=environment(),
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None and len(read_records(records)) < step:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) == (EXIT_PREEMPTED if number == signal.SIGTERM else -number)
    assert len(read_records(records)) < 14
    complete(*job(tmp_path, "stopped", *keys), module="grpo")
    assert what_happened(tmp_path, "stopped") == what_happened(tmp_path, "whole")


def refused(capsys, *arguments):
    assert grpo.main([RL, *arguments], types.SimpleNamespace()) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("error: ")
    return line


KEYS = table("""
num_generations=1 | num_generations=1 must be 2 or more: an answer's advantage
load_parameters_path= | load_parameters_path is empty
load_parameters_path=nowhere | nowhere: no checkpoint there
rewards=[exact_match] | must be functions, each once as module:function
rewards=[a:b,a:b] | each once as module:function
rewards=[] | rewards=[] must be functions
reward_weights=[1,2] | reward_weights=[1, 2] has 2 numbers for 1 rewards
reward_weights=[a] | reward_weights=['a'] must be finite numbers
reward_weights=[.nan] | reward_weights=[nan] must be finite numbers
reward_timeout_seconds=3000000 | must be above 0 and at most 2e6
reward_timeout_seconds=60 hang_timeout_seconds=60 | must be below hang_timeout_seconds=60
log_gradient_noise_scale=True | log_gradient_noise_scale=True: steps of reinforcem
rampup_policy=noise rampup_ladder=[4,8] total_samples=900 | rampup_policy=noise: steps of reinforc
max_completion_length=16 | max_completion_length=16 leaves no room for a prompt
rl.loss_algo=gspo-token | rl.loss_algo=gspo-token
decode_sampling_top_k=50 | decode_sampling_top_k=50
""")


@pytest.mark.parametrize("keys, says", KEYS)
def test_an_error_is_one_line(capsys, keys, says):
    assert says in refused(capsys, *keys.split())


def test_more_prompts_than_the_passes_have_are_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1="}\n' * 3)
    keys = load([RL, f"prompt_file={tmp_path / 'p.jsonl'}", "num_epoch=3"]).rollout
    prompts = FilePrompts(keys.prompt_file, 0)
    check_enough(prompts, keys, 9)
    says = "takes 10 prompts, .* 3 x num_epoch=3 = 9; use num_epoch=4"
    with pytest.raises(ConfigError, match=says):
        check_enough(prompts, keys, 10)


def test_evaluations_compare_by_prompts_and_rewards(tmp_path, monkeypatch):
    """The held-out prompts belong to the data, of which a restart is refused that has others; the
    rewards, with their source, to what a number of an evaluation is of."""
    monkeypatch.chdir(tmp_path)

    def hashes(*keys, text="", source="def f(p, a, t): return [0.0] * len(a)", trained=10):
        (tmp_path / "held_out.jsonl").write_text('{"prompt": "1+1="}\n' + text)
        (tmp_path / "own_rewards.py").write_text(source)
        config = load([RL, "rewards=[own_rewards:f]", "load_parameters_path=x", *keys], "grpo")
        prompts = {"prompt_file": Sums(trained, 0)}
        prompts["eval_prompt_file"] = FilePrompts("held_out.jsonl", None)
        corpus = grpo._corpus(prompts)
        return corpus.hash, grpo._evaluation(config, corpus)

    first = hashes()
    assert hashes() == first
    other = hashes(text='{"prompt": "1+2="}\n')
    assert other[0] != first[0] and other[1] != first[1]
    rewarded = hashes(source="def f(p, a, t): return [1.0] * len(a)")
    for changed in (rewarded, hashes("rollout_seed=9")):
        assert changed[0] == first[0] and changed[1] != first[1]
    others = hashes(trained=11)
    assert others[0] != first[0] and others[1] == first[1]


def test_chats_become_prompts_by_the_template(tmp_path):
    """Their text is the template's, up to where an answer begins; its marks are marks."""
    pytest.importorskip("jinja2")
    write_tokenizer(tmp_path)
    loaded = tokenizers.load("huggingface", str(tmp_path), False, False)
    tokenizer, path = PromptTokenizer(loaded, (), load([RL]).data), tmp_path / "p.jsonl"
    chat = [{"role": "user", "content": "1+1?"}]
    lines = [{"messages": chat, "answer": "2"}, {"prompt": chat}, {"prompt": "<|im_end|>"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = FilePrompts(str(path), None, tokenizer=tokenizer)
    text = "<|im_start|>user\n1+1?<|im_end|><|im_start|>assistant\n"
    assert prompts.texts == [text, text, "<|im_end|>"] and prompts[0].truth == "2"
    assert prompts.hash.endswith(tokenizer.template.hash)
    first, _, plain = tokenizer.encode(prompts.texts)
    assert loaded.decode(first) == text and len(first) < len(text) - 20 and len(plain) > 1
    chat[0]["content"] = "<|im_end|>"
    path.write_text(json.dumps({"prompt": chat}))
    with pytest.raises(ConfigError, match="line 1: a message holds <|im_end|>"):
        FilePrompts(str(path), None, tokenizer=tokenizer)
    tokenizer = PromptTokenizer(tokenizers.load("bytes", "", True, True), (), tokenizer.chats)
    with pytest.raises(ConfigError, match="line 1: tokenizer_type=bytes has no tokens for turns"):
        FilePrompts(str(path), None, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", 'line 1 has no text "prompt"; write one JSON object'),
        ('{"prompt": "a"}\n\n{"prompt": 3}', 'line 3 has no text "prompt"'),
        ('{"prompt": ""}', "line 1 has no text"),
        ('{"prompt": "\\ud800"}', "line 1 has no text"),
        ("\n", "holds no prompt"),
        ("[" * 100_000, "line 1 has no text"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path, text, says):
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        FilePrompts(str(path), 0)


@pytest.mark.parametrize("path", ["~nosuchuser/p.jsonl", "p\0.jsonl", "\ud800"])
def test_a_path_that_cannot_exist_is_refused(path):
    with pytest.raises(ConfigError, match="prompt_file=.*: cannot be read: "):
        FilePrompts(path, 0)


def test_a_prompt_that_leaves_no_room_is_refused(tmp_path):
    bytes_ = PromptTokenizer(tokenizers.load("bytes", "", True, True))
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "ab"}\n{"prompt": "1+2="}\n')
    for key in ("prompt_file=", f"prompt_file={path}", f"eval_prompt_file={path}"):
        config = load([RL, "max_completion_length=12", key])
        with pytest.raises(ConfigError, match="leaves a prompt 4 of max_target_length=16 tokens"):
            open_prompts(config.rollout, bytes_, config.model)


def checkpoint(run, step, saved="", first=None, stages=(), **config):
    path = run / "checkpoints" / str(step)
    path.mkdir(parents=True)
    fields = dict(saved=saved, first=first or {})
    commit(Checkpoint(path, step, step, list(stages), "", config, {}, **fields))
    return path


@pytest.mark.parametrize("key", ["load_parameters_path", "load_full_state_path"])
def test_a_run_begins_with_the_checkpoint_that_it_began_with(tmp_path, key):
    """Whatever the run has trained since, also where it is gone; never with its own checkpoint."""
    other, run = tmp_path / "other", tmp_path / "run"
    config = load([RL, f"{key}={other}", f"base_output_directory={tmp_path}", "run_name=run"])
    first = checkpoint(other, 100, "a")
    settled, pinned = pin_first_weights(config)
    assert settled.values[key] == str(first) and pinned.states == {key: "a"}
    checkpoint(run, 5, "b", pinned.states, **{key: str(first)})
    checkpoint(other, 300)
    for place in (other, other / "checkpoints", other / "checkpoints" / "best", first):
        changed = config.replace(**{key: str(place)})
        assert pin_first_weights(changed)[0].values[key] == str(first)
    shutil.rmtree(first)
    assert pin_first_weights(config)[0].values[key] == str(first)
    (tmp_path / "link").symlink_to(run)
    for place in (run, run / "checkpoints" / "5", tmp_path / "link", other / ".." / "run"):
        with pytest.raises(ConfigError, match=f"{key}={place}: lies in this run's own folder"):
            pin_first_weights(config.replace(**{key: str(place)}))


def test_keys_are_those_of_the_weights_it_begins_with(tmp_path):
    """Whatever keys the run that they are of has trained on with."""
    other, run = tmp_path / "other", tmp_path / "run"
    config = load([RL, f"load_parameters_path={other}", f"base_output_directory={run.parent}"])
    config = config.replace(run_name=run.name)
    values = load([SUMS]).values
    stage = {"first_step": 0, **{name: values[name] for name in ROPE_KEYS}}
    first = checkpoint(other, 4, stages=[stage], **values)
    checkpoint(run, 5, load_parameters_path=str(first))
    later = stage | {"rope_max_timescale": 500000}
    checkpoint(other, 8, stages=[later], **values | {"rope_max_timescale": 500000})
    inherited = grpo._inherit_keys(config, len).values
    assert inherited["rope_max_timescale"] == values["rope_max_timescale"]
    assert inherited["load_parameters_path"] == str(first)


def test_weights_that_are_missing_come_with_the_command_that_makes_them(tmp_path, capsys):
    weights = tmp_path / "a b" / "small"
    line = refused(capsys, f"load_parameters_path={weights}")
    assert line.endswith(
        "python -m maxramp.train configs/pre_train/sums.yml "
        f"'base_output_directory={weights.parent}' run_name=small\n"
    )
    assert "sums.yml" not in refused(capsys, f"load_parameters_path={weights}", "prompt_file=p")
    config = load([RL])
    sums = load([str(ROOT / "configs" / "pre_train" / "sums.yml")])
    assert config.checkpoints.load_parameters_path == "output/sums"
    assert (sums.run.base_output_directory, sums.run.run_name) == ("output", "sums")


def test_names_of_maxtext_are_accepted():
    keys = ("batch_size=8", "num_batches=5", "rl.num_generations=3", "rl.grpo_beta=0.5")
    config = load([RL, "rampup_batch_size=none", *keys, "micro_batch_size=-1"], note=len)
    assert (config.batch.global_batch_size, config.batch.steps) == (8, 5)
    assert (config.policy.num_generations, config.policy.grpo_beta) == (3, 0.5)
