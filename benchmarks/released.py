"""Reading a released model onto a mesh: seconds, bytes and the host's memory beside the shards.

A made-up Llama in bfloat16 of --gib GiB and thousands of tensors is read by jobs of 1 and 4
processes on this machine, and by plain reads of the same parts. Both find the files in the system's
cache. Memory is RssAnon, sampled all the time: its peak less what there was before and less the
shards, in units of the largest tensor. Bytes are those of all processes' reads (/proc/self/io) over
the size of the files.

python benchmarks/released.py [--gib 10] [--json FILE]
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from figures import ROOT, parser, save

PROGRAM = """
import json, os, sys, threading, time
import jax
from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.huggingface import folder as released, reading
from maxramp.parallel.mesh import make_mesh
from maxramp.processes import backend
from maxramp.processes.ending import end_process
from maxramp.training.state import abstract_state

def status(name, file="status", unit=1024):
    for line in open(f"/proc/self/{file}"):
        if line.startswith(name):
            return int(line.split()[1]) * unit

folder = released.find("load_parameters_path", sys.argv[1])
keys = [f"{name}={str(value).replace(' ', '')}" for name, value in folder.keys.items()]
loaded = load(["configs/base.yml", *keys, "dataset_type=synthetic", "weight_dtype=bfloat16",
    "enable_rampup_batch_size=False", "per_device_batch_size=1", *sys.argv[2:]])
backend.start(loaded.backend)
config = resolve(loaded, jax.device_count(), 1, jax.process_count())
model = abstract_state(config.recipe, make_mesh(config.mesh)).model
jax.block_until_ready(jax.numpy.zeros(8) + 1)
before, read, done, peak = status("RssAnon:"), status("rchar:", "io", 1), [], [0]
def watch():
    while not done:
        peak[0] = max(peak[0], status("RssAnon:"))
        time.sleep(0.02)
thread = threading.Thread(target=watch)
thread.start()
start = time.perf_counter()
rows = folder.keys["vocab_size"]
read_all = reading.prepare_load(
    folder.path, folder.tensors, rows, model, config.model.decoder_block, print
)
weights = read_all()
jax.block_until_ready(jax.tree.leaves(weights))
seconds = time.perf_counter() - start
done.append(1)
thread.join()
shards = sum(s.data.nbytes for x in jax.tree.leaves(weights) for s in x.addressable_shards)
read = status("rchar:", "io", 1) - read
start = time.perf_counter()
parts, process_id = jax.process_count(), jax.process_index()
for tensor in folder.tensors.values():
    tensor.read(*(tensor.rows * i // parts for i in (process_id, process_id + 1)))
plain = time.perf_counter() - start
print("FOUND", json.dumps({"seconds": seconds, "plain": plain, "read": read,
    "beside": peak[0] - before - shards, "shards": shards}))
end_process(0)
"""


def make(folder: pathlib.Path, gib: float) -> tuple[int, int]:
    """Writes a model of about `gib`; returns its bytes, and those of its largest tensor."""
    D, F, V, H = 1024, 4096, 32_000, 8
    layer = 2 * (4 * D * D + 3 * D * F + 2 * D)
    layers = max(1, round((gib * 2**30 - 4 * V * D) / layer))
    config = {"model_type": "llama", "hidden_size": D, "intermediate_size": F, "vocab_size": V}
    config |= {"num_attention_heads": H, "num_key_value_heads": H, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    shapes["model.norm.weight"] = (D,)
    for i in range(layers):
        layer_shapes = {f"self_attn.{n}_proj": (D, D) for n in "qkvo"}
        layer_shapes |= {"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
        layer_shapes |= {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
        shapes |= {f"model.layers.{i}.{n}.weight": shape for n, shape in layer_shapes.items()}
    sizes = {name: 2 * shape[0] * (shape[1] if shape[1:] else 1) for name, shape in shapes.items()}
    where, files, names, held = {}, 0, list(shapes), 0
    while names:
        files, part, held = files + 1, [], 0
        while names and held < 2e9:
            part.append(names.pop(0))
            held += sizes[part[-1]]
        entries, at = {}, 0
        for name in part:
            entries[name] = {"dtype": "BF16", "shape": shapes[name]}
            entries[name]["data_offsets"] = [at, at := at + sizes[name]]
        header = json.dumps(entries).encode()
        with open(folder / f"{files}.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name in part:
                file.write(os.urandom(1024) * (sizes[name] // 1024))
        where |= dict.fromkeys(part, f"{files}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return sum(sizes.values()), max(sizes.values())


def main() -> None:
    options = parser("released", __doc__)
    options.add_argument("--gib", type=float, default=10)
    arguments = options.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        total, largest = make(folder, arguments.gib)
        for count in (1, 4):
            jobs = []
            for i in range(count):
                env = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
                if count > 1:
                    env |= {"MAXRAMP_COORDINATOR": "localhost:29871"}
                    env |= {"MAXRAMP_NUM_PROCESSES": str(count), "MAXRAMP_PROCESS_ID": str(i)}
                command = [sys.executable, "-c", PROGRAM, str(folder)]
                jobs.append(
                    subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
                )
            texts = [job.communicate()[0] for job in jobs]
            reports = [json.loads(text.split("FOUND ")[1]) for text in texts]
            row = {
                "processes": count,
                "gib": total / 2**30,
                "seconds": max(f["seconds"] for f in reports),
                "plain_seconds": max(f["plain"] for f in reports),
                "read_over_files": sum(f["read"] for f in reports) / total,
                "beside_largest_tensors": max(f["beside"] for f in reports) / largest,
            }
            print({k: round(v, 3) for k, v in row.items()}, flush=True)
            rows.append(row)
    save(arguments.json, {"reading": rows})


if __name__ == "__main__":
    main()
