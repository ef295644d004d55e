"""Growth that was sent and has not ended: `PromisedSets.add_holds` holds its places for the gang.

Before the job's own agent accepts, a pass or a placement may still give the GPUs to a request. The placer withdraws the
growth in the same transaction, and the agent's reply then gets a conflict. From the acceptance on nobody
else gets them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import RankPlacement
from fleetcast.placement.actions.action import ActionKind
from fleetcast.placement.actions.life import ActionRecord
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.promised import make_gang_hold_name
from fleetcast.placement.plan.turns import count_gpus_by_resource
from fleetcast.placement.queues.charges import LeafUse
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.service.placer.action_follow import mask_ranks
from fleetcast.service.placer.view import ObservedFleet


class SentGrowths(NamedTuple):
    """The growths that were sent and have not ended. firm: those that nobody withdraws for a request any more."""

    firm: Sequence[ActionRecord]
    withdrawable: Sequence[ActionRecord]


def list_growths(ledger: Ledger) -> SentGrowths:
    """Return the growths that were sent and have not ended, the oldest first."""
    rows = [row for row in ledger.actions.list_open() if row.action.kind is ActionKind.GROW and row.was_sent]
    return SentGrowths([row for row in rows if row.may_have_begun], [row for row in rows if not row.may_have_begun])


def release_growths(observed: ObservedFleet, growths: SentGrowths) -> ObservedFleet:
    """Return the observed fleet in which the GPUs of growth that may be withdrawn are free."""
    names = {make_gang_hold_name(record.action.job) for record in growths.withdrawable}
    return replace(observed, view=remove_jobs(observed.view, names)) if names else observed


def count_growths(
    growths: SentGrowths, view: ClusterView, use: dict[str, LeafUse], holds: dict[str, QueueHold]
) -> None:
    """Add the GPUs that a view holds for growth to the use of their queues, and to the holds of jobs."""
    for record in (*growths.firm, *growths.withdrawable):
        name, leaf = make_gang_hold_name(record.action.job), record.action.queue
        if name not in view.jobs:
            continue
        amounts = _count_gpus(view, view.holders == view.jobs.index(name))
        known = use.setdefault(leaf, LeafUse({}, 0.0)).held
        for resource, gpus in amounts.items():
            known[resource] = known.get(resource, 0.0) + gpus
        holds[name] = QueueHold(leaf, amounts)


def count_places(places: Sequence[RankPlacement], view: ClusterView) -> dict[str, float]:
    """Return resource → the number of GPUs of these places."""
    return _count_gpus(view, mask_ranks(view, places))


def _count_gpus(view: ClusterView, gpus: NDArray[np.bool_]) -> dict[str, float]:
    return {resource: count for resource, count in count_gpus_by_resource(view, gpus).items() if count}
