"""Exports a trained model in Hugging Face's format: a folder that transformers opens.

python -m maxramp.convert RUN[/checkpoints/STEP] --to FOLDER [options] [key=value ...]
python -m maxramp.convert MODEL.gguf --to FOLDER [--dtype DTYPE]

RUN is the folder of a run, one of its checkpoints, or a Hugging Face model. FOLDER may be an
address such as gs://bucket/model. If it is interrupted, run the same command again to continue.
key=value sets the mesh (ici_fsdp_parallelism=4) and hardware. MODEL.gguf holds a Llama; its
quantized weights become float32.
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import jax

from maxramp.commandline import Parser, command, print_progress, shell_quote
from maxramp.errors import ConfigError
from maxramp.files.place import place, sizes
from maxramp.handover.export import export
from maxramp.handover.opening import open_model
from maxramp.huggingface import gguf, writing
from maxramp.huggingface.folder import TOKENIZER
from maxramp.model.adapters import without_adapters
from maxramp.model.decoder import num_parameters
from maxramp.model.families.table import has_experts
from maxramp.processes import backend
from maxramp.processes.ending import run


@command
def main(arguments: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("run", metavar="RUN", help="a run, a checkpoint, or a Hugging Face folder")
    text = "where to write it"
    parser.add_argument("--to", metavar="FOLDER", type=place, required=True, help=text)
    merge = "write the whole model, adapters added to it, where RUN trained adapters"
    parser.add_argument("--merge", action="store_true", help=merge)
    fused = "write the experts of a layer in one tensor, as transformers 5 holds them"
    parser.add_argument("--fuse_experts", action="store_true", help=fused)
    dtype = "of the tensors; default: as they came, or weight_dtype"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=dtype)
    parser.add_argument("keys", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    writing.check_free(options.to)
    opened = None if options.run.endswith(".gguf") else open_model(options.run, options.keys)
    keys = opened and opened.config.model
    is_sparse = keys and has_experts(keys.decoder_block)
    if options.fuse_experts and (not is_sparse or (keys.lora_rank and not options.merge)):
        raise ConfigError(f"--fuse_experts: {options.run} has no experts to write; leave it out")
    if not opened:
        gguf.unpack(options.run, options.to, options.dtype or "float32")
        print(f"wrote {options.to}")
        return 0
    backend.start(opened.config.backend)
    model = opened.load(print_progress)
    weights = num_parameters(without_adapters(model))
    export(opened, model, options.to, options.dtype or "", options.merge, options.fuse_experts)
    if jax.process_index() == 0:
        size = sum(sizes(options.to).values())
        what = (
            "adapters of a model"
            if opened.weights.adapted_model and not options.merge
            else "a model"
        )
        print(f"wrote    {options.to}: {what} of {weights:,} weights, {size / 1e6:,.1f} MB")
        has_tokenizer = any((options.to / name).exists() for name in TOKENIZER)
        reads = shell_quote([options.to if has_tokenizer else options.run])
        print(f"next     python -m maxramp.generate {reads} --prompt TEXT")
    return 0


if __name__ == "__main__":
    run(main)
