"""The search for GPUs that are busy although no job holds them, in their exporters' readings.

    at work   something runs on the GPU, memory is in use, or it takes more power than an idle GPU with a context open
    verdict   it changes when the readings of a minute, and at least two of them, contradict it. The first reading of a
              GPU decides at once, because a GPU that is busy when we begin to listen was busy before
    held      a job event decides at once, and after the job's end a new minute begins. Stale readings decide nothing

A GPU counts as busy lately until the readings of a whole minute show it idle. So a job holds its GPUs
through its pauses.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.frame import FeatureFrame
from fleetcast.fleet.stateful import Dump, Stateful

USED_SHARE = 0.05  # of the time, or of the multiprocessors
USED_BYTES = 2.0**31  # a bare context takes 0.6 GiB, and some exporters add 0.5 of the driver's own (H100, measured)
USED_W = 150.0  # an idle H100 with a context open takes 120 W (measured), idle GPUs of all data centres less than 145 W
TURNS_MS = 60_000
NEVER = -1  # no verdict yet; else 0 or 1

Mask = NDArray[np.bool_]


def classify_work(frame: FeatureFrame, rows: NDArray[np.int32]) -> NDArray[np.int8]:
    """Return for each GPU whether it is busy: (n, g) int8, 1 for yes, 0 for no, -1 without a fresh reading.

    rows: (n, g) rows of `frame`.
    """
    marks = (("gpu_util", USED_SHARE), ("sm_active", USED_SHARE), ("fb_used_bytes", USED_BYTES), ("power_w", USED_W))
    known, works = np.zeros(len(frame.values), np.bool_), np.zeros(len(frame.values), np.bool_)
    for name, above in marks:
        if name in frame.names:
            values = frame.column(name)
            known |= np.isfinite(values)
            works |= values > above
    return _arrange_by_node(np.where(known, works.astype(np.int8), np.int8(NEVER)), rows, NEVER)


def _find_last_reading_ms(frame: FeatureFrame, rows: NDArray[np.int32], now_ms: int) -> NDArray[np.int64]:
    """Return the time of each GPU's last reading in Unix ms: (n, g) int64."""
    age_ms = np.nan_to_num(frame.column("age_s").astype(np.float64)) * 1000
    found: NDArray[np.int64] = now_ms - _arrange_by_node(age_ms.astype(np.int64), rows, 0)
    return found


def _arrange_by_node(column: NDArray[Any], rows: NDArray[np.int32], fill: int) -> NDArray[Any]:
    """Return the values of a column by node and GPU: (n, g), `fill` if a GPU has no row."""
    has_row = (rows >= 0) & (rows < len(column))
    if not len(column):
        return np.full(rows.shape, fill, column.dtype)
    return np.where(has_row, column[np.where(has_row, rows, 0)], column.dtype.type(fill))


class UnknownUse(Stateful):
    """The verdicts on the use of all GPUs. Their rows are those of the node table, which only grows."""

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._verdict = np.full((0, 1), NEVER, np.int8)
        self._other_ms = np.full((0, 1), -1, np.int64)  # of the first reading of those in a row that say the other
        self._lately = np.full((0, 1), 0, np.int8)  # 1: at work lately
        self._idle_ms = np.full((0, 1), -1, np.int64)  # time of the first idle reading since, -1: none
        self._restored: dict[str, tuple[list[int], list[int]]] = {}  # node → verdicts, and which were at work lately

    def find_active_gpus(
        self,
        names: Sequence[str],
        frame: FeatureFrame,
        rows: NDArray[np.int32],
        now_ms: int,
        given_back: Mask | None = None,
    ) -> Mask:
        """Return the GPUs that were busy lately: (n, g) bool.

        names: (n,) nodes. rows: (n, g) rows of `frame`. given_back: (n, g) GPUs of jobs that have ended. Their
        past work says nothing about the next job.
        """
        self._make_room(names, rows.shape)
        works, read_ms, lately, idle_ms = (
            classify_work(frame, rows),
            _find_last_reading_ms(frame, rows, now_ms),
            self._lately,
            self._idle_ms,
        )
        if given_back is not None and given_back.shape == lately.shape:
            lately[given_back], idle_ms[given_back] = 0, -1
        lately[works == 1] = 1
        idle = (works == 0) & (lately == 1)
        idle_ms[works == 1] = -1
        begins = idle & (idle_ms < 0)
        idle_ms[begins] = read_ms[begins]
        ended = idle & (read_ms - idle_ms >= TURNS_MS)
        lately[ended], idle_ms[ended] = 0, -1
        found: Mask = lately == 1
        return found

    def update_verdicts(
        self, names: Sequence[str], frame: FeatureFrame, rows: NDArray[np.int32], held: Mask, now_ms: int
    ) -> Mask:
        """Update the verdicts, and return the GPUs in unknown use: (n, g) bool.

        names: (n,) nodes. rows: (n, g) rows of `frame`. held: (n, g) bool, a job holds the GPU.
        """
        self._make_room(names, rows.shape)
        works = classify_work(frame, rows)
        read_ms = _find_last_reading_ms(frame, rows, now_ms)
        verdict, other_ms = self._verdict, self._other_ms
        first = (verdict == NEVER) & (works >= 0)
        verdict[first] = works[first]
        verdict[held] = 0
        differs = (works >= 0) & (works != verdict) & ~held
        other_ms[~differs] = -1
        begins = differs & (other_ms < 0)
        other_ms[begins] = read_ms[begins]
        turned = differs & (read_ms - other_ms >= TURNS_MS)
        verdict[turned] = works[turned]
        other_ms[turned] = -1
        found: Mask = verdict == 1
        return found

    def _make_room(self, names: Sequence[str], shape: tuple[int, ...]) -> None:
        """Make room for new nodes and GPUs, and fill in verdicts from a snapshot."""
        if self._verdict.shape != shape:
            for name, fill in (("_verdict", NEVER), ("_other_ms", -1), ("_lately", 0), ("_idle_ms", -1)):
                old = getattr(self, name)
                new = np.full(shape, fill, old.dtype)
                n, g = min(len(old), shape[0]), min(old.shape[1], shape[1])
                new[:n, :g] = old[:n, :g]
                setattr(self, name, new)
        self._names = names
        for row, name in enumerate(names) if self._restored else ():
            if restored := self._restored.pop(name, None):
                for column, values in zip((self._verdict, self._lately), restored, strict=True):
                    known = values[: shape[1]]
                    column[row, : len(known)] = known

    def dump(self) -> Dump:
        judged = np.flatnonzero((self._verdict >= 0).any(axis=1)).tolist()
        known = {self._names[row]: (self._verdict[row].tolist(), self._lately[row].tolist()) for row in judged}
        every = {**self._restored, **known}
        width = max((len(lately) for _, lately in every.values()), default=0)
        padded = [lately + [0] * (width - len(lately)) for _, lately in every.values()]
        return {name: verdicts for name, (verdicts, _) in every.items()}, {
            "lately": np.array(padded, np.int8).reshape(len(every), width)
        }

    def load(self, about: Mapping[str, list[int]], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `dump`. Raises ValueError for a number that is not a verdict.

        Snapshots of earlier versions lack `lately`.
        """
        verdicts = [[int(one) for one in row] for row in about.values()]
        if any(one not in (NEVER, 0, 1) for row in verdicts for one in row):
            raise ValueError("a verdict on a GPU that is none of -1, 0, 1")
        lately = (
            (np.asarray(arrays["lately"]) == 1).astype(int).tolist() if "lately" in arrays else [[]] * len(verdicts)
        )
        self._restored = dict(zip(about, zip(verdicts, lately, strict=True), strict=True))

    def shift_times(self, by_ms: int) -> None:
        for times in (self._other_ms, self._idle_ms):
            times[times >= 0] += by_ms
