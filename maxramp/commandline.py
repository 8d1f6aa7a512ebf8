"""What the commands share: options beside key=value, and tables."""

import sys
from collections.abc import Iterable, Sequence

from maxramp.errors import ConfigError


def print_note(line: str) -> None:
    """Says on stderr what a command makes of its arguments, where that is not what they say."""
    print(f"note: {line}", file=sys.stderr, flush=True)


def take_flag(arguments: list[str], flag: str) -> bool:
    """Takes `flag` out of a command line; whether it was there."""
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
