"""LearnedState: a base class for state that learns its arrays tick by tick."""

from collections.abc import Mapping
from typing import Any, ClassVar

from numpy.typing import NDArray


class LearnedState:
    """A part of the state that saves the attributes named by `arrays` and `times`.

    When the clock is set, the times move with it. A time of 0 is unset and stays 0.
    """

    arrays: ClassVar[tuple[str, ...]]
    times: ClassVar[tuple[str, ...]] = ()

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy of the state for a snapshot."""
        arrays = {name: getattr(self, name).copy() for name in self.arrays}
        return {name: getattr(self, name) for name in self.times}, arrays

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the state that `dump` returned."""
        for name in self.arrays:
            setattr(self, name, arrays[name].copy())
        for name in self.times:
            setattr(self, name, about[name])

    def shift_times(self, by_ms: int) -> None:
        """Shift all stored times by `by_ms`, because the clock was set."""
        for name in self.times:
            setattr(self, name, getattr(self, name) and getattr(self, name) + by_ms)
