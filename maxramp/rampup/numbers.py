"""Numbers as they are written: exact, and shown as a person would."""

from fractions import Fraction


def exact(value: float | int | Fraction) -> Fraction:
    """The number that was written: 0.1 is 1/10, not the nearest binary fraction."""
    return value if isinstance(value, Fraction) else Fraction(str(value))


def plain_number(value: Fraction) -> int | float:
    """A Fraction as JSON and a person see it: an integer where it is one."""
    return value.numerator if value.denominator == 1 else float(value)


def show(value: float | Fraction) -> str:
    """The number as it would be written in a config, or as a fraction where it has no end."""
    number = plain_number(exact(value))
    return str(number) if Fraction(str(number)) == exact(value) else str(value)
