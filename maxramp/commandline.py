"""What the commands share: options beside key=value, counts and tables."""

import sys
from collections.abc import Iterable, Sequence

from maxramp.errors import ConfigError


def take_flag(arguments: list[str], flag: str) -> bool:
    """Takes `flag` out of a command line; whether it was there."""
    given = flag in arguments
    if given:
        arguments.remove(flag)
    return given


def take_value(arguments: list[str], flag: str) -> str | None:
    """Takes `flag VALUE` or `flag=VALUE` out of a command line; the value, None without the flag.

    Raises:
      ConfigError: no value follows the flag.
    """
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name != flag:
            continue
        del arguments[index]
        if not equals and index < len(arguments) and "=" not in arguments[index]:
            value = arguments.pop(index)
        if not value:
            raise ConfigError(f"{flag} needs a value: {flag} VALUE")
        return value
    return None


def count(number: int, noun: str) -> str:
    """A number of things: "1 process", "4 processes", "1 node"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> None:
    """Prints rows of cells, short rows filled up; `width` characters where there is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else width).print(table)
