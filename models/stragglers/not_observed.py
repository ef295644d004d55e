"""Detection of measurements that are missing for a gang.

An answer can then state what it cannot observe, instead of claiming that all is well.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.risk.gpu_signals import LIKELY, OPEN
from fleetcast.models.risk.signals import Mask
from fleetcast.models.stragglers.gang import GangColumns, GangMembers

GPUS, REASONS, PORTS = "GPU telemetry", "clock event reasons and power limits", "InfiniBand counters"
STEPS, RANKS = "step times", "step times of each rank"
HIDES = {  # what cannot be said without it
    GPUS: "which GPU is slow",
    REASONS: "why a clock is low",
    PORTS: "which port is slow",
    STEPS: "how slow it is",
    RANKS: "whose part takes longer",
}


def find_missing_measurements(
    gangs: GangMembers, gpu: GangColumns, port: GangColumns, of: Sequence[int]
) -> list[tuple[str, ...]]:
    """Return the missing measurements of each attempt in `of`, as keys of HIDES.

    of: indices of attempts.
    """
    count = len(gangs.attempts)
    gpus = _has_any_member(
        gangs.of_gpu, np.isfinite(gpu.last["power_w"]) | np.isfinite(gpu.last["sm_clock_mhz"]), count
    )
    open_why = _has_any_member(gangs.of_gpu, np.isin(gpu.last["cap"], (OPEN, LIKELY)), count)
    ports = _has_any_member(gangs.of_port, (port.last["bytes_per_s"] > 0) | (port.mean["bytes_per_s"] > 0), count)
    spans, found = gangs.spans_nodes.tolist(), []
    for at in of:
        attempt = gangs.attempts[at]
        missing = {
            GPUS: not gpus[at],
            REASONS: gpus[at] and open_why[at],
            PORTS: spans[at] and not ports[at],
            STEPS: not attempt.steps,
            RANKS: bool(attempt.steps) and not attempt.rank_steps,
        }
        found.append(tuple(name for name, is_missing in missing.items() if is_missing))
    return found


def _has_any_member(of: NDArray[np.int32], mask: Mask, count: int) -> Mask:
    """Return (attempt,) whether the mask is True for any member of the attempt.

    of: (entity,) index of the attempt.
    """
    return np.bincount(of[mask & (of >= 0)], minlength=count) > 0


def describe_missing_measurements(missing: tuple[str, ...]) -> str:
    """Describe missing measurements as the end of a sentence that names no member.

    Returns "" if none is missing.

    >>> describe_missing_measurements((PORTS, RANKS))
    '; not observed: InfiniBand counters (which port is slow), step times of each rank (whose part takes longer)'
    """
    return f"; not observed: {', '.join(f'{name} ({HIDES[name]})' for name in missing)}" if missing else ""
