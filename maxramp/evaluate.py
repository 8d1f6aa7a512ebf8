"""Evaluates a run or a released model on tasks of lm-eval.

python -m maxramp.evaluate RUN --tasks NAME,NAME [options] [key=value ...]

RUN is a run's folder, one of its checkpoints, or a Hugging Face model (its folder or its name).
Tasks are lm-eval's, those of --include_path, or YAML files. key=value sets the mesh
(ici_fsdp_parallelism=4), hardware, dtype, attention, max_target_length or the tokenizer. It needs
'.[evaluate]'.
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import yaml

from maxramp.commandline import Parser, Throttle, command, print_note, print_progress
from maxramp.errors import ConfigError, reason_of
from maxramp.evaluation.scorer import Scorer
from maxramp.evaluation.server import EvalOptions, EvalServer
from maxramp.files.place import Place, is_near, place, write_whole
from maxramp.handover.opening import ModelSource, open_model
from maxramp.handover.weights import SavedWeights
from maxramp.keys.yamlfile import parse as parse_value
from maxramp.processes import backend
from maxramp.processes.agreement import report_lost_peers, run_on_first
from maxramp.processes.ending import Watchdog, run
from maxramp.training.background_compiler import BackgroundCompiler

# The options that the numbers of a table depend on.
_SETTINGS = ("limit", "num_fewshot", "apply_chat_template", "system_instruction", "gen_kwargs")


@command
def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    opened = open_model(options.run, options.keys)
    if options.log_samples and not (
        options.output_path or isinstance(opened.weights, SavedWeights)
    ):
        raise ConfigError(
            "--log_samples writes them into --output_path, or beside a run; give --output_path"
        )
    seconds, keys = opened.config.run.hang_timeout_seconds, opened.config.backend
    with Watchdog(seconds, keys.join_timeout_seconds) as watchdog:
        backend.start(keys)
        watchdog.beat()
        with report_lost_peers():
            _run_tasks(options, opened, watchdog)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="a model")
    text = "tasks and groups, with commas between them"
    add("--tasks", required=True, metavar="NAMES", help=text)
    add("--include_path", default="", metavar="FOLDER", help="tasks beside lm-eval's own")
    for name, kind, what in (
        ("num_fewshot", int, "examples before each question (as the task says)"),
        ("limit", float, "ask the first N questions of each task, or that share, below 1 (all)"),
        ("batch_size", int, "rows per device in a pass (as many as make 8,192 tokens)"),
    ):
        add(f"--{name}", type=kind, metavar="N", help=what)
    add("--apply_chat_template", action="store_true", help="ask in the format of the model's chats")
    add("--system_instruction", metavar="TEXT", help="begin each chat or prompt with this")
    text = "how answers are sampled, such as temperature=0.7,max_gen_toks=64 (as the task says)"
    add("--gen_kwargs", default="", metavar="NAME=VALUE,...", help=text)
    add(
        "--output_path",
        default="",
        metavar="FILE",
        help="write the results here, as JSON (RUN/evaluations)",
    )
    add("--log_samples", action="store_true", help="write every question and answer there too")
    add("keys", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    for name, least in (("num_fewshot", 0), ("batch_size", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value} must be {least} or more")
    limit = options.limit
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit.is_integer())):
        raise ConfigError(
            f"--limit {limit:g} must be a whole number, or a share above 0 and below 1"
        )
    if limit is not None and limit.is_integer():
        options.limit = int(limit)  # a number of questions; else a share of them
    options.names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not options.names:
        raise ConfigError("--tasks names none; give NAME,NAME")
    options.gen_kwargs = _parse_gen_kwargs(options.gen_kwargs)
    return options


def _parse_gen_kwargs(text: str) -> dict[str, Any]:
    """Reads NAME=VALUE,NAME=VALUE, with values as in YAML, whose quotes and brackets may hold
    commas; {} of "", a ConfigError for another text."""
    kwargs, part = {}, ""
    for piece in text.split(","):
        part = f"{part},{piece}" if part else piece
        if not part:
            continue
        name, equals, value = part.partition("=")
        if not (equals and name.strip()):
            raise ConfigError(f"--gen_kwargs {text}: {part} is not NAME=VALUE")
        with contextlib.suppress(yaml.YAMLError):  # up to a comma in quotes or brackets
            kwargs[name.strip()], part = parse_value(value), ""
    if part:
        raise ConfigError(f"--gen_kwargs {text}: {part} cannot be read; quote it")
    return kwargs


def _check_output(path: str) -> None:
    """Refuses a path that cannot be written, before hours go into results for it; makes its folder.
    Lets every address of a storage pass."""
    file = place(path)
    if not is_near(file):
        return
    if file.exists() and not file.is_file():
        raise ConfigError(f"--output_path {path} exists and is not a file; name a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--output_path {path} cannot be written: {error.strerror}") from None


def _path_in_run(opened: ModelSource) -> Place | None:
    """Returns where the scores of a run's checkpoint are kept; None for a released model."""
    if not isinstance(opened.weights, SavedWeights):
        return None
    checkpoint, now = opened.weights.checkpoint, time.strftime("%Y-%m-%dT%H-%M-%S")
    return checkpoint.path.parent.parent / "evaluations" / f"{checkpoint.step}_{now}.json"


def _run_tasks(options: argparse.Namespace, opened: ModelSource, watchdog: Watchdog) -> None:
    """Evaluates the model on tasks, and shows and writes the results on process 0; all processes
    call it together. A ConfigError for unknown tasks, or an --output_path that cannot be written.
    """
    start = time.perf_counter()
    tokenizer = opened.tokenizer()

    def load_tasks() -> Any:
        from maxramp.evaluation import harness  # and with it lm-eval

        if options.output_path:
            _check_output(options.output_path)
        stages = opened.config.mesh.pipeline_stages
        return harness.Tasks("--tasks", options.names, options.include_path, stages)

    tasks = run_on_first(load_tasks, watchdog.beat)  # before weights are read
    watchdog.beat()
    model = opened.load(print_progress)
    watchdog.beat()
    tell = Throttle(print_progress if jax.process_index() == 0 else lambda line: None)

    def beat(line: str) -> None:
        watchdog.beat()
        tell(line)

    compiler = BackgroundCompiler(0, tell, lambda: None)
    recipe, rows = opened.config.recipe, options.batch_size or 0
    scorer = Scorer(recipe, model, tokenizer, compiler, rows, beat)
    server = EvalServer(scorer, model, watchdog.beat)

    def lead() -> None:
        from maxramp.evaluation import harness

        lm = harness.Model(server, tokenizer)
        settings = {name: getattr(options, name) for name in _SETTINGS}
        eval_options = EvalOptions(**settings, log_samples=options.log_samples)
        results = harness.evaluate(tasks, lm, eval_options)
        results["config"]["model_args"] = {"path": opened.path}
        path = place(options.output_path) if options.output_path else _path_in_run(opened)
        try:  # before the table: a reader who has gone away ends this process
            if path:
                text = json.dumps(results, indent=2, default=str, ensure_ascii=False)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, text.encode())
        except (ConfigError, OSError) as error:  # of a run that is somebody else's
            path = None
            if options.output_path:
                raise
            print_note(f"scores are not kept: {reason_of(error)}; --output_path names a file")
        finally:
            shown = ", ".join(f"{name}: {value!r}" for name, value in settings.items())
            print(f"{opened.path}: {shown}")
            print(harness.table(results))
            if path:
                print(f"see       {path}")
        seconds = time.perf_counter() - start
        print(f"{', '.join(options.names)}: {seconds:.1f} s, compiling included", file=sys.stderr)

    server.run(lead)


if __name__ == "__main__":
    run(main)
