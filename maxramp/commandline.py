"""Shared by the commands: options beside key=value, counts and tables."""

import argparse
import contextlib
import functools
import itertools
import json
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import maxramp
from maxramp.errors import ConfigError, report
from maxramp.keys.base import CONFIGS
from maxramp.keys.megatron import suggest_argument


class Parser(argparse.ArgumentParser):
    """The options of a command, by their whole names; errors are a ConfigError's line. The help is
    the docstring of the command's module: purpose, usage and more, with blank lines between them.
    """

    def __init__(self, doc: str):
        """Takes a module docstring of at least two paragraphs, purpose and usage; a ValueError with
        fewer. The usage has no "%": argparse formats it.
        """
        what, usage, *more = doc.strip().split("\n\n", 2)
        super().__init__(
            usage=usage.replace("\n", "\n       "),
            description=what,
            epilog="".join(more),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._words: Sequence[str] = ()  # the command line, for hints in error()
        # argparse prints a "version" and exits, which is all that --help-keys needs.
        version, keys = f"maxramp {maxramp.__version__}", (CONFIGS / "base.yml").read_text()
        self.add_argument("--version", action="version", version=version, help="show the version")
        text = "list every key with its default, its unit and what it is for"
        self.add_argument("--help-keys", action="version", version=keys, help=text)

    def parse_intermixed_args(self, args: Sequence[str], namespace: Any = None) -> Any:
        """Parses a command line with key=value, in any order; `error` has its words for hints. A
        ConfigError for what argparse refuses, and for three numbers without a key.
        """
        self._words = args
        options = super().parse_intermixed_args(args, namespace)
        numbers = [word for word in getattr(options, "arguments", ()) if word.isdigit()]
        if len(numbers) == 3:
            raise ConfigError(
                f'"{" ".join(numbers)}": a key is given as key=value; did you mean '
                f"rampup_batch_size=[{','.join(numbers)}]?"
            )
        return options

    def error(self, message: str) -> NoReturn:
        """Raises argparse's message as a ConfigError, with the key that may have been meant."""
        what, colon, words = message.partition("unrecognized arguments: ")
        if colon and not what:
            words = [word for word in words.split(" ") if word.startswith("-")]
            shown = ", ".join(f'"{word}"' for word in words)
            message = f"{shown}: no such option; a key is given as key=value, without dashes"
            if meant := list(filter(None, (suggest_argument(word, self._words) for word in words))):
                message += f": did you mean {shell_quote(meant)}?"
        message += " (--help lists the options, --help-keys the keys of key=value)"
        raise ConfigError(message)


def config_parser(doc: str) -> Parser:
    """Makes a parser of CONFIG.yml and key=value, the `arguments` that `config.load` takes."""
    parser = Parser(doc)
    text = "a value is YAML: steps=100 learning_rate=3e-4 rampup_batch_size=[16,16,800]"
    parser.add_argument("arguments", nargs="*", metavar="CONFIG.yml key=value", help=text)
    return parser


def parse_config(doc: str, arguments: Sequence[str]) -> list[str]:
    return config_parser(doc).parse_intermixed_args(arguments).arguments


def command(work: Callable[[list[str]], int]) -> Callable[[Sequence[str] | None], int]:
    """Makes a command's `main`, which returns the exit status, of a function of the arguments
    (those of the process for None) that does. Prints an error in one line, or raises it, as
    `errors.report`."""

    @functools.wraps(work)
    def main(arguments: Sequence[str] | None = None) -> int:
        try:
            return work(list(sys.argv[1:] if arguments is None else arguments))
        except Exception as error:
            return report(error)

    return main


def print_note(line: str) -> None:
    """Prints a note on stderr, such as which arguments were translated or ignored."""
    print(f"note: {line}", file=sys.stderr, flush=True)


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_PERIOD = 30.0  # seconds between two signs of life


@contextlib.contextmanager
def show_wait(say: Callable[[str], None], line: str, first: float = _PERIOD) -> Iterator[None]:
    """Shows that a wait gets on: says the line and the time after `first` seconds, and then every
    30 seconds, in a thread.
    """
    start, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        patience = first
        while not ended.wait(patience):
            patience = _PERIOD
            say(f"{line}, for {duration(time.monotonic() - start)} so far")

    thread = threading.Thread(target=tell, name="wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Throttle:
    """Reports the progress of something that takes minutes, every 30 seconds."""

    def __init__(self, say: Callable[[str], None]):
        self._say, self._last = say, time.monotonic()

    def __call__(self, line: str) -> None:
        if time.monotonic() - self._last >= _PERIOD:
            self._last = time.monotonic()
            self._say(line)


def shell_quote(words: Iterable[Any]) -> str:
    return shlex.join(map(str, words))


def show_keys(keys: Mapping[str, Any]) -> str:
    """Formats keys as arguments of a command line."""
    texts = (x if isinstance(x, str) else json.dumps(x) for x in keys.values())
    return shell_quote(map("=".join, zip(keys, texts, strict=True)))


def count(number: int, noun: str) -> str:
    """Formats a number of things, whose plural ends with s: "1 process", "4 processes", "1
    node"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def short(number: float) -> str:
    """Formats a number in three digits, as the field does: 250B for 250000000000, 1.23M."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= 0.9995 * size:  # so that no 1e+03 of a smaller unit is shown
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def amount(number: float) -> str:
    """Formats hours or money in three digits, with at most two decimals: 51,649, 50.4, 0.12."""
    if number >= 99.95:
        return f"{number:,.0f}"
    if 0 < number < 0.005:
        return "<0.01"
    return f"{number:.2f}" if 0 < number < 1 else f"{number:.3g}"


def duration(seconds: float) -> str:
    """Formats seconds as 0.2s, 45s, 3m20s, 2h05m or 3d04h."""
    if 0 < seconds < 0.95:
        return f"{seconds:.1g}s"
    s = round(seconds)
    for big, small, (unit, part) in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if s >= big:
            return f"{s // big}{unit}{s % big // small:02d}{part}"
    return f"{s}s"


def run_time(hours: float) -> str:
    """Formats how long a run takes: 51,649 hours, 50.4 hours, below one as `duration`."""
    return f"{amount(hours)} hours" if hours >= 1 else duration(hours * 3600)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], expendable: Sequence[str] = ()
) -> list[str]:
    """Prints a table; each row has a text for each column. On a narrow terminal leaves out
    `expendable` ones of the `columns`, the first ones first, until it has room; returns these."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    rows, left_out, any_width = list(rows), [], 10_000
    width = shutil.get_terminal_size((any_width, 0)).columns
    # A run may be named [a] or :x:.
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    unlimited = console.options.update(max_width=any_width)
    for name in (*expendable, None):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        shown = [column not in left_out for column in columns]
        for column in itertools.compress(columns, shown):
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*itertools.compress(row, shown))
        if name is None or Measurement.get(console, unlimited, table).maximum <= width:
            break
        left_out.append(name)
    console.print(table)
    return left_out
