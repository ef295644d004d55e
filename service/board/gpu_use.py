"""The occupant of each GPU: one definition for the map, nodes, drains, metrics and sentences.

If several apply, the first one counts:

    JOB       a job holds it, as events, labels or its training loop report
    PROMISE   a request was placed on it, and no event says yet that its job runs
    UNKNOWN   telemetry shows it busy, and no event says for whom
    WINDOW    its node is in maintenance: a scheduler says so, or a window of the queue file is open
    RESERVATION   its node is reserved: a scheduler says so, or the queue file reserves it for a queue now
    NOTHING   none of these is known
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

NO_HOLDER = -1


class Occupant(IntEnum):
    """The kind of occupant of a GPU. The board's section `gpu.use` contains these numbers."""

    NOTHING = 0
    UNKNOWN = 1
    PROMISE = 2
    JOB = 3
    WINDOW = 4
    RESERVATION = 5


KEEPS = (Occupant.WINDOW, Occupant.RESERVATION)  # these keep whole nodes


def classify_gpu_use(
    holder: NDArray[np.int32], promise: NDArray[np.int32], unknown_use: NDArray[np.bool_], withheld: NDArray[np.int8]
) -> NDArray[np.int8]:
    """Return the Occupant of each GPU: (n, g) int8.

    holder, promise: (n, g) index of the job and of the request, or NO_HOLDER. unknown_use: (n, g) bool.
    withheld: (n,) WINDOW, RESERVATION or NOTHING for each node.
    """
    uses = [holder != NO_HOLDER, promise != NO_HOLDER, unknown_use]
    return np.select(uses, [Occupant.JOB, Occupant.PROMISE, Occupant.UNKNOWN], withheld[:, None]).astype(np.int8)


def describe_gpu_use(unknown: int, promises: Sequence[tuple[str, int]]) -> str:
    """Describe what uses GPUs apart from jobs. Returns "" if nothing does.

    unknown: the number of GPUs in unknown use. promises: requests, each with the number of its GPUs here.
    """
    parts = []
    if unknown:
        parts.append(f"{format_gpu_count(unknown)} {'is' if unknown == 1 else 'are'} at work; no event says for whom")
    if promises:
        named = ", ".join(f"{request_id!r} ({format_gpu_count(count)})" for request_id, count in promises[:3])
        more = f" and {len(promises) - 3} more" if len(promises) > 3 else ""
        parts.append(f"promised to {named}{more}")
    return "; ".join(parts)


def format_gpu_count(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"
