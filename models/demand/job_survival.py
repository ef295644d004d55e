"""JobSurvival: how long started GPUs stay in use, estimated from counts of starts and ends per bin.

The estimate does not need the identities of jobs.

    ages     a[k]   expected GPUs that run now, by how long they have run, in classes of growing width
    hazard   h[k]   the share of a class that ends within a bin

In each bin, a class that spans w bins passes 1 / w of its GPUs on, and started GPUs enter the first
class. Departures are divided among the classes by h[k] * a[k], so that they add up to the counted ends.

The hazard is found by alternating expectation and maximisation. The ages at a bin depend only on
that bin and earlier ones.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

AGES_S = (0, 600, 1200, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, 259_200, 604_800)
"""From where each class reaches up to the next; the last one has no end."""
ROUNDS = 4
SMALLEST_HAZARD, LARGEST_HAZARD = 1e-5, 0.95
FIRST_MEAN_S = 3
SMALLEST_GONE = 1e-9  # GPUs


@dataclass(frozen=True, slots=True)
class JobSurvival:
    """The survival of GPUs in use: how long they stay in use after a start.

    bin_s: the length of a bin. hazard: (age,) share that ends within a bin. mix: (age,) shares of the
    ages at an average moment.
    """

    bin_s: int
    hazard: Array
    mix: Array

    @classmethod
    def fit(cls, started: Array, ended: Array, running: Array, bin_s: int) -> "JobSurvival":
        """Fit the survival to counts of GPUs in each bin: those that started, ended, and ran at its end.

        started, ended, running: (series, bin). NaN starts and ends count as 0.
        """
        widths = _compute_class_widths(bin_s)
        fit = cls(bin_s, np.minimum(1 / (FIRST_MEAN_S * widths), 0.5), np.full(len(AGES_S), 1 / len(AGES_S)))
        bins = np.arange(started.shape[1])
        for _ in range(ROUNDS):
            ages, gone = fit._simulate_ages(started, ended, running, bins)
            seen = ages.sum(axis=(0, 1), dtype=np.float64)
            hazard = np.clip(gone / np.maximum(seen + gone, 1e-9), SMALLEST_HAZARD, LARGEST_HAZARD)
            fit = cls(bin_s, hazard, seen / max(float(seen.sum()), 1e-9))
        return fit

    def compute_ages(self, started: Array, ended: Array, running: Array, bins: NDArray[np.intp]) -> NDArray[np.float32]:
        """Return (series, len(bins), age) the expected GPUs by age at the end of each of `bins`.

        The values at a bin depend only on that bin and earlier ones.
        """
        return self._simulate_ages(started, ended, running, bins)[0]

    def compute_ending_share(self, step: int) -> Array:
        """Return (age,) the share of each age class that ends within `step` bins.

        >>> JobSurvival(600, np.full(13, 0.5), np.full(13, 1 / 13)).compute_ending_share(2).round(2)[0].item()
        0.75
        """
        pass_on = _compute_aging_share(self.bin_s)
        stay = 1 - self.hazard
        move = np.diag((1 - pass_on) * stay) + np.diag(pass_on[:-1] * stay[1:], 1)
        return np.asarray(1 - np.linalg.matrix_power(move, step).sum(axis=1))

    def _simulate_ages(
        self, started: Array, ended: Array, running: Array, bins: NDArray[np.intp]
    ) -> tuple[NDArray[np.float32], Array]:
        """Return (series, len(bins), age) the GPUs by age at the ends of `bins`, and (age,) the GPUs that ended.

        The second array counts all bins up to the last of `bins`.
        """
        begins, ends = np.nan_to_num(started), np.nan_to_num(ended)
        pass_on, hazard = _compute_aging_share(self.bin_s)[:, None], self.hazard[:, None]
        ages = np.empty((len(begins), len(bins), len(AGES_S)), np.float32)
        left = np.zeros(len(AGES_S))
        wanted: dict[int, list[int]] = {}
        for row, bin in enumerate(bins.tolist()):
            wanted.setdefault(bin, []).append(row)
        now = self.mix[:, None] * _estimate_initial_gpus(running, begins - ends)  # (age, series)
        older = np.empty_like(now)
        for bin in range(max(wanted, default=-1) + 1):
            np.multiply(now, pass_on, out=older)
            now -= older
            now[1:] += older[:-1]
            now[0] += begins[:, bin]
            gone = _distribute_departures(now, hazard, ends[:, bin])
            now -= gone
            left += gone.sum(axis=1)
            if bin in wanted:
                ages[:, wanted[bin]] = now.T[:, None]
        return ages, left


def _distribute_departures(ages: Array, hazard: Array, ended: Array) -> Array:
    """Return (age, series) the departures from each age class, divided in proportion to hazard and GPUs.

    They add up to `ended`, or to all GPUs if fewer are left. ages: (age, series). hazard: (age, 1). ended:
    (series,). No class falls below 0.
    """
    gone = ages * hazard
    gone *= ended / np.maximum(gone.sum(axis=0), 1e-12)
    np.minimum(gone, ages, out=gone)
    lacking = ended - gone.sum(axis=0)
    if lacking.max(initial=0.0) > SMALLEST_GONE:
        room = ages - gone
        gone += room * np.clip(lacking / np.maximum(room.sum(axis=0), 1e-12), 0.0, 1.0)
    return gone


def _estimate_initial_gpus(running: Array, net: Array) -> Array:
    """Return (series,) the GPUs that ran before the first bin.

    The estimate is the first known number of running GPUs, less the net starts up to its bin. running: (series,
    bin). net: (series, bin) starts less ends.
    """
    if not running.shape[1]:
        return np.zeros(len(running))
    rows = np.arange(len(running))
    first = np.argmax(np.isfinite(running), axis=1)
    before = np.nan_to_num(running[rows, first]) - np.cumsum(net, axis=1)[rows, first]
    return np.asarray(np.maximum(before, 0.0))


def _compute_class_widths(bin_s: int) -> Array:
    """Return (age,) the number of bins that each age class spans, at least one.

    The last class is as wide as all others together.
    """
    widths = np.diff((*AGES_S, 2 * AGES_S[-1])) / bin_s
    return np.maximum(widths, 1.0)


def _compute_aging_share(bin_s: int) -> Array:
    share = 1 / _compute_class_widths(bin_s)
    share[-1] = 0.0
    return np.asarray(share)
