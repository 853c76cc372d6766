"""The arithmetic of policies: functions of numbers or arrays, alike under NumPy, JAX and numba.

Called with arrays, a function runs in the namespace its arguments are of (NumPy, or `jax.numpy` inside the scan);
compiled by numba, it is an overload for single numbers. A policy that computes with these, with operators and with
comparisons is one source for all three.

Three rules keep the results equal bit for bit:
- float constants that meet float32 values go through `f4`, since numba widens a float32 times a Python constant;
- a float product that something is added to goes through `rounded`, or XLA contracts the two into one rounding;
- a float32 division goes through `quotient`, or XLA makes it a product with a reciprocal.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import overload, register_jitable

helper = register_jitable
"""Decorates a function of its own that a policy calls."""

MINUS_INFINITY = np.float32("-inf")


def _namespace(*values: Any) -> Any:
    """The array namespace of the first value that has one; NumPy of plain numbers."""
    for value in values:
        if hasattr(value, "__array_namespace__"):
            return value.__array_namespace__()
    return np


def where(condition: Any, a: Any, b: Any) -> Any:
    """`a` where the condition holds, else `b`."""
    return _namespace(condition, a, b).where(condition, a, b)


def isfinite(a: Any) -> Any:
    """Neither NaN nor infinite."""
    return _namespace(a).isfinite(a)


def minimum(a: Any, b: Any) -> Any:
    """The lesser of two."""
    return _namespace(a, b).minimum(a, b)


def maximum(a: Any, b: Any) -> Any:
    """The greater of two."""
    return _namespace(a, b).maximum(a, b)


def floor(a: Any) -> Any:
    """The largest whole number not above `a`, in its own type."""
    return _namespace(a).floor(a)


def f4(a: Any) -> Any:
    """As float32."""
    return _namespace(a).asarray(a, dtype=np.float32)[()]


def f8(a: Any) -> Any:
    """As float64."""
    return _namespace(a).asarray(a, dtype=np.float64)[()]


def i8(a: Any) -> Any:
    """As int64."""
    return _namespace(a).asarray(a).astype(np.int64)[()]


def rounded(product: Any) -> Any:
    """`product`, rounded to its own precision before anything is added to it.

    A compiler may contract a product and the sum that follows into one fused multiply-add, which rounds once where
    two operations round twice and decides some near-ties differently. A select between the two keeps XLA from doing
    so (tests/test_rounding.py shows both); NumPy and numba round every product as it is. Spec: engine-semantics,
    section 1.
    """
    xp = _namespace(product)
    return product if xp is np else xp.where(product == product, product, xp.asarray(np.nan, product.dtype))


def quotient(dividend: Any, divisor: Any) -> Any:
    """`dividend / divisor` as one correctly rounded float32 division.

    XLA turns a division by a broadcast value into a product with its reciprocal, which rounds twice and misses
    NumPy's and ggml's quotient in a quarter of cases. In float64 either form is so close that rounding it to float32
    gives the float32 quotient.
    """
    return f4(f8(dividend) / f8(divisor))


def ldexp(a: Any, exponent: Any) -> Any:
    """float64 `a` times two to the power of a whole number from -1022 to 1023, exact where the result is normal."""
    xp = _namespace(a, exponent)
    if xp is np:
        return a * np.ldexp(1.0, exponent)
    # `jax.numpy.ldexp` goes by way of a power, whose last bit is XLA's own.
    return a * (exponent.astype(np.int64) + 1023 << 52).view(np.float64)


# Numba compares the arguments of an overload and of what it returns, annotations and all: these have none.


@overload(where)
def _where(condition, a, b):
    def scalar(condition, a, b):
        if condition:
            return a
        return b

    return scalar


@overload(isfinite)
def _isfinite(a):
    return lambda a: math.isfinite(a)


@overload(minimum)
def _minimum(a, b):
    return lambda a, b: min(a, b)


@overload(maximum)
def _maximum(a, b):
    return lambda a, b: max(a, b)


@overload(floor)
def _floor(a):
    return lambda a: np.floor(a)


@overload(f4)
def _f4(a):
    return lambda a: np.float32(a)


@overload(f8)
def _f8(a):
    return lambda a: np.float64(a)


@overload(i8)
def _i8(a):
    return lambda a: np.int64(a)


@overload(rounded)
def _rounded(product):
    return lambda product: product


@overload(quotient)
def _quotient(dividend, divisor):
    return lambda dividend, divisor: np.float32(np.float64(dividend) / np.float64(divisor))


@overload(ldexp)
def _ldexp(a, exponent):
    return lambda a, exponent: math.ldexp(a, exponent)
