"""How long maxramp.prepare takes for one compressed file, against its tokenizer alone.

Both get the same text and all cores. The tokenizer alone has its texts in memory and leaves its ids
there; prepare starts, decompresses, parses, tokenizes, hashes and writes.

python benchmarks/preparing.py [--json FILE] [--megabytes 200] [--rounds 3]
"""

import json
import multiprocessing
import os
import pathlib
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time

import numpy as np
from figures import ROOT, parser, save

VOCABULARY = 32_000
DOCUMENT = 3_000  # characters of a document, about
CORES = len(os.sched_getaffinity(0))


def make_texts(megabytes: float) -> list[str]:
    """Documents of lines of Python's standard library, drawn at random."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
    lines = [s for p in files for s in p.read_text(errors="ignore").splitlines(True) if s.strip()]
    random, texts, size = np.random.default_rng(0), [], 0
    while size < megabytes * 1e6:
        start = int(random.integers(0, len(lines) - 100))
        text = "".join(lines[start : start + int(random.integers(20, 140))])
        texts.append(text[: 4 * DOCUMENT])
        size += len(texts[-1].encode())
    return texts


def encode_alone(texts: list[str], tokenizer: str, started, seconds) -> None:
    """Encodes batches of 1 MB to arrays, in a process of its own."""
    from tokenizers import Tokenizer

    model = Tokenizer.from_file(tokenizer)
    model.encode_batch_fast(texts[:10])
    per_batch = max(1, int(1e6) // DOCUMENT)
    started.wait()
    begin = time.perf_counter()
    for first in range(0, len(texts), per_batch):
        encoded = model.encode_batch_fast(texts[first : first + per_batch])
        np.concatenate([np.asarray(one.ids, np.int32) for one in encoded])
    seconds.put(time.perf_counter() - begin)


def time_alone(texts: list[str], tokenizer: str) -> float:
    """Seconds of the slowest of as many processes as there are cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("fork")
    started, seconds = context.Barrier(CORES), context.Queue()
    processes = [
        context.Process(target=encode_alone, args=(texts[core::CORES], tokenizer, started, seconds))
        for core in range(CORES)
    ]
    for process in processes:
        process.start()
    slowest = max(seconds.get() for _ in processes)
    for process in processes:
        process.join()
    return slowest


def time_prepare(source: pathlib.Path, output: pathlib.Path, tokenizer: str) -> float:
    """Seconds of the command, from its start to its end."""
    command = [sys.executable, "-m", "maxramp.prepare", str(source), "--output", str(output)]
    start = time.perf_counter()
    subprocess.run(
        [*command, f"tokenizer_path={tokenizer}"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - start


def processor_seconds() -> float:
    """Seconds that processes started here, and theirs, have run on a core."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = parser("preparing", __doc__)
    options.add_argument("--megabytes", type=float, default=200, help="of text")
    options.add_argument("--rounds", type=int, default=3, help="of both, by turns")
    arguments = options.parse_args()
    import pyarrow

    from maxramp.data.tokenizers import train_bpe

    texts = make_texts(arguments.megabytes)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tokenizer = folder / "tokenizer.json"
        tokenizer.write_bytes(train_bpe(iter(texts[:5000]), VOCABULARY))
        source = folder / "text.jsonl.zst"
        with pyarrow.CompressedOutputStream(str(source), "zstd") as out:
            for text in texts:
                out.write(json.dumps({"text": text}).encode() + b"\n")
        alone, whole, processors = [], [], []
        for turn in range(arguments.rounds):
            start = processor_seconds()
            alone.append(time_alone(texts, str(tokenizer)))
            between = processor_seconds()
            whole.append(time_prepare(source, folder / f"set{turn}", str(tokenizer)))
            processors.append((between - start, processor_seconds() - between))
            print(
                f"tokenizer alone {alone[-1]:.1f} s, prepare {whole[-1]:.1f} s; of all cores "
                f"{processors[-1][0]:.1f} s and {processors[-1][1]:.1f} s",
                flush=True,
            )
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    figures = {
        "megabytes": megabytes,
        "tokenizer_seconds": min(alone),
        "prepare_seconds": min(whole),
        "ratio": min(whole) / min(alone),
        # Of the cores' time, which other work on the machine changes less.
        "processor_ratio": min(p for _, p in processors) / min(a for a, _ in processors),
        "megabytes_per_second": megabytes / min(whole),
    }
    print(
        f"ratio {figures['ratio']:.3f} (of the cores' time {figures['processor_ratio']:.3f}), "
        f"{figures['megabytes_per_second']:.1f} MB/s"
    )
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
