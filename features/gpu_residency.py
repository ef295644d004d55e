"""GpuResidency: the share of held GPU time with something in GPU memory, and the share with the GPU computing."""

from collections.abc import Iterable, Mapping
from typing import Any

EVERYTHING = "all"
HALF_LIFE_MS = 86_400_000
LONGEST_MS = 60_000  # an observation counts for no longer
MAX_REMEMBERED = 400

Key = tuple[str, str]  # queue, class
ObservedGpus = tuple[float, float, float]  # GPUs held and known, loaded, active


class GpuResidency:
    """Sums of held, loaded and active GPU time in ms, by (queue, class). Time that is a day old counts half."""

    def __init__(self) -> None:
        self._sums: dict[Key, list[float]] = {}
        self._last_ms: int | None = None

    def record(self, now_ms: int, observed: Mapping[Key, ObservedGpus]) -> None:
        """Add an observation. It counts for the time since the previous one. Ignores an older observation."""
        before = self._last_ms
        if before is not None and now_ms <= before:
            return
        self._last_ms = now_ms
        passed_ms = 0 if before is None else now_ms - before
        faded = 0.5 ** (passed_ms / HALF_LIFE_MS)
        for sums in self._sums.values():
            sums[:] = [value * faded for value in sums]
        for key, gpus in observed.items():
            if key in self._sums or len(self._sums) < MAX_REMEMBERED:
                sums = self._sums.setdefault(key, [0.0, 0.0, 0.0])
                sums[:] = [value + min(passed_ms, LONGEST_MS) * seen for value, seen in zip(sums, gpus, strict=True)]

    def compute_shares(self) -> dict[Key, tuple[float, float]]:
        """Return (queue, class) -> the shares of held GPU time that were loaded and active.

        "all" stands for all queues or classes together.
        """
        sums: dict[Key, list[float]] = {}
        for (queue, class_), seen in self._sums.items():
            for key in {(queue, class_), (queue, EVERYTHING), (EVERYTHING, class_), (EVERYTHING, EVERYTHING)}:
                sums[key] = [value + more for value, more in zip(sums.get(key, (0.0, 0.0, 0.0)), seen, strict=True)]
        return {key: (loaded / held, active / held) for key, (held, loaded, active) in sums.items() if held > 0}

    def dump(self) -> list[list[Any]]:
        """Return a JSON-able copy."""
        return [[self._last_ms], *([*key, *sums] for key, sums in self._sums.items())]

    def load(self, rows: Iterable[list[Any]]) -> None:
        """Restore the result of `dump`."""
        first, *rest = rows
        self._last_ms = first[0]
        self._sums = {(queue, class_): [*sums] for queue, class_, *sums in rest}
