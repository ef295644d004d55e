"""The answer to `POST /v1/jobs/estimate`: what similar jobs needed, beside what the placer says of the start. Pure.

Run time and needs come from the board's tables of kinds, so they are told while the pipeline or the placer is away;
what nobody knows is null, with the reason under its name in `reasons`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from features.run_history import JobShape
from fleet.requests import PlacementRequest, ignored_facts
from service.board import Board
from service.kind_tables import Needs, RunTime, needs, run_time

NO_RUNS = "no job has ended yet that it could be compared with"
NO_READINGS = "telemetry saw no finished job of this user's name or size, nor of this size in this queue"
COMPARED_BY = ("queue",)  # `features.similarity.kinds`, of the facts that no decision heeds
DAY_S, HOUR_S, MINUTE_S = 86_400, 3600, 60


@dataclass(frozen=True, slots=True)
class Start:
    """What the placer says: its answer, or `why` there is none."""

    answer: Mapping[str, Any] | None
    why: str = ""


def shape_of_request(request: PlacementRequest) -> JobShape:
    """The job that a request would be, at its full size."""
    return JobShape(
        user=request.user,
        name=request.job_name,
        queue=request.queue,
        class_=request.class_,
        gpus=request.members.desired * request.gpus_per_node,
        cpus=request.cpus,
        limit_s=request.limit_s,
    )


def estimate(board: Board, request: PlacementRequest, start: Start, as_of_ms: int) -> dict[str, Any]:
    """The body, as `service.routes.shapes.Estimate` has it."""
    shape = shape_of_request(request)
    run, likely = run_time(board, shape), needs(board, shape)
    started = start.answer or {}
    memory_gib, power_w = _needed(likely, shape.gpus)
    missing = {
        "run_s": "" if run else NO_RUNS,
        "peak_gpu_memory_gib": "" if memory_gib is not None else _why(likely, "GPU memory"),
        "power_w": "" if power_w is not None else _why(likely, "power"),
        "start_ms": "" if started.get("start_ms") else start.why or str(started.get("sentence", "")),
    }
    return {
        "as_of_ms": as_of_ms,
        "request_id": request.request_id,
        "run_s": run.quantiles if run else None,
        "peak_gpu_memory_gib": memory_gib,
        "power_w": power_w,
        "start_ms": started.get("start_ms"),
        "blocked_by": started.get("blocked_by", []),
        "constraint": started.get("constraint"),
        "sentence": sentence(start, run, shape.limit_s),
        "model": run.model if run else None,
        "similar": {
            "run_s": run.kind if run else None,
            "needs": likely.kind if likely else None,
            "runs_seen": run.runs if run else 0,
        },
        "reasons": {name: why for name, why in missing.items() if why},
        "ignored": ignored_facts(request, COMPARED_BY),
    }


def _needed(likely: Needs | None, gpus: float) -> tuple[float | None, float | None]:
    """GPU memory (GiB of the fullest GPU) and power (W, of all its GPUs)."""
    if likely is None:
        return None, None
    memory_gib = None if likely.gpu_memory_gib is None else round(likely.gpu_memory_gib, 1)
    return memory_gib, None if likely.power_w is None else float(round(likely.power_w * gpus))


def _why(likely: Needs | None, what: str) -> str:
    return NO_READINGS if likely is None else f"telemetry told no {what} of the {likely.runs} finished jobs like it"


def sentence(start: Start, run: RunTime | None, limit_s: float | None = None) -> str:
    """When it starts, and for how long it should run; its limit is named where that is what it runs into."""
    begins = str(start.answer["sentence"]) if start.answer else f"when it starts is not known: {start.why}"
    if run is None:
        return f"{begins}. Nothing is known yet of how long such a job runs."
    likely = run.quantiles
    usual, most = span(likely["p50"]), span(likely["p90"])
    if limit_s is not None and likely["p50"] >= round(limit_s):
        return f"{begins}. It should run {usual}, its limit."
    return f"{begins}. It should run {usual}" + (f" (p90 {most})." if most != usual else ".")


def span(seconds: float) -> str:
    """A duration with what matters of it.

    >>> span(45), span(5400), span(7200), span(90_000), span(59.6 * 60)
    ('45 s', '1 h 30 min', '2 h', '1 day 1 h', '1 h')
    """
    if seconds < 2 * MINUTE_S:
        return f"{round(seconds)} s"
    size, small = (DAY_S, HOUR_S) if seconds >= DAY_S else (HOUR_S, MINUTE_S)
    large, rest = divmod(round(seconds / small), size // small)
    names = ("day" if large == 1 else "days", "h") if size == DAY_S else ("h", "min")
    parts = [f"{count} {name}" for count, name in zip((large, rest), names, strict=True) if count]
    return " ".join(parts)
