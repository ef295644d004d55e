"""The rows of `GET /queue`."""

from collections.abc import Sequence

from placement.queue import Waiting
from service.answers.placements import QueueRow

NOT_LOOKED_AT = "will be looked at in the next pass"


def queue_row(
    position: int, entry: Waiting, why: str, start_ms: dict[str, int] | None, ignored: Sequence[str], now_ms: int
) -> QueueRow:
    """One that waits."""
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
    )
