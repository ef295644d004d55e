"""Pieces of a long JSON array, made once and put together for many answers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SPACE, ZERO, OPEN, CLOSE = b" 0[]"


class Pieces:
    """n values as JSON, each padded with spaces to the longest one and ended by a comma: (n, width) bytes.

    >>> Pieces([b'"a"', b"[1,2]"]).join(np.array([1, 0]))
    b'[[1,2],"a"  ]'
    """

    def __init__(self, values: Sequence[bytes]) -> None:
        width = max(map(len, values), default=0)
        text = b"".join(value.ljust(width) + b"," for value in values)
        self._bytes = np.frombuffer(text, np.uint8).reshape(len(values), width + 1)

    def with_numbers(self, numbers: NDArray[np.int64], at: int) -> "Pieces":
        """The same with a whole number from 0 to 99 in the two bytes from `at` on."""
        made = Pieces(())
        made._bytes = self._bytes.copy()
        tens, units = np.divmod(numbers, 10)
        made._bytes[:, at] = np.where(tens > 0, ZERO + tens, SPACE)
        made._bytes[:, at + 1] = ZERO + units
        return made

    def join(self, rows: NDArray[np.intp]) -> bytes:
        """A JSON array of the values of these rows, in that order; every row must be there."""
        if not len(rows):
            return b"[]"
        text = np.empty(1 + len(rows) * self._bytes.shape[1], np.uint8)
        np.take(self._bytes, rows, axis=0, out=text[1:].reshape(len(rows), -1), mode="clip")  # "raise" would copy
        text[0], text[-1] = OPEN, CLOSE
        return text.tobytes()
