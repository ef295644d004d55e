"""Charges: the GPUs that each attempt of a job held, for how long, and for which queue and user.

The use of queues is computed from the charges. A charge opens with a placement, or when a job appears that
the placer did not place. It closes when the GPUs are free again. Use decays with a half-life h. For g GPUs
from a to b, the use at a time t ≥ b has the closed form:

    u(t) = g · h/ln 2 · (2^(−(t − b)/h) − 2^(−(t − a)/h))

So it is the same after a restart, and does not depend on when it is computed.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from fleetcast.placement.queues.tree import ANY

LN2 = math.log(2)


@dataclass(frozen=True, slots=True)
class HeldGpus:
    """GPUs of one model in one pool."""

    pool: str
    model: str
    gpus: float


@dataclass(frozen=True, slots=True)
class Charge:
    """The GPUs of an attempt from `held_ms`, when they were promised, until `ended_ms`.

    ended_ms: None while they are held. started_ms: when the job began, according to events. expected_s: the
    median of its run time as predicted at the placement. outcome: finished, failed, preempted, expired,
    cancelled. used_gpu_s: GPU-seconds in which telemetry saw the GPUs busy. lost_gpu_s: GPU-seconds since the
    last checkpoint of a job that failed. Both are None if unknown. leaf: "" without a queue.
    """

    charge_id: int
    request_id: str
    job: str
    attempt: int
    leaf: str
    user: str
    class_: str
    held: tuple[HeldGpus, ...]
    expected_s: float | None
    queued_ms: int | None
    held_ms: int
    started_ms: int | None = None
    ended_ms: int | None = None
    outcome: str = ""
    used_gpu_s: float | None = None
    lost_gpu_s: float | None = None

    @property
    def gpus(self) -> float:
        return math.fsum(row.gpus for row in self.held)

    @property
    def amounts(self) -> dict[str, float]:
        """Resource → GPUs."""
        found = {ANY: self.gpus}
        for row in self.held:
            if row.model:
                found[row.model] = found.get(row.model, 0.0) + row.gpus
        return found

    def compute_held_gpu_s(self, from_ms: int, to_ms: int) -> float:
        """Return the GPU-seconds held between two times."""
        return self.gpus * compute_overlap_s(self.held_ms, self.ended_ms, from_ms, to_ms)

    def compute_granted_gpu_s(self, from_ms: int, to_ms: int) -> float:
        """Return the GPU-seconds between two times while the job ran."""
        return self.gpus * compute_overlap_s(self.started_ms, self.ended_ms, from_ms, to_ms) if self.started_ms else 0.0


def list_leaf_ancestors(leaf: str) -> list[str]:
    """Return a leaf and the queues above it.

    >>> list_leaf_ancestors("research/nlp/ada")
    ['research', 'research/nlp', 'research/nlp/ada']
    """
    words = leaf.split("/") if leaf else []
    return ["/".join(words[: at + 1]) for at in range(len(words))]


def compute_overlap_s(begin_ms: int | None, end_ms: int | None, from_ms: int, to_ms: int) -> float:
    """Return the seconds that [begin, end) and [from, to) have in common.

    >>> compute_overlap_s(0, 5000, 1000, 9000), compute_overlap_s(7000, None, 1000, 9000)
    (4.0, 2.0)
    """
    begin = from_ms if begin_ms is None else max(begin_ms, from_ms)
    end = to_ms if end_ms is None else min(end_ms, to_ms)
    return max(0, end - begin) / 1000


def decay_use(gpu_s: float, gpus: float, after_s: float, half_life_s: float) -> float:
    """Return decayed GPU-seconds `after_s` seconds later. `gpus` GPUs are held during that time.

    gpu_s: the decayed GPU-seconds at the beginning.

    >>> round(decay_use(100.0, 0.0, 50.0, 50.0), 6)
    50.0
    """
    if after_s <= 0:
        return gpu_s
    left = math.exp2(-after_s / half_life_s)
    return gpu_s * left + gpus * half_life_s / LN2 * (1 - left)


@dataclass(slots=True)
class PastUse:
    """The decayed GPU-seconds of closed charges, summed for each leaf."""

    half_life_s: float
    _known: dict[str, tuple[float, int]] = field(default_factory=dict)  # leaf → (GPU-seconds, as of ms)

    def add(self, charge: Charge) -> None:
        """Add a closed charge."""
        assert charge.ended_ms is not None
        mine = decay_use(0.0, charge.gpus, (charge.ended_ms - charge.held_ms) / 1000, self.half_life_s)
        gpu_s, as_of_ms = self._known.get(charge.leaf, (0.0, charge.ended_ms))
        later_ms = max(as_of_ms, charge.ended_ms)
        gpu_s = decay_use(gpu_s, 0.0, (later_ms - as_of_ms) / 1000, self.half_life_s)
        mine = decay_use(mine, 0.0, (later_ms - charge.ended_ms) / 1000, self.half_life_s)
        self._known[charge.leaf] = (gpu_s + mine, later_ms)

    def compute_use_at(self, now_ms: int) -> dict[str, float]:
        return {
            leaf: decay_use(gpu_s, 0.0, (now_ms - as_of_ms) / 1000, self.half_life_s)
            for leaf, (gpu_s, as_of_ms) in self._known.items()
        }


@dataclass(frozen=True, slots=True)
class LeafUse:
    """The GPUs that a leaf holds (resource → GPUs), and its decayed use.

    A running job counts with at least its expected (median) run time.
    """

    held: dict[str, float]
    decayed_gpu_s: float


def compute_leaf_use(charges: Iterable[Charge], past: PastUse, now_ms: int) -> dict[str, LeafUse]:
    """Return leaf → its use, from open and closed charges.

    Until a running job has run as long as expected, the rest of the expected time counts as used
    already. So a queue ranks behind others at once after it has started many jobs.
    """
    used, held = past.compute_use_at(now_ms), dict[str, dict[str, float]]()
    rate, most_s = -1 / (1000 * past.half_life_s), past.half_life_s / LN2
    for charge in charges:
        mine, total = held.setdefault(charge.leaf, {ANY: 0.0}), 0.0
        for row in charge.held:
            total += row.gpus
            if row.model:
                mine[row.model] = mine.get(row.model, 0.0) + row.gpus
        mine[ANY] += total
        age_ms = max(0, now_ms - charge.held_ms)
        ahead_s = max(0.0, (charge.expected_s or 0.0) - age_ms / 1000)
        used_s = most_s * (1 - math.exp2(rate * age_ms))  # `decay_use` of one GPU
        used[charge.leaf] = used.get(charge.leaf, 0.0) + total * (used_s + ahead_s)
    return {leaf: LeafUse(held.get(leaf, {}), used.get(leaf, 0.0)) for leaf in used.keys() | held.keys()}
