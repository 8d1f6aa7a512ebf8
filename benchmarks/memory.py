"""Peak memory of a step with and without loss blocks and remat.

By the compiler's account, and as measured: the growth of a new process that runs three steps over
one that has only compiled. (An accelerator's own peak is what benchmarks/gpu.py measures.)

python benchmarks/memory.py [--json FILE] [key=value ...]
"""

import itertools
import json
import subprocess
import sys

from figures import ROOT, parser, save

# A vocabulary of 32,000 on 4,096 tokens: 500 MiB of logits.
SIZES = [
    "base_emb_dim=256",
    "base_num_query_heads=4",
    "base_num_kv_heads=4",
    "head_dim=64",
    "base_mlp_dim=1024",
    "base_num_decoder_layers=8",
    "vocab_size=32000",
    "jax_cache_dir=",
    "max_target_length=512",
    "per_device_batch_size=8",
    "enable_rampup_batch_size=False",
]
PROGRAM = """
import functools, json, resource, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding
from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.data.batch import abstract_batch
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.sharding import BATCH_ABT
from maxramp.rampup import RampupBatchManager
from maxramp.training.device_memory import compiled_bytes
from maxramp.training.learning_rate import LearningRate
from maxramp.training.state import initial_state
from maxramp.training.step import make_train_step

config = resolve(load(sys.argv[1:]), 1, 1, 1)
jax.set_mesh(mesh_lib.make_mesh(config.mesh))
ramp = RampupBatchManager(config.batch)
rate = LearningRate.from_keys(config.learning_rate, ramp)
state = initial_state(config.recipe)
spec, sharding = ramp.stages[-1].spec, NamedSharding(jax.sharding.get_mesh(), BATCH_ABT)
abstract = abstract_batch(spec.fields, (1, spec.rows), sharding)
batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), abstract)
step = make_train_step(config.recipe, rate)
compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak counts from here
def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
before = status("VmRSS")
held = sum(x.nbytes for x in jax.tree.leaves(state))
for _ in range(3):
    state, metrics = compiled(state, batch)
    jax.block_until_ready(metrics)
print(json.dumps({"compiled": compiled_bytes(compiled),
                  "measured": status("VmHWM") - before + held}))
"""


def main() -> None:
    options = parser("memory", __doc__)
    options.add_argument("keys", nargs="*", help="key=value of the model")
    arguments = options.parse_args()
    figures = {}
    print(f"{'MiB':36s} {'compiler':>9s} {'measured':>9s}")
    for remat, block in itertools.product(("none", "minimal", "full"), (0, 2048, 512)):
        keys = [*SIZES, f"remat_policy={remat}", f"loss_block_tokens={block}", *arguments.keys]
        command = [sys.executable, "-c", PROGRAM, str(ROOT / "configs" / "base.yml"), *keys]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        sizes = json.loads(printed.stdout.splitlines()[-1])
        name = f"remat_policy={remat}, loss_block_tokens={block}"
        figures[name] = {kind: size / 2**20 for kind, size in sizes.items()}
        print(f"{name:36s} {sizes['compiled'] / 2**20:9.0f} {sizes['measured'] / 2**20:9.0f}")
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
