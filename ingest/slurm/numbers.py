"""A parser of number lists in Slurm's notation: `1-3,7-11:2`."""

import re

SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")


def expand_numbers(text: str, most: int) -> list[int]:
    """Expand a list of ranges into numbers, at most `most` of them. Returns [] for other text.

    >>> expand_numbers("1-3,7-11:2", 100), expand_numbers("1-9", 4), expand_numbers("x", 4)
    ([1, 2, 3, 7, 9, 11], [1, 2, 3, 4], [])
    """
    found: list[int] = []
    for part in text.split(",", most)[:most]:
        match = SPAN.fullmatch(part.strip())
        if match is None:
            return []
        first = int(match[1])
        last, step = int(match[2] or first), max(1, int(match[3] or 1))
        found += range(first, min(last, first + (most - len(found)) * step) + 1, step)
        if len(found) >= most:
            return found[:most]
    return found


def count_numbers(text: str, most: int) -> int:
    """Return how many numbers a list of ranges has, at most `most`.

    >>> count_numbers("0-4999,7000", 10**6), count_numbers("0-9:4", 100)
    (5001, 3)
    """
    found = 0
    for span in SPAN.finditer(text):
        first, step = int(span[1]), max(1, int(span[3] or 1))
        found += max(0, int(span[2] or first) - first) // step + 1
    return min(found, most)
