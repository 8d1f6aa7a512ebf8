"""Rewards of tasks whose answers can be checked. Imports no JAX: workers load it."""

from collections.abc import Sequence


def exact_match(prompts: Sequence[str], answers: Sequence[str], truths: Sequence[str]) -> list:
    """Gives 1 to an answer that is what the data says, but for space around it; else 0."""
    return [float(a.strip() == str(t).strip()) for a, t in zip(answers, truths, strict=True)]


def brevity(prompts: Sequence[str], answers: Sequence[str], truths: Sequence[str]) -> list:
    """Subtracts 1 for each character by which an answer is longer or shorter than the truth."""
    return [-float(abs(len(a) - len(str(t)))) for a, t in zip(answers, truths, strict=True)]
