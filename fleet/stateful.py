"""The interface for state that snapshots save, and whose times are shifted when the clock is set.

`service/pipeline/stateful.py` lists all such state.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

Dump = tuple[Any, dict[str, NDArray[Any]]]


class Stateful(Protocol):
    """A part of the state that outlives its process."""

    def dump(self) -> Dump:
        """Return a copy of the state: values that msgpack can encode, and arrays by name."""

    def load(self, about: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Load a dump into a new part. The arrays are read-only.

        Raises ValueError, KeyError, IndexError, TypeError or msgspec's errors if the dump is not valid.
        """

    def shift_times(self, by_ms: int) -> None:
        """Shift observed times after the clock was set by `by_ms`. Times stated in events do not change."""
        return
