"""Shared by the commands: options beside key=value, counts and tables."""

import argparse
import functools
import itertools
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import maxramp
from maxramp.errors import ConfigError, is_expected, report


class OneLineParser(argparse.ArgumentParser):
    """Of options by their whole names; what is wrong is one line, a ConfigError."""

    def __init__(self, **given: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **given)
        version = f"maxramp {maxramp.__version__}"
        self.add_argument("--version", action="version", version=version, help="show the version")

    def error(self, message: str) -> NoReturn:
        """Raises what the parser found."""
        raise ConfigError(f"{message} (--help lists what there is)")


def command(work: Callable[[list[str]], int]) -> Callable[[Sequence[str] | None], int]:
    """Makes a command's `main` of what works on the arguments and returns the exit status.

    It takes them from the process's own command line by default. An error is reported in one line.
    """

    @functools.wraps(work)
    def main(arguments: Sequence[str] | None = None) -> int:
        try:
            return work(list(sys.argv[1:] if arguments is None else arguments))
        except Exception as error:
            if not is_expected(error):
                raise
            return report(error)

    return main


def print_note(line: str) -> None:
    """Prints a note on stderr, such as which arguments were translated or ignored."""
    print(f"note: {line}", file=sys.stderr, flush=True)


def take_flag(arguments: list[str], flag: str) -> bool:
    """Takes `flag` out of a command line; returns whether it was there."""
    given = flag in arguments
    arguments[:] = [argument for argument in arguments if argument != flag]
    return given


def take_value(arguments: list[str], flag: str) -> str | None:
    """Takes `flag VALUE` or `flag=VALUE` out of a command line, however often it is there.

    Returns:
      The last value; None without the flag.

    Raises:
      ConfigError: no value follows the flag.
    """
    found = None
    for index in reversed(range(len(arguments))):
        name, equals, value = arguments[index].partition("=")
        if name != flag:
            continue
        del arguments[index]
        if not equals and index < len(arguments) and "=" not in arguments[index]:
            value = arguments.pop(index)
        if not value:
            raise ConfigError(f"{flag} needs a value: {flag} VALUE")
        found = found or value
    return found


def print_progress(line: str) -> None:
    """Prints how far something is that takes minutes, on stderr."""
    print(line, file=sys.stderr, flush=True)


class Seldom:
    """Says how far something is that takes minutes, every 30 seconds."""

    def __init__(self, say: Callable[[str], None] = print_progress):
        """`say` takes the lines."""
        self._say, self._said = say, time.monotonic()

    def __call__(self, line: str) -> None:
        """Says a line if the last one is long enough ago."""
        if time.monotonic() - self._said >= 30:
            self._said = time.monotonic()
            self._say(line)


def shell_quote(words: Iterable[Any]) -> str:
    """Words as a shell reads them back."""
    return " ".join(shlex.quote(str(word)) for word in words)


def count(number: int, noun: str) -> str:
    """A number of things: "1 process", "4 processes", "1 node"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def short(number: float) -> str:
    """A number in three digits, as the field writes it: 250B for 250000000000, 1.23M."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def amount(number: float) -> str:
    """Hours or money: in whole ones, below 100 in three digits: 51,649, 50.4, 0.0123."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], expendable: Sequence[str] = ()
) -> list[str]:
    """Prints rows of cells as a table that fits the terminal; short rows are filled up.

    Args:
      columns: their heads; a line break in one is kept.
      rows: cells.
      expendable: heads of columns that a narrow terminal goes without, the first to go first.

    Returns:
      The heads that were left out; none if there is no terminal and no COLUMNS.
    """
    from rich.console import Console
    from rich.measure import Measurement

    rows, left_out = list(rows), []
    width = shutil.get_terminal_size((_ANY_WIDTH, 0)).columns
    console = Console(highlight=False, width=width)
    unlimited = console.options.update(max_width=_ANY_WIDTH)
    for name in (*expendable, None):
        table = _table(columns, rows, left_out)
        if name is None or Measurement.get(console, unlimited, table).maximum <= width:
            break
        left_out.append(name)
    console.print(table)
    return left_out


_ANY_WIDTH = 10_000


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], left_out: Sequence[str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown = [name not in left_out for name in columns]
    for name in itertools.compress(columns, shown):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*itertools.compress(row, shown))
    return table
