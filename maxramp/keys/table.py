"""Every key of configs/base.yml as a page of Markdown.

python -m maxramp.keys.table > docs/keys.md
"""

import itertools
import re
import sys

from maxramp.keys.base import CONFIGS

_HEAD = """# Keys

Every key of a run with its default. `python -m maxramp.train --help-keys` prints the same list.
This page is made from [configs/base.yml](../configs/base.yml) by
`python -m maxramp.keys.table > docs/keys.md`."""


def page() -> str:
    """The page: a table for every section of base.yml, each key with its default and its reason.

    Raises:
      ValueError: a line of base.yml has none of the forms that the page can show, such as a key
        without a comment.
    """
    text = re.sub(r"\n +# ", " ", (CONFIGS / "base.yml").read_text(encoding="utf-8"))
    lines = text.split("\n\n", 1)[1].splitlines()  # what precedes the sections is of the file
    blocks = [_HEAD]
    for is_table, of_kind in itertools.groupby(filter(None, lines), lambda line: line[0] != "#"):
        blocks.append("")
        if is_table:
            blocks += ["| key | default | |", "|---|---|---|", *map(_row, of_kind)]
        else:
            prose = "\n".join(line[2:] for line in of_kind)
            blocks.append(re.sub(r"--- (.+?) -*(\n|$)", r"## \1\n\n", prose).rstrip())
    return "\n".join(blocks) + "\n"


def _row(line: str) -> str:
    found = re.fullmatch(r"(\w+): (\S.*?) +# (.*)", line.replace("|", "\\|"))
    if not found:
        raise ValueError(f"configs/base.yml: not a key with a default and a reason: {line}")
    return "| `{}` | `{}` | {} |".format(*found.groups())


if __name__ == "__main__":
    sys.stdout.write(page())
