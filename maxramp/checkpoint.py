"""Lists, shows and verifies the checkpoints of a run.

python -m maxramp.checkpoint ls|show|verify PATH [PATH ...]

PATH is a checkpoint, a checkpoints folder or the folder of a run.

ls      one line per checkpoint: step, samples, stage, batch, size, whether it is complete, and
        which keys changed since the one before
show    everything about one checkpoint (the newest of a folder), with every key that differs from
        its default
verify  reads every value of every checkpoint; exit status 1 if one is torn
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import contextlib
import sys

from maxramp.checkpoints import folder as folder_lib
from maxramp.checkpoints.folder import Checkpoint, TornError
from maxramp.commandline import Parser, command
from maxramp.errors import EXIT_FAILED, ConfigError
from maxramp.files import storage
from maxramp.files.place import MARK, Place, place, sizes
from maxramp.keys.base import base


@command
def main(arguments: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("command", choices=("ls", "show", "verify"))
    parser.add_argument("path", nargs="+", type=place)
    options = parser.parse_args(arguments)
    work = {"ls": ls, "show": show, "verify": verify}[options.command]
    return max(work(path) for path in options.path)


def ls(path: Place) -> int:
    before: Checkpoint | None = None
    folders, best = _checkpoints(path), None
    with contextlib.suppress(ConfigError):
        best = folder_lib.find_best(folders[0].parent)
    print(f"{'step':>9} {'samples':>12} {'stage':>8} {'batch':>7} {'size':>9}  state")
    for folder in folders:
        size = _bytes(folder)
        try:
            checkpoint = folder_lib.read(folder)
        except ConfigError as error:
            state = f"torn ({error.what})" if isinstance(error, TornError) else error
            print(f"{folder.name:>9} {'':>12} {'':>8} {'':>7} {size:>9}  {state}")
            continue
        stage = checkpoint.stage()
        position = f"{stage['index']} of 0-{checkpoint.stages_of_run()[-1]['index']}"
        changed = before.differences(checkpoint.config).items() if before else ()
        changes = ", ".join(f"{name}={after} (was {before})" for name, (before, after) in changed)
        print(
            f"{checkpoint.step:>9} {checkpoint.consumed_samples:>12,} {position:>8} "
            f"{stage['global_batch_size']:>7,} {size:>9}  complete{', the best' * (folder == best)}"
            + (f"; from here on {changes}" if changes else "")
        )
        before = checkpoint
    folder = folder_lib.find(path).parent
    listed = {MARK, *map(str, folder_lib.steps_in(folder))}
    for other in sorted(p for p in folder.iterdir() if p.name not in listed):
        print(f"{other.name:>9}: {_describe(other)}, {_bytes(other)}")
    return 0


def show(path: Place) -> int:
    checkpoint = folder_lib.read(folder_lib.find(path))
    stage, config = checkpoint.stage(), checkpoint.config
    last = checkpoint.stages_of_run()[-1]["index"]
    own = [f"{name}={value}" for name, (value, _) in checkpoint.differences(base()).items()]
    print(f"path      {checkpoint.path}")
    print(
        f"state     {checkpoint.step:,} steps, {checkpoint.consumed_samples:,} samples, "
        f"{checkpoint.consumed_samples * config['max_target_length']:,} tokens"
    )
    print(
        f"stage     {stage['index']} (of 0 to {last}): global batch "
        f"{stage['global_batch_size']:,}, from step {stage['first_step']:,}"
    )
    print(f"size      {_bytes(checkpoint.path)}")
    print(f"corpus    hash {checkpoint.corpus_hash}")
    print(f"versions  {', '.join(map(' '.join, checkpoint.versions.items()))}")
    print(f"config    {' '.join(own)}")
    return 0


def verify(path: Place) -> int:
    """Reads every value of every checkpoint; returns the exit status, not 0 if one is torn. One
    that a live run removes meanwhile does not count; one that cannot be read for another reason
    raises as `folder.read` and `_count_values`."""
    status = 0
    for checkpoint in _checkpoints(path):
        try:
            folder_lib.read(checkpoint)
            arrays, values, not_finite = _count_values(checkpoint)
        except TornError as error:
            if not checkpoint.is_dir():
                print(f"{checkpoint}: removed meanwhile")
                continue
            print(f"{checkpoint}: torn ({error.what})")
            status = EXIT_FAILED
        else:
            finite = f", {not_finite:,} of them not finite" if not_finite else ""
            print(f"{checkpoint}: complete, {values:,} values in {arrays} arrays{finite}")
    return status


def _count_values(checkpoint: Place) -> tuple[int, int, int]:
    """Reads a checkpoint; returns its numbers of arrays, values, and values that are not finite.
    From then on the process has no device but the CPU. A TornError if an array cannot be read, a
    MemoryError or JaxRuntimeError if it does not fit into memory.
    """
    import numpy as np

    from maxramp.checkpoints.arrays import stored_arrays
    from maxramp.processes.backend import take_hardware

    take_hardware("cpu")
    arrays, values, not_finite = 0, 0, 0
    for array in stored_arrays(checkpoint):
        arrays, values = arrays + 1, values + array.size
        if not np.issubdtype(array.dtype, np.integer):
            not_finite += array.size - int(np.isfinite(array.astype(np.float32)).sum())
    return arrays, values, not_finite


def _checkpoints(path: Place) -> list[Place]:
    """Returns a checkpoint, or all of a folder by step; a ConfigError if it has none."""
    checkpoint = folder_lib.find(path)
    if checkpoint == path.absolute():
        return [checkpoint]
    folder = checkpoint.parent
    return [folder / str(step) for step in folder_lib.steps_in(folder)]


def _describe(path: Place) -> str:
    if path.suffix == folder_lib.TORN:
        return "torn, moved aside by a restart"
    if folder_lib.is_step(path.name):
        return f"no {folder_lib.FILE}: a save in progress, or what a kill left"
    return "not a checkpoint"


def _bytes(path: Place) -> str:
    """Returns the size of a file or folder in words; what goes meanwhile does not count."""
    size = 0
    with contextlib.suppress(ConfigError, FileNotFoundError):  # renamed or removed, by a live run
        size = sum(sizes(path).values()) if path.is_dir() else storage.size_of(str(path))
    for unit, digits in (("B", 0), ("kB", 0), ("MB", 1), ("GB", 1)):
        if size < 1000:
            return f"{size:.{digits}f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


if __name__ == "__main__":
    sys.exit(main())
