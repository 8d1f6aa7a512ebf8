"""docs/keys.md shows what configs/base.yml says."""

import re

from conftest import ROOT

from maxramp.keys import table
from maxramp.keys.base import base


def test_docs_show_every_key_as_base_yml_has_it():
    text = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^\| `(\w+)` \|", text) == list(base())
    assert text == table.page(), "run: python -m maxramp.keys.table > docs/keys.md"


def test_no_word_of_a_reason_is_lost():
    comments = re.findall(r"# (.*)", (ROOT / "configs" / "base.yml").read_text(encoding="utf-8"))
    sections = "\n".join(comments).split("--- Run", 1)[1]
    written = re.findall(r"\w+", sections.replace("-", " "))
    shown = re.findall(r"\w+", table.page().partition("## ")[2].replace("-", " "))
    assert not set(written) - set(shown)
