"""A search for the known names that a misspelt name may mean."""

from collections.abc import Sequence
from difflib import get_close_matches

MOST_COMPARED = 1_000  # names that are compared with a wrong one
LONGEST_COMPARED = 64  # characters


def find_nearest_names(name: str, known: Sequence[str], most: int, cutoff: float = 0.6) -> list[str]:
    """Return the known names with a similar spelling, at most `most`, the nearest first.

    Only a bounded number of short names is compared.

    >>> find_nearest_names("weigth", ["limit", "weight"], 1), find_nearest_names("x" * 1000, ["x" * 1000], 1)
    (['weight'], [])
    """
    if len(name) > LONGEST_COMPARED:
        return []
    short = [one for one in known if len(one) <= LONGEST_COMPARED and abs(len(one) - len(name)) <= len(name)]
    return get_close_matches(name, short[:MOST_COMPARED], n=most, cutoff=cutoff)
