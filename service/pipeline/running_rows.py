"""The rows of running and ended attempts that the placer reads from the board."""

from collections.abc import Mapping
from statistics import median

from msgspec import structs

from fleetcast.features.episodes import find_episodes
from fleetcast.fleet.held_gpus import NO_COUNTS, count_held_milli
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import Gang
from fleetcast.service.answers.jobs import EndedJobRow, RunningJobRow

RECENT_EDGES = 32  # beginnings and ends; a row is made again at each tick in which the job reports something


def make_running_row(attempt: JobAttempt, held: dict[str, int]) -> RunningJobRow:
    """Return the row of an attempt. held: node → thousandths of GPUs that it holds there."""
    submission = attempt.submission
    ends_ms = [edge.time_ms for edge in attempt.checkpoints if edge.edge == "end"]
    row = RunningJobRow(
        job=attempt.job,
        attempt=attempt.attempt,
        gpus=attempt.gpus,
        started_ms=attempt.started_ms,
        queue=attempt.queue,
        class_=attempt.class_,
        placed_ms=attempt.placed_ms,
        checkpoint_ms=ends_ms[-1] if ends_ms else None,
        held=held,
        members=len(attempt.ranks) or len(attempt.nodes),
        checkpoint_cost_s=find_checkpoint_cost_s(attempt),
    )
    if submission is not None:
        gang = submission.gang
        row.limit_s, row.user, row.priority = submission.limit_s, submission.user, submission.priority
        row.preemptible, row.gpus_per_member = submission.preemptible, submission.gpus_per_node
        row.cpus, row.host_memory_gib = submission.cpus, submission.host_memory_gib
        row.gang = gang if isinstance(gang, Gang) and gang.min < gang.desired else None
    return row


def find_checkpoint_cost_s(attempt: JobAttempt) -> float | None:
    """Return the median duration of the last checkpoints, or else the cost that the submission states."""
    recent = attempt.checkpoints[-RECENT_EDGES:]
    lasts_s = [one.duration_s for one in find_episodes(recent) if one.duration_s is not None]
    if lasts_s:
        return median(lasts_s)
    return attempt.submission.checkpoint_cost_s if attempt.submission else None


def make_ended_row(attempt: JobAttempt, node_gpus: Mapping[str, int] = NO_COUNTS) -> EndedJobRow:
    """Return the row of an ended attempt.

    The occupancy lacks such attempts, so the GPUs that it held come from its events.
    """
    running = structs.asdict(make_running_row(attempt, count_held_milli(attempt, node_gpus)))
    return EndedJobRow(**running, ended_ms=attempt.over_ms or 0, outcome=attempt.outcome)
