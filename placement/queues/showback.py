"""Showback: charges summed by queue, user, class or pool within a span of time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from fleetcast.placement.queues.charges import Charge, HeldGpus, compute_overlap_s
from fleetcast.placement.queues.tree import Prices

PREEMPTED = "preempted"
By = Literal["queue", "user", "class", "pool"]


@dataclass(slots=True)
class ChargeSum:
    """A sum of charges in GPU-seconds.

    used: GPU-seconds in which telemetry saw the GPUs busy. seen: granted GPU-seconds that telemetry covers.
    lost: GPU-seconds since the last checkpoint of failed jobs. preempted: the part of `granted` that
    preempted attempts held.
    """

    jobs: int = 0
    granted: float = 0.0
    promised: float = 0.0
    used: float = 0.0
    seen: float = 0.0
    lost: float = 0.0
    preempted: float = 0.0
    waited: float = 0.0
    money: float | None = None


def sum_charges(charges: Iterable[Charge], by: By, from_ms: int, to_ms: int, prices: Prices) -> dict[str, ChargeSum]:
    """Return name → the sum of the charges of that queue, user, class or pool within [from, to).

    A charge's used time counts in proportion to its granted time in that span. Its lost time counts if
    the charge ended within the span.
    """
    found: dict[str, ChargeSum] = {}
    for charge in charges:
        for name, held in _group_held_gpus(charge, by).items():
            row = found.setdefault(name, ChargeSum())
            _add_charge(row, charge, held, from_ms, to_ms, prices)
    return dict(sorted(found.items()))


def _group_held_gpus(charge: Charge, by: By) -> Mapping[str, tuple[HeldGpus, ...]]:
    if by == "pool":
        pools = {row.pool for row in charge.held}
        return {pool: tuple(row for row in charge.held if row.pool == pool) for pool in pools}
    return {{"queue": charge.leaf, "user": charge.user, "class": charge.class_}[by]: charge.held}


def _add_charge(
    row: ChargeSum, charge: Charge, held: tuple[HeldGpus, ...], from_ms: int, to_ms: int, prices: Prices
) -> None:
    gpus = sum(part.gpus for part in held)
    part_of = gpus / charge.gpus if charge.gpus else 0.0
    begun_ms = charge.started_ms if charge.started_ms is not None else charge.ended_ms
    granted_s = (
        compute_overlap_s(charge.started_ms, charge.ended_ms, from_ms, to_ms) if charge.started_ms is not None else 0.0
    )
    row.jobs += 1
    row.granted += gpus * granted_s
    row.promised += gpus * compute_overlap_s(charge.held_ms, begun_ms, from_ms, to_ms) if charge.request_id else 0.0
    if charge.queued_ms is not None:
        row.waited += gpus * compute_overlap_s(charge.queued_ms, charge.held_ms, from_ms, to_ms)
    until_ms = to_ms if charge.ended_ms is None else charge.ended_ms
    whole_s = (
        compute_overlap_s(charge.started_ms, charge.ended_ms, 0, until_ms) if charge.started_ms is not None else 0.0
    )
    if charge.used_gpu_s is not None and whole_s:
        row.used += charge.used_gpu_s * part_of * granted_s / whole_s
        row.seen += gpus * granted_s
    if charge.lost_gpu_s is not None and charge.ended_ms is not None and from_ms <= charge.ended_ms < to_ms:
        row.lost += charge.lost_gpu_s * part_of
    if charge.outcome == PREEMPTED:
        row.preempted += gpus * granted_s
    for part in held:
        price = prices.find_price(part.model)
        if price is not None:
            row.money = (row.money or 0.0) + price * part.gpus * granted_s / 3600
