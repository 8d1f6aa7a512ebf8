"""Exact numbers from text, and numbers as text."""

import decimal
import math
from fractions import Fraction

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(text: str) -> int | None:
    """Parses 8.2M as 8200000, exactly; None if it is not a whole number, or has a sign."""
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isascii() or not digits.replace(".", "", 1).isdigit():
        return None
    number = decimal.Context(prec=60).multiply(decimal.Decimal(digits), factor)
    return int(number) if number == number.to_integral_value() else None


def exact(value: float | int | Fraction) -> Fraction:
    """Returns the number as written: 0.1 is 1/10, not the nearest binary fraction. A ValueError for
    one that is not finite."""
    return value if isinstance(value, Fraction) else Fraction(str(value))


def plain_number(value: Fraction) -> int | float:
    """Returns an integer if the fraction is one, else a float: for JSON and people."""
    return value.numerator if value.denominator == 1 else float(value)


def nearest_multiples(value: int | Fraction, *units: int | Fraction) -> str:
    """Names the multiples of a unit above 0, or of several, around a value: "8 or 12", or "4" near
    0."""
    below = max(value // unit * unit for unit in units)
    above = min(-(-value // unit) * unit for unit in units)
    return f"{show(below)} or {show(above)}" if 0 < below < above else show(above)


def nearest_divisors(value: int | Fraction, whole: int | Fraction) -> str:
    """Names the divisors, above 0, of a whole > 0 around a value: of 8 "4 or 8" for 5, "8" from 8
    on. Those of fractions are multiples of the largest unit that divides both."""
    unit = Fraction(1, math.lcm(Fraction(value).denominator, Fraction(whole).denominator))
    total = int(whole / unit)
    small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    divisors = [n * unit for n in (*small, *(total // n for n in reversed(small)))]
    below = max((n for n in divisors if n <= value), default=unit)
    above = min((n for n in divisors if n >= value), default=divisors[-1])
    return f"{show(below)} or {show(above)}" if below < above else show(below)


def show(value: float | Fraction) -> str:
    """Writes a number as in a config, or as a fraction if its decimals do not end."""
    number = plain_number(exact(value))
    return str(number) if Fraction(str(number)) == exact(value) else str(value)
