"""Slots: the free part of each GPU in thousandths, so that several requests can share one GPU."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import WHOLE_GPU

WHOLE = WHOLE_GPU  # thousandths; int16 holds them

Milli = NDArray[np.int16]


def convert_to_milli(free: NDArray[np.bool_]) -> Milli:
    """Return the free thousandths of GPUs: 1000 for a free GPU, 0 for any other.

    >>> convert_to_milli(np.array([True, False])).tolist()
    [1000, 0]
    """
    return np.multiply(free, WHOLE, dtype=np.int16)


def count_true_per_row(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return (n,) the number of true values in each row of (n, g)."""
    if mask.shape[1] > 255:
        return np.asarray(np.count_nonzero(mask, axis=1))
    return np.asarray(np.einsum("ng->n", mask.view(np.uint8)), np.int64)  # five times as fast


@dataclass(frozen=True, slots=True)
class HeldParts:
    """The k parts of GPUs that jobs hold, (k,) each.

    job: index into the view's jobs. gpu: flat index into (n, g). milli: thousandths.
    """

    job: NDArray[np.int64]
    gpu: NDArray[np.int64]
    milli: NDArray[np.int64]

    def append_parts(self, rows: list[tuple[int, int, int]]) -> "HeldParts":
        """Return these parts followed by `rows`, which are (job, gpu, milli) each."""
        if not rows:
            return self
        more = np.array(rows, np.int64).T
        return HeldParts(
            *(np.append(old, new) for old, new in zip((self.job, self.gpu, self.milli), more, strict=True))
        )


NO_PARTS = HeldParts(*(np.zeros(0, np.int64),) * 3)


def list_held_parts(holders: NDArray[np.int32], parts: HeldParts) -> HeldParts:
    """Return the whole GPUs and the parts of GPUs that jobs hold, in the order of the jobs.

    holders: (n, g) the index of the job that holds the whole GPU, -1 for none. parts: the held parts of
    GPUs.
    """
    flat = holders.ravel()
    whole = np.flatnonzero(flat >= 0)
    whole = whole[~np.isin(whole, parts.gpu)] if len(parts.gpu) else whole
    job = np.append(flat[whole].astype(np.int64), parts.job)
    gpu = np.append(whole, parts.gpu)
    milli = np.append(np.full(len(whole), WHOLE, np.int64), parts.milli)
    order = np.argsort(job, kind="stable")
    return HeldParts(job[order], gpu[order], milli[order])


def choose_fullest_slots(free: Milli, share: int, members: int) -> list[int]:
    """Choose a slot for each of several equal parts of GPUs, and return the indices of the slots.

    Each part gets the fullest slot that has room for it, the first of equals. free: (g,) free thousandths.
    share: thousandths of one part.

    >>> choose_fullest_slots(np.array([1000, 300, 500], np.int16), 250, 3)
    [1, 2, 2]
    """
    left, found = free.astype(np.int64), []
    for _ in range(members):
        slot = int(np.argmin(np.where(left >= share, left, 2 * WHOLE)))
        left[slot] -= share
        found.append(slot)
    return found


def subtract_held_parts(milli: Milli, usable: NDArray[np.bool_], parts: HeldParts) -> Milli:
    """Return (n, g) the free thousandths, less the parts of usable GPUs that jobs hold.

    GPUs without held parts are unchanged. milli, usable: (n, g).
    """
    left = milli.astype(np.int64)
    flat = left.ravel()
    flat[parts.gpu] = np.where(usable.ravel()[parts.gpu], WHOLE, 0)
    np.subtract.at(flat, parts.gpu, parts.milli)
    return np.maximum(left, 0).astype(np.int16)
