"""Functions that sort rows, find runs of equal rows and compute medians faster than numpy's own."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def sort_rows_by_keys(*keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (k,) int64 row indices, sorted by keys of 0 or more. The last key counts most.

    Among equal rows the first comes first. Small keys are sorted as integers of at most 16 bits, for
    which numpy has a much faster sort.

    >>> sort_rows_by_keys(np.array([0, 1, 0, 1]), np.array([1, 0, 0, 1])).tolist()
    [2, 1, 0, 3]
    """
    narrow = [key.astype(np.min_scalar_type(int(key.max(initial=0)))) for key in keys]
    return np.lexsort(narrow) if len(narrow) > 1 else narrow[0].argsort(kind="stable")


def find_run_begins(*keys: NDArray[Any]) -> NDArray[np.bool_]:
    """Return (k,) whether a row differs from the row before it in any key.

    >>> find_run_begins(np.array([3, 3, 5]), np.array([0, 0, 0])).tolist()
    [True, False, True]
    """
    new = np.empty(len(keys[0]), bool)
    new[:1] = True
    np.not_equal(keys[0][1:], keys[0][:-1], out=new[1:])
    for key in keys[1:]:
        new[1:] |= key[1:] != key[:-1]
    return new


def is_ascending(values: NDArray[Any]) -> bool:
    """Return whether no value is lower than the one before it.

    >>> is_ascending(np.array([1, 1, 4])), is_ascending(np.array([2, 1]))
    (True, False)
    """
    return bool((values[1:] >= values[:-1]).all())


def compute_median(values: NDArray[np.float64]) -> float:
    """Return the median of numbers without NaN, as `np.median` does. It is 0 without numbers.

    >>> compute_median(np.array([4.0, 1.0, 3.0])), compute_median(np.array([4.0, 1.0]))
    (3.0, 2.5)
    """
    if not len(values):
        return 0.0
    half, odd = divmod(len(values), 2)
    parted = np.partition(values, half)
    upper: float = parted.item(half)
    return upper if odd else (parted.item(parted[:half].argmax()) + upper) / 2


def find_range(values: NDArray[np.int64]) -> tuple[int, int]:
    """Return the lowest and the highest of one or more numbers. For short columns `argmin` is faster than `min`.

    >>> find_range(np.array([3, 1, 2]))
    (1, 3)
    """
    return values.item(values.argmin()), values.item(values.argmax())


def sort_rows_descending(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return (k,) int64 row indices, sorted by values of 0 or more, the highest first.

    Among equal values the first comes first. The bits of such numbers have the same order as the numbers.

    >>> sort_rows_descending(np.array([0.5, 1.0, 0.0, 1.0])).tolist()
    [1, 3, 0, 2]
    """
    bits = ~values.astype("<f8").view("<u8")
    return np.lexsort(bits.view("<u2").reshape(-1, 4).T)
