"""The readiness checks: conditions under which an api can work, each with a name and a sentence."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from fleetcast.fleet.errors import SourceError
from fleetcast.service.answers.placements import PlacerHealth
from fleetcast.service.api.routes.context import Context
from fleetcast.service.board.age import describe_staleness
from fleetcast.service.board.free import read_gpu_use
from fleetcast.service.board.gpu_use import Occupant, describe_gpu_use
from fleetcast.service.board.mirror import BoardMirror
from fleetcast.service.exit_reason import read_exit_reason
from fleetcast.service.state_identity import explain_refusal

PLACER_S = 1.0  # wall
PROBE = ".ready"
ALL_KNOWN = "what runs where is known"


class ReadinessCheck(msgspec.Struct, frozen=True):
    """The result of one check.

    A check that succeeds also has a sentence, for example with the length of the history.
    """

    name: str
    ok: bool
    sentence: str


async def run_checks(context: Context) -> list[ReadinessCheck]:
    """Run all checks, in the order in which they succeed while the service starts."""
    meta = _read_board_meta(context)
    found = [_check_board(context), _check_occupancy(context, meta), _check_sources(context), _check_history(meta)]
    if context.mirror is not None:
        return [_check_mirror(context.mirror), *found]
    placer, state = await _check_placer(context)
    return [*found, placer, state, await asyncio.to_thread(_check_inbox, context)]


def _check_mirror(mirror: BoardMirror) -> ReadinessCheck:
    """Check that the other api sends its board.

    The replica forwards requests to the same api.
    """
    return ReadinessCheck("mirror", not mirror.problem, mirror.problem or f"{mirror.url} answers")


def _read_board_meta(context: Context) -> Mapping[str, Any]:
    board = context.cache.latest()
    try:
        return dict(board.json("meta")) if board is not None else {}
    except KeyError:
        return {}


def _check_board(context: Context) -> ReadinessCheck:
    board = context.cache.latest()
    if board is None:
        return ReadinessCheck(
            "board",
            False,
            f"no board was published yet: the pipeline is starting or down{_describe_pipeline_ends(context)}",
        )
    age_s = (context.clock.now_ms() - board.as_of_ms) / 1000
    if why := describe_staleness(age_s, context.config.compute_stale_after_s(context.clock)):
        return ReadinessCheck("board", False, why + _describe_pipeline_ends(context))
    return ReadinessCheck("board", True, f"the board is {max(0.0, age_s):.0f} s old")


def _describe_pipeline_ends(context: Context) -> str:
    """Describe why the pipelines ended. Returns "" if none has ended, or if they run on another machine."""
    if context.mirror is not None:
        return ""
    roles = ["pipeline", *(f"pipeline-{number}" for number in range(1, context.config.pipeline.instances))]
    reasons = {role: read_exit_reason(context.config.folder, role) for role in roles}
    return "".join(f"; {role} ended: {words}" for role, words in reasons.items() if words)


def _check_occupancy(context: Context, meta: Mapping[str, Any]) -> ReadinessCheck:
    """Check that the running jobs are known.

    GPUs that are busy without a known job do not fail the check, because the placer avoids them.
    """
    if meta.get("occupancy_known", True):
        board = context.cache.latest()
        unknown = (
            int((read_gpu_use(board) == Occupant.UNKNOWN).sum()) if board is not None and "gpu.job" in board else 0
        )
        known = f"what runs where is known but for this: {describe_gpu_use(unknown, ())}" if unknown else ALL_KNOWN
        return ReadinessCheck("occupancy", True, known)
    why = meta.get("occupancy_unknown") or "what runs where is not known yet"
    return ReadinessCheck("occupancy", False, f"{why}, so nothing is placed")


def _check_sources(context: Context) -> ReadinessCheck:
    """Report the failing sources. This check never fails, because the other sources continue.

    If the inbox fails, the check of the occupancy fails instead.
    """
    board = context.cache.latest()
    reasons = board.json("doc.ingestion").get("sources", ()) if board is not None and "doc.ingestion" in board else ()
    failing = [f"{row['name']} fails ({row['last_error']})" for row in reasons if row.get("failing")]
    sentence = f"{'; '.join(failing)}: started again at most a minute later" if failing else "no source fails"
    return ReadinessCheck("sources", True, sentence)


def _check_history(meta: Mapping[str, Any]) -> ReadinessCheck:
    """Report the length of the history. This check never fails.

    Scores use the history that exists, and hard signals need none.
    """
    warming = meta.get("warming")
    if not warming:
        return ReadinessCheck("history", True, "there is as much history as the models want")
    have, need = warming["have_s"] / 60, warming["need_s"] / 60
    return ReadinessCheck("history", True, f"warming: {have:.0f} of {need:.0f} minutes of history")


async def _check_placer(context: Context) -> tuple[ReadinessCheck, ReadinessCheck]:
    """Check that the placer answers, and that it reports no disagreement between parts of the state."""
    unknown = ReadinessCheck("state", True, "the placer, which compares the parts of the state, does not answer")
    try:
        answer = await context.placer.forward_request("GET", "/healthz", timeout_s=PLACER_S)
    except SourceError as error:
        return ReadinessCheck("placer", False, str(error)), unknown
    if answer.status >= 500:
        return ReadinessCheck(
            "placer", False, f"the placer answers {answer.status}: {_parse_detail(answer.body)}"
        ), unknown
    health = _parse_health(answer.body)
    state = ReadinessCheck(
        "state", not health.doubts, explain_refusal(health.doubts) if health.doubts else "the parts of the state agree"
    )
    if health.warming:
        return ReadinessCheck("placer", False, "the placer has seen no board yet"), state
    return ReadinessCheck("placer", True, "the placer answers"), state


class _Detail(msgspec.Struct):
    detail: str


def _parse_detail(body: bytes) -> str:
    """Return the detail of a problem document. A problem of the placer contains the ledger's own reason."""
    try:
        return msgspec.json.decode(body, type=_Detail).detail
    except msgspec.MsgspecError:
        return "it does not say why"


def _parse_health(body: bytes) -> PlacerHealth:
    try:
        return msgspec.json.decode(body, type=PlacerHealth)
    except msgspec.MsgspecError:
        return PlacerHealth()


def _check_inbox(context: Context) -> ReadinessCheck:
    """Check the inbox by writing a byte.

    Only a write detects a full disk, a quota or a file system that became read-only.
    """
    if context.inbox is None:
        return ReadinessCheck("inbox", False, "the inbox is not open")
    probe = context.config.inbox / f"{PROBE}.{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink(missing_ok=True)
    except OSError as error:
        return ReadinessCheck("inbox", False, f"the inbox cannot be written: {error.strerror}")
    return ReadinessCheck("inbox", True, "the inbox can be written")
