"""The measured effect and detection delay of each kind of fault.

`cli/lab/detection.py` measures them on a small fleet.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

INNOCENT = "innocent_peer"  # a healthy node beside a faulty one, among the decoys


@dataclass(frozen=True, slots=True)
class Sighting:
    """The measured effects of one fault, and how fast it was detected.

    slowdown: step time divided by the usual one. kills_s: seconds until the fault kills the job, inf if
    it never does. hangs: whether the job hangs until then. delay_s: seconds from the first effect to
    the flag, inf if the node is never flagged. p_fail, p_slow: the node's risk within an hour once it
    is flagged.
    """

    kind: str
    slowdown: float = 1.0
    kills_s: float = math.inf
    hangs: bool = False
    delay_s: float = math.inf
    p_fail: float = math.nan
    p_slow: float = math.nan

    @property
    def kills(self) -> bool:
        return math.isfinite(self.kills_s)


@dataclass(frozen=True, slots=True)
class DetectionTable:
    """The measurements of faults and of benign decoys, by kind.

    decoys: the seconds for which each decoy falsely flagged its node, 0 for never.
    """

    faults: Mapping[str, tuple[Sighting, ...]]
    decoys: Mapping[str, tuple[float, ...]]

    def draw_sighting(self, rng: np.random.Generator, kind: str) -> Sighting:
        """Draw one of the measured faults of a kind. All have equal probability."""
        rows = self.faults[kind]
        return rows[int(rng.integers(len(rows)))]

    def summarise(self) -> dict[str, dict[str, float | None]]:
        """Return for each kind the number of measured faults, the detected share and the median delay in s.

        The median covers the detected faults. It is None if no fault was detected.
        """
        return {kind: _summarise_delays([row.delay_s for row in rows]) for kind, rows in self.faults.items()}

    @property
    def false_alarm_share(self) -> float:
        """The share of decoys that flagged their node, from 0 to 1."""
        alarms = [seconds > 0 for rows in self.decoys.values() for seconds in rows]
        return sum(alarms) / max(1, len(alarms))


def _summarise_delays(delays_s: list[float]) -> dict[str, float | None]:
    seen = [delay_s for delay_s in delays_s if math.isfinite(delay_s)]
    return {
        "measured": len(delays_s),
        "seen_share": round(len(seen) / len(delays_s), 3),
        "median_delay_s": round(float(np.median(seen)), 1) if seen else None,
    }
