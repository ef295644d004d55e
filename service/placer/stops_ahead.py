"""The stops that sampled futures know: those that were sent, and the rules by which passes will stop jobs."""

from fleetcast.placement.actions.life import ActionState
from fleetcast.placement.ahead.stops import SentStop, StopsAhead
from fleetcast.service.placer.promised_sets import make_freed_hold_name
from fleetcast.service.placer.service import PlacementService
from fleetcast.service.placer.view import ObservedFleet


def make_stops_ahead(service: PlacementService, observed: ObservedFleet) -> StopsAhead:
    """Return the stops ahead of a placer that acts. While nothing is sent, only those that were sent remain."""
    now_ms, control, tree = service.clock.now_ms(), service.actions, service.queues.tree
    grace_s = tree.policy.reclaim.grace_s if tree is not None else 0.0
    sent, promises = {}, service.view.promised_sets.make_promises(now_ms)
    for found in service.view.promised_sets.list_followed(now_ms):
        payer = found.row.payer
        sent_ms = [ms for record in found.records if (ms := record.find_time_ms(ActionState.SENT)) is not None]
        if found.is_live and sent_ms and payer in promises:
            freed = {make_freed_hold_name(record.action.job) for record in found.records}
            holds = promises[payer].holds | freed
            sent[payer] = SentStop((now_ms - max(sent_ms)) / 1000, promises[payer].stopping, holds)
    facts = None if control.switches.stops_sending else service.backlog.make_reclaim_input(observed, now_ms)
    return StopsAhead(facts, control.estimate_stop_s(grace_s), sent, promises)
