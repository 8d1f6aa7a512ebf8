"""Every key of configs/base.yml as a page of Markdown.

python -m maxramp.keys.table > docs/keys.md
"""

import re
import sys
from collections.abc import Iterable, Iterator

from maxramp.keys.base import CONFIGS

_HEAD = """# Keys

Every key of a run with its default. `python -m maxramp.train --help-keys` prints the same list.
This page is made from [configs/base.yml](../configs/base.yml) by
`python -m maxramp.keys.table > docs/keys.md`.
"""
_SECTION = re.compile(r"# --- (.+?) -*")
_KEY = re.compile(r"(\w+): (\S.*?) +# (.*)")
_CONTINUED = re.compile(r" +# (.*)")


def page() -> str:
    """The page: a table for every section of base.yml, each key with its default and its reason.

    Raises:
      ValueError: a line of base.yml has none of the forms that the page can show, such as a key
        without a comment.
    """
    text = (CONFIGS / "base.yml").read_text(encoding="utf-8")
    _, sections = text.split("\n\n", 1)  # what precedes them speaks of the file
    return _HEAD + "".join(f"\n{block}\n" for block in _blocks(_entries(sections.splitlines())))


def _entries(lines: Iterable[str]) -> Iterator[list[str]]:
    """[section], ["", prose] or [key, default, reason], each with its continued lines joined."""
    entry: list[str] = []
    for line in lines:
        if len(entry) == 3 and (more := _CONTINUED.fullmatch(line)):
            entry[-1] += f" {more[1]}"
            continue
        if len(entry) == 2 and line.startswith("# ") and not _SECTION.fullmatch(line):
            entry[-1] += line[1:]
            continue
        if entry:
            yield entry
        if section := _SECTION.fullmatch(line):
            entry = [section[1]]
        elif key := _KEY.fullmatch(line):
            entry = list(key.groups())
        elif line.startswith("# "):
            entry = ["", line[2:]]
        elif line:
            raise ValueError(f"configs/base.yml: not a key with a default and a reason: {line}")
        else:
            entry = []
    if entry:
        yield entry


def _blocks(entries: Iterable[list[str]]) -> Iterator[str]:
    """Headings, paragraphs and tables."""
    rows: list[str] = []
    for entry in entries:
        if len(entry) == 3:
            key, default, reason = (cell.replace("|", "\\|") for cell in entry)
            rows.append(f"| `{key}` | `{default}` | {reason} |")
            continue
        if rows:
            yield _table(rows)
            rows = []
        yield f"## {entry[0]}" if len(entry) == 1 else entry[1]
    if rows:
        yield _table(rows)


def _table(rows: list[str]) -> str:
    return "\n".join(("| key | default | |", "|---|---|---|", *rows))


if __name__ == "__main__":
    sys.stdout.write(page())
