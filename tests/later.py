"""Packages that take seconds to import, imported where a test first uses them."""

import importlib.util
from typing import Any

import pytest


class Later:
    """A module, by its name, that is imported at the first use; without it the test file skips."""

    def __init__(self, name: str):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"could not import {name!r}", allow_module_level=True)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks every name of a test file for some
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
