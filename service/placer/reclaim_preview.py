"""The answer to a dry run that was refused: what a pass would stop or shrink for the request. Nothing is recorded."""

import asyncio

from msgspec import structs

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.actions.action import JobAction
from fleetcast.placement.actions.words import describe_action
from fleetcast.placement.plan.queue import Plan
from fleetcast.service.answers.actions import PlacementAnswer, PreviewedAction, ReclaimPreview
from fleetcast.service.http.table import encode
from fleetcast.service.placer.own_queues import decode
from fleetcast.service.placer.queue_pass import QueuePass
from fleetcast.service.placer.reclaim import make_actions
from fleetcast.service.placer.service import PlacementService


class DryRuns:
    """The refused dry runs of one placer. One pass is computed at a time, in a thread."""

    def __init__(self, service: PlacementService) -> None:
        self._service = service
        self._computing = asyncio.Lock()

    async def add_preview(self, request: PlacementRequest, reply: bytes) -> bytes:
        """Return the reply to a dry run with what a pass would stop for its request.

        A placement comes back unchanged, and so does any reply where no pass may stop jobs.
        """
        tree = self._service.queues.tree
        if tree is None or tree.policy.reclaim.mode == "off":
            return reply
        decision = decode(reply)
        if decision.outcome != "refused":
            return reply
        async with self._computing:
            begun = self._service.backlog.make_preview(request)
            planned = await asyncio.to_thread(begun.compute_plan)
        found = self._make_preview(request, begun, planned)
        return encode(PlacementAnswer(**structs.asdict(decision), reclaim=found))

    def _make_preview(self, request: PlacementRequest, begun: QueuePass, planned: Plan) -> ReclaimPreview:
        request_id, facts, proposal = request.request_id, begun.reclaim, planned.proposal
        for entry, placed in planned.placed:
            if entry.request.request_id == request_id:
                return ReclaimPreview(code="starts", sentence=placed.sentence, ranks=placed.ranks)
        if facts is None or proposal is None or proposal.request.request_id != request_id:
            waits = (*planned.waiting, *begun.make_stranded_waits(planned))
            why = next((wait.why for wait in waits if wait.entry.request.request_id == request_id), "")
            return ReclaimPreview(code="waits", sentence=why or "its attempt runs, has ended or was promised GPUs")
        if proposal.victims is None:
            return ReclaimPreview(code=proposal.code, sentence=proposal.sentence)
        now_ms = begun.options.now_ms
        actions = make_actions(proposal, begun.observed, facts.policy, now_ms, self._service.advisor.find_executor)
        return ReclaimPreview(
            code=proposal.code,
            sentence=proposal.sentence,
            actions=[make_previewed_action(action) for action in actions],
            cost_gpu_s=sum(action.cost.total for action in actions),
            ranks=proposal.victims.decision.ranks,
            not_before_ms=_find_queued_ms(request_id, begun) + round(1000 * facts.policy.patience_s),
        )


def _find_queued_ms(request_id: str, begun: QueuePass) -> int:
    return next(entry.queued_ms for entry in begun.queue if entry.request.request_id == request_id)


def make_previewed_action(action: JobAction) -> PreviewedAction:
    return PreviewedAction(
        kind=action.kind,
        job=action.job,
        attempt=action.attempt,
        queue=action.queue,
        gpus=action.gpus,
        ranks=action.ranks,
        places=action.places,
        executor=action.executor,
        cost=action.cost,
        cost_gpu_s=action.cost.total,
        sentence=describe_action(action),
    )
