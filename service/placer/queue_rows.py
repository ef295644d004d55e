"""The rows of `GET /queue`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleetcast.placement.ahead.start_time import StartBasis, format_start_time
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.service.answers.placements import QueueRow

NOT_LOOKED_AT = "will be looked at in the next pass"


@dataclass(frozen=True, slots=True)
class StartNotes:
    """Explanations of the start times from one sampling.

    as_of_ms: when the start times were sampled, or None before the first sampling. by: request_id → the
    basis of the start time. unknown: request_id → why the start time is unknown.
    """

    as_of_ms: int | None = None
    by: Mapping[str, StartBasis] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)

    def describe_start(self, request_id: str, start_ms: dict[str, int] | None, now_ms: int) -> str:
        """Describe when a request starts, or why its start time is unknown. Returns "" without either.

        start_ms: quantiles of the start time, or None if it is unknown.
        """
        if start_ms is None:
            why = self.unknown.get(request_id)
            return f"when it starts is not known: {why}" if why else ""
        return format_start_time(start_ms, now_ms) + (" by time limits" if self.by.get(request_id) == "limit" else "")


def make_queue_row(
    position: int,
    entry: WaitingEntry,
    why: str,
    start_ms: dict[str, int] | None,
    ignored: Sequence[str],
    now_ms: int,
    by: StartBasis | None = None,
) -> QueueRow:
    """Make the row of a waiting request. by: the basis of the start time."""
    request = entry.request
    return QueueRow(
        request_id=request.request_id,
        position=position,
        tenant=request.tenant,
        queue=request.queue,
        user=request.user,
        gang=request.members,
        gpus_per_node=request.gpus_per_node,
        priority=request.priority,
        waiting_s=max(0.0, (now_ms - entry.queued_ms) / 1000),
        why=why,
        start_ms=start_ms,
        job=request.job_name,
        ignored=ignored,
        by=by if start_ms is not None else None,
    )
