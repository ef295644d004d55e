"""The answer to `POST /v1/jobs/estimate`: the needs of similar jobs, and the placer's start time.

All functions are pure. Run time and needs come from the board. They need neither the pipeline nor the
placer. `reasons` says why a field is null.
"""

from dataclasses import dataclass

import msgspec

from fleetcast.features.past_runs import make_request_shape
from fleetcast.fleet.requests import PlacementRequest, list_ignored_facts
from fleetcast.placement.ahead.start_time import Blocker, StartBasis
from fleetcast.service.answers.estimates import Estimate, RunQuantiles, Similar
from fleetcast.service.board.board import Board
from fleetcast.service.board.kind_tables import GpuNeeds, RunTime, find_expected_needs, find_expected_run_time

NO_RUNS = "no job has ended yet that it could be compared with"
NO_READINGS = "telemetry saw no finished job of this user's name or size, nor of this size in this queue"
COMPARED_BY = ("queue",)  # `fleetcast.features.similarity.kinds`, of the facts that no decision heeds
DAY_S, HOUR_S, MINUTE_S = 86_400, 3600, 60


class StartAnswer(msgspec.Struct, frozen=True):
    """The decoded answer of the placer to a request for a start time.

    The answer may also be the whole Estimate of another api, or a problem with its `detail`.
    """

    start_ms: dict[str, int] | None = None
    as_of_ms: int | None = None
    by: StartBasis | None = None
    blocked_by: tuple[Blocker, ...] = ()
    constraint: str | None = None
    sentence: str = ""
    reasons: dict[str, str] = {}
    detail: str = "the placer has no answer"


NO_START = StartAnswer()


@dataclass(frozen=True, slots=True)
class PlacerEstimate:
    """The start time that the placer estimates, or the reason why there is none.

    If `answer` is None, `why` is the reason.
    """

    answer: StartAnswer | None
    why: str = ""


def make_estimate(board: Board, request: PlacementRequest, start: PlacerEstimate, as_of_ms: int) -> Estimate:
    """Make the estimate of a request from the board and the placer's answer."""
    shape = make_request_shape(request)
    run, likely = find_expected_run_time(board, shape), find_expected_needs(board, shape)
    started = start.answer or NO_START
    memory_gib, power_w = _compute_memory_and_power(likely, shape.gpus)
    missing = {
        "run_s": "" if run else NO_RUNS,
        "peak_gpu_memory_gib": "" if memory_gib is not None else _explain_unknown(likely, "GPU memory"),
        "power_w": "" if power_w is not None else _explain_unknown(likely, "power"),
        "start_ms": "" if started.start_ms else start.why or started.sentence,
    }
    return Estimate(
        as_of_ms=as_of_ms,
        request_id=request.request_id,
        run_s=RunQuantiles(**run.quantiles) if run else None,
        peak_gpu_memory_gib=memory_gib,
        power_w=power_w,
        start_ms=started.start_ms,
        blocked_by=started.blocked_by,
        constraint=started.constraint,
        sentence=describe_estimate(start, run, shape.limit_s),
        model=run.model if run else None,
        similar=Similar(run.kind if run else None, likely.kind if likely else None, run.runs if run else 0),
        reasons={name: why for name, why in missing.items() if why},
        ignored=list_ignored_facts(request, COMPARED_BY),
        start_as_of_ms=started.as_of_ms,
        by=started.by,
    )


def _compute_memory_and_power(likely: GpuNeeds | None, gpus: float) -> tuple[float | None, float | None]:
    """Return the memory of the fullest GPU in GiB, and the power of all GPUs in W.

    Unknown values are None.
    """
    if likely is None:
        return None, None
    memory_gib = None if likely.gpu_memory_gib is None else round(likely.gpu_memory_gib, 1)
    return memory_gib, None if likely.power_w is None else float(round(likely.power_w * gpus))


def _explain_unknown(likely: GpuNeeds | None, what: str) -> str:
    return NO_READINGS if likely is None else f"telemetry reported no {what} of the {likely.runs} finished jobs like it"


def describe_estimate(start: PlacerEstimate, run: RunTime | None, limit_s: float | None = None) -> str:
    """Describe when the job starts and how long it should run.

    The text names the time limit if the job is expected to reach it.
    """
    begins = start.answer.sentence if start.answer else f"when it starts is not known: {start.why}"
    if run is None:
        return f"{begins}. Nothing is known yet of how long such a job runs."
    likely = run.quantiles
    usual, most = format_duration(likely["p50"]), format_duration(likely["p90"])
    if limit_s is not None and likely["p50"] >= round(limit_s):
        return f"{begins}. It should run {usual}, its limit."
    return f"{begins}. It should run {usual}" + (f" (p90 {most})." if most != usual else ".")


def format_duration(seconds: float) -> str:
    """Format a duration in seconds, in at most two units.

    >>> [format_duration(seconds) for seconds in (45, 5400, 7200, 90_000, 59.6 * 60)]
    ['45 s', '1 h 30 min', '2 h', '1 day 1 h', '1 h']
    """
    if seconds < 2 * MINUTE_S:
        return f"{round(seconds)} s"
    size, small = (DAY_S, HOUR_S) if seconds >= DAY_S else (HOUR_S, MINUTE_S)
    large, rest = divmod(round(seconds / small), size // small)
    names = ("day" if large == 1 else "days", "h") if size == DAY_S else ("h", "min")
    parts = [f"{count} {name}" for count, name in zip((large, rest), names, strict=True) if count]
    return " ".join(parts)
