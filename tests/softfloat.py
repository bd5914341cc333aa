"""Rounding to binary floating point by the definition, on exact fractions: the oracle's arithmetic.

A value is a pair (sign, magnitude): sign is 1 or -1, magnitude an exact Fraction, or INFINITE, or
NAN. Nothing here uses a machine float.
"""

from __future__ import annotations

from fractions import Fraction

INFINITE, NAN = "infinite", "nan"

# Exponent bits and stored mantissa bits.
FORMATS = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}


def multiply(left, right):
    sign = left[0] * right[0]
    if NAN in (left[1], right[1]) or {left[1], right[1]} >= {INFINITE, 0}:
        return 1, NAN
    if INFINITE in (left[1], right[1]):
        return sign, INFINITE
    return sign, left[1] * right[1]


def add(left, right):
    """The sum of finite values; an exact zero is positive unless both terms are negative zeros."""
    total = left[0] * left[1] + right[0] * right[1]
    if total == 0:
        return (-1 if left[0] == right[0] == -1 else 1), Fraction(0)
    return (1 if total > 0 else -1), abs(total)


def power_below(magnitude):
    """The largest integer e with 2**e <= magnitude, which is above 0."""
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= magnitude else exponent - 1


def round_to(value, name):
    """`value` rounded to the nearest number of the format, ties to the even one."""
    exponent_bits, mantissa_bits = FORMATS[name]
    sign, magnitude = value
    if magnitude in (NAN, INFINITE) or magnitude == 0:
        return value
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = max(1 - bias, power_below(magnitude))
    step = Fraction(2) ** (exponent - mantissa_bits)
    steps, rest = divmod(magnitude, step)
    if rest * 2 > step or (rest * 2 == step and steps % 2):
        steps += 1
    rounded = steps * step
    return (sign, INFINITE) if rounded >= Fraction(2) ** (bias + 1) else (sign, rounded)


def bits_of(value, name):
    """The bit pattern of a value that the format holds exactly."""
    exponent_bits, mantissa_bits = FORMATS[name]
    sign, magnitude = value
    top = (1 << exponent_bits) - 1
    if magnitude == NAN:
        return top << mantissa_bits | 1 << (mantissa_bits - 1)
    sign_bit = (sign < 0) << (exponent_bits + mantissa_bits)
    if magnitude == INFINITE:
        return sign_bit | top << mantissa_bits
    bias = top // 2
    exponent = max(1 - bias, power_below(magnitude)) if magnitude else 1 - bias
    steps = magnitude / Fraction(2) ** (exponent - mantissa_bits)
    assert steps.denominator == 1, "not a number of this format"
    if steps < 1 << mantissa_bits:
        return sign_bit | int(steps)
    return sign_bit | (exponent + bias) << mantissa_bits | int(steps) - (1 << mantissa_bits)


def decode_e4m3(byte):
    sign = -1 if byte & 0x80 else 1
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return sign, NAN
    if exponent == 0:
        return sign, Fraction(mantissa, 8) * Fraction(2) ** -6
    return sign, (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def decode_e2m1(nibble):
    sign = -1 if nibble & 8 else 1
    exponent, mantissa = nibble >> 1 & 3, nibble & 1
    if exponent == 0:
        return sign, Fraction(mantissa, 2)
    return sign, (1 + Fraction(mantissa, 2)) * Fraction(2) ** (exponent - 1)


def decode_e8m0(byte, like):
    if byte == 255:
        return 1, INFINITE
    if byte == 0 and like == "vllm":
        return 1, Fraction(0)
    return 1, Fraction(2) ** (byte - 127)


def exact(number):
    """A finite machine float as a value."""
    return (-1 if str(float(number)).startswith("-") else 1), abs(Fraction(float(number)))
