"""Numbers as they are written: exact, and shown as a person would."""

import decimal
import math
from fractions import Fraction

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(text: str) -> int | None:
    """8.2M -> 8200000, exactly; None where it is not a whole number."""
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isascii() or not digits.replace(".", "", 1).isdigit():
        return None
    number = decimal.Context(prec=60).multiply(decimal.Decimal(digits), factor)
    return int(number) if number == number.to_integral_value() else None


def exact(value: float | int | Fraction) -> Fraction:
    """The number that was written: 0.1 is 1/10, not the nearest binary fraction."""
    return value if isinstance(value, Fraction) else Fraction(str(value))


def plain_number(value: Fraction) -> int | float:
    """A Fraction as JSON and a person see it: an integer where it is one."""
    return value.numerator if value.denominator == 1 else float(value)


def nearest_multiples(value: int | Fraction, *units: int | Fraction) -> str:
    """The multiples of a unit, or of any of several, around a value: "8 or 12", or "4" near 0."""
    below = max(value // unit * unit for unit in units)
    above = min(-(-value // unit) * unit for unit in units)
    return f"{show(below)} or {show(above)}" if 0 < below < above else show(above)


def nearest_divisors(value: int | Fraction, whole: int | Fraction) -> str:
    """What divides a whole without a rest, around a value: "4 or 8", or "8" from 8 on."""
    unit = Fraction(1, math.lcm(Fraction(value).denominator, Fraction(whole).denominator))
    total = int(whole / unit)
    small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    found = [n * unit for n in (*small, *(total // n for n in reversed(small)))]
    below = max((n for n in found if n <= value), default=unit)
    above = min((n for n in found if n >= value), default=found[-1])
    return f"{show(below)} or {show(above)}" if below < above else show(below)


def show(value: float | Fraction) -> str:
    """The number as it would be written in a config, or as a fraction where it has no end."""
    number = plain_number(exact(value))
    return str(number) if Fraction(str(number)) == exact(value) else str(value)
