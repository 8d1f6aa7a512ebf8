"""Rewards of tasks whose answers can be checked. Imports no JAX: workers load it."""

from collections.abc import Sequence


def exact_match(prompts: Sequence[str], answers: Sequence[str], truths: Sequence[str]) -> list:
    """1 where an answer is what the data says, but for space around it; else 0."""
    return [float(a.strip() == str(t).strip()) for a, t in zip(answers, truths, strict=True)]


def brevity(prompts: Sequence[str], answers: Sequence[str], truths: Sequence[str]) -> list:
    """Minus the characters of an answer beside those of what the data says."""
    return [-float(abs(len(a) - len(str(t)))) for a, t in zip(answers, truths, strict=True)]
