"""A hybrid of gated delta rules and attention, tuned on chats: what transformers makes of it.

A small Qwen3.5 is trained from scratch on the docs and the orders of configs/post_train, and
exported. From that folder all weights, and adapters, learn to write orders as lines. transformers
(PEFT) opens both exports: logits on held-out chats beside ours, and both programs' greedy answers.

python benchmarks/hybrids.py [--json FILE] [--folder DIR]

Needs the extra `compare`.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np
from figures import ROOT, parser, save

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from preference_pairs import write_pairs, write_tokenizer

from maxramp.handover.opening import open_model
from maxramp.parallel.mesh import mesh_of
from maxramp.run.metrics import read_records

ORDERS = ROOT / "configs/post_train/orders"
MODEL = {
    **{"decoder_block": "qwen3_5", "use_qk_norm": True, "base_num_decoder_layers": 4},
    **{"base_emb_dim": 128, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 32},
    **{"base_mlp_dim": 384, "gdn_num_key_heads": 2, "gdn_num_value_heads": 4},
    **{"gdn_key_head_dim": 32, "gdn_value_head_dim": 32, "logits_via_embedding": True},
}
SHORT = {
    **{"max_target_length": 128, "dtype": "float32", "remat_policy": "none", "hardware": "cpu"},
    **{"per_device_batch_size": 8, "enable_rampup_batch_size": False, "log_period": 20},
    **{"enable_tensorboard": False, "export_huggingface": True, "warmup_steps_fraction": 0.1},
}
TUNED = {
    "all weights": ("sft", {"learning_rate": 1e-3}),
    "adapters": ("lora", {"learning_rate": 4e-3, "weight_dtype": "float32"}),
}
TOKENS = 32  # of an answer at most


def _maxramp(module: str, *arguments: str, **keys) -> str:
    line = [sys.executable, "-m", f"maxramp.{module}", *arguments]
    line += [f"{name}={value}" for name, value in keys.items()]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.stdout)
    return done.stdout


def _read(name: str) -> list[dict]:
    return [json.loads(line) for line in (ORDERS / name).read_text().splitlines()]


def held_out() -> list[dict]:
    """Makes chats of the orders that no training has."""
    names = {"user": "order", "assistant": "line"}
    return [
        {"messages": [{"role": role, "content": x[name]} for role, name in names.items()]}
        for x in _read("held_out.jsonl")
    ]


def train_from_scratch(folder: pathlib.Path) -> pathlib.Path:
    """Trains a model on paragraphs of the docs and on orders; returns its export."""
    paragraphs = [
        p for f in sorted((ROOT / "docs").glob("*.md")) for p in f.read_text().split("\n\n")
    ]
    orders = [m["content"] for chat in _read("chats.jsonl") for m in chat["messages"]]
    texts = write_pairs(folder / "texts.jsonl", [{"text": t} for t in paragraphs + orders * 3])
    size = write_tokenizer(folder, paragraphs + orders, 1000)
    keys = MODEL | SHORT | {"vocab_size": -(-size // 8) * 8, "tokenizer_path": folder, "steps": 300}
    keys |= {
        "dataset_type": "grain",
        "grain_train_files": texts,
        "num_epoch": 40,
        "eval_interval": 100,
    }
    keys |= {"learning_rate": 2e-3, "base_output_directory": folder, "run_name": "scratch"}
    _maxramp("train", "configs/base.yml", **keys)
    return next((folder / "scratch/exported").iterdir())


def compare(export: pathlib.Path) -> dict[str, float]:
    """Opens an export with transformers, and asks both for held-out orders."""
    import peft
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    is_adapter = (export / "adapter_config.json").exists()
    opening = peft.AutoPeftModelForCausalLM if is_adapter else transformers.AutoModelForCausalLM
    reference = opening.from_pretrained(export, dtype=torch.float32)
    chats = [x["messages"] for x in held_out()]
    asked = [chat[0]["content"] for chat in chats]
    prompts = [word for text in asked for word in ("--prompt", text)]
    line = (str(export), "--chat", *prompts, "--max_new_tokens", str(TOKENS), "--temperature", "0")
    answers = [json.loads(x)["tokens"] for x in _maxramp("generate", *line, "--json").splitlines()]
    source = open_model(str(export), ["hardware=cpu"])
    model, gaps, equal, end = source.load(), [], 0, tokenizer.eos_token_id
    forward = jax.jit(lambda model, tokens: model(tokens, source.config.model))
    for chat, tokens in zip(chats, answers, strict=True):
        form = {"tokenize": True, "return_tensors": "pt", "return_dict": False}
        whole = tokenizer.apply_chat_template(chat, **form)
        with torch.no_grad():
            expected = reference(whole).logits[0].numpy()
            prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, **form)
            answer = reference.generate(
                input_ids=prompt, do_sample=False, max_new_tokens=TOKENS, eos_token_id=end
            )[0, prompt.shape[1] :].tolist()
        row = np.zeros((1, 128), np.int32)
        row[0, : len(expected)] = whole[0]
        with jax.set_mesh(mesh_of(model)):
            logits = np.asarray(forward(model, row))[0, : len(expected), : expected.shape[1]]
        gaps.append(np.abs(logits - expected).max() / np.ptp(expected))
        equal += answer == tokens
    return {"chats": len(chats), "logits": max(map(float, gaps)), "equal": equal}


def main() -> None:
    options = parser("hybrids", __doc__)
    options.add_argument("--folder", type=pathlib.Path, help="keeps the runs")
    arguments = options.parse_args()
    folder = arguments.folder or pathlib.Path(tempfile.mkdtemp(prefix="hybrids"))
    folder.mkdir(parents=True, exist_ok=True)
    scratch = train_from_scratch(folder)
    files = {"grain_train_files": ORDERS / "chats.jsonl", "grain_eval_files": folder / "held.jsonl"}
    write_pairs(folder / "held.jsonl", held_out())
    figures = {"before": compare(scratch)}
    for name, (config, keys) in TUNED.items():
        keys = SHORT | {"num_epoch": 4, "base_output_directory": folder} | files | keys
        keys |= {"load_parameters_path": scratch, "run_name": config}
        _maxramp("train", f"configs/post_train/{config}.yml", **keys)
        losses = [
            r["eval_loss"]
            for r in read_records(folder / config / "metrics.jsonl")
            if "eval_loss" in r
        ]
        (export,) = (folder / config / "exported").iterdir()
        figures[name] = {"eval_losses": losses, **compare(export)}
        print(name, figures[name], flush=True)
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
