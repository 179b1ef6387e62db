"""Long STAR columns straight from the bytes of their file. Apart from `star`, so that short lists need no compiler."""

from __future__ import annotations

import numpy as np
from numba import njit

_MOST_DIGITS = 15
_POWERS_OF_TEN = np.array([float(10**k) for k in range(_MOST_DIGITS + 1)])


@njit(cache=True, nogil=True)
def plain_numbers(text, starts, lengths):  # type: ignore[no-untyped-def]
    """Numbers such as ``-12.500000``, and which tokens are such: a sign, up to 15 digits, a point; exactly what `float` says.

    A whole number below 2^53 over a power of ten up to 10^22 is rounded once, by the division. What costs time is to fetch a row's bytes, so
    columns that stand together are best read together.

    Parameters
    ----------
    text : (bytes,) uint8
    starts, lengths : (columns, rows) int
        Of the tokens.

    Returns
    -------
    values : (rows, columns) float64
        0 where the token is something else.
    plain : (rows, columns) bool
    """
    columns, n = starts.shape
    values = np.zeros((n, columns))
    plain = np.zeros((n, columns), np.bool_)
    for cell in range(n * columns):
        i, k = cell // columns, cell % columns
        at = np.int64(starts[k, i])
        end = at + np.int64(lengths[k, i])
        negative = at < end and text[at] == 45
        if at < end and (text[at] == 45 or text[at] == 43):
            at += 1
        whole, digits, decimals, points = np.int64(0), 0, 0, 0
        while at < end and digits <= _MOST_DIGITS:
            byte = text[at]
            if 48 <= byte <= 57:
                whole = whole * 10 + np.int64(byte - 48)
                digits += 1
                decimals += points
            elif byte == 46 and points == 0:
                points = 1
            else:
                break
            at += 1
        if at == end and 0 < digits <= _MOST_DIGITS:
            plain[i, k] = True
            value = whole / _POWERS_OF_TEN[decimals]
            values[i, k] = -value if negative else value
    return values, plain
