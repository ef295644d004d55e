"""Routes for jobs that slow each other on shared hardware, and for isolation checks."""

from typing import Annotated, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.features.co_runs import Keys, make_job_keys
from fleetcast.features.past_runs import JobShape
from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.errors import UnknownEntity
from fleetcast.service.answers.isolation import Isolation, IsolationCheck
from fleetcast.service.api.routes.aged_answer import make_aged_answer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.routes.jobs import find_job_row
from fleetcast.service.board.board import Board
from fleetcast.service.http.access import Scope
from fleetcast.service.http.problems import make_unprocessable_problem
from fleetcast.service.http.request_body import decode_json_body, read_body
from fleetcast.service.http.table import Query, Row, encode
from fleetcast.service.pipeline.documents import round_number
from fleetcast.service.pipeline.jobs.interference import (
    NO_KEYS,
    NOW,
    ON_GPU,
    SECTION,
    ActiveCoRun,
    CoRunTables,
    LearntCoRuns,
    Speeds,
    decode_residuals,
    predict_party_speeds,
)
from fleetcast.service.pipeline.jobs.isolation import (
    DOCUMENT,
    LIMITS,
    NETWORK,
    OBSERVED,
    READINGS,
    IsolationExpectation,
    IsolationReport,
    ObservedGpu,
    check_isolation,
    combine_checks,
)

ShareName = Literal["gpu", "mig", "pcie", "nic", "rail"]
Basis = Literal["rule", "residuals", "observed"]
MOST_GPUS = 1_000_000  # of one job
MOST_OTHERS = 14  # more jobs on a link
NO_JOB = "no job of this name runs or waits here"
NOT_YET = "it was not looked at yet; ask again in some seconds"
NO_BOUND = "a bound needs nine co-runs that were seen here"
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]


class JobLike(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A job that has not been submitted yet."""

    user: Name = ""
    name: Name = ""
    gpus: Annotated[int, msgspec.Meta(ge=1, le=MOST_GPUS)] = 1


class InterferenceQuery(msgspec.Struct, forbid_unknown_fields=True):
    """A query about two jobs. A job that runs or waits is named, and a future job is described.

    others: further jobs, only if all jobs share a link.
    """

    a: Name | JobLike
    b: Name | JobLike
    share: ShareName = "gpu"
    others: Annotated[list[Name | JobLike], msgspec.Meta(max_length=MOST_OTHERS)] = []


class Speed(msgspec.Struct):
    """A job's speed relative to running alone, or null if unknown.

    `lower_90` is also null while too few co-runs were observed for a bound.
    """

    p50: float | None
    lower_90: float | None


class Interference(msgspec.Struct):
    """The predicted speeds of two jobs that share hardware.

    known: both jobs are known. A speed is null if nothing supports it. basis: the evidence. observed: the
    number of observed co-runs of the two jobs, or of their kinds. compatibility: how well the sending phases
    of all jobs on a link avoid each other, from 0 to 1, null on GPUs. shifts_s: by how many seconds each job
    (a, b, others) should begin after a, null if their phases drift. now: a, b → the present speed, if the
    jobs share hardware now. reasons: field or job → why it is unknown.
    """

    as_of_ms: int
    known: bool
    known_a: bool
    known_b: bool
    speed_a: Speed
    speed_b: Speed
    basis: Basis
    observed: int
    sentence: str
    compatibility: float | None = None
    shifts_s: list[float] | None = None
    now: dict[str, ActiveCoRun] = {}
    reasons: dict[str, str] = {}


class ToVerify(msgspec.Struct, forbid_unknown_fields=True):
    node: Name
    gpu: int
    expected: IsolationExpectation


PAIR = msgspec.json.Decoder(InterferenceQuery)
EXPECTED = msgspec.json.Decoder(ToVerify)


async def answer_interference(request: Request, context: Context, query: Query) -> Response:
    """Answer with the predicted speeds of two jobs that share hardware.

    `known` is true only if both jobs are known. If neither is known, no speed is predicted.
    """
    asked = decode_json_body(await read_body(request, context.config.api.max_body_bytes), PAIR)
    cache, board = context.cache, context.cache.get_board()
    if asked.others and asked.share in ON_GPU:
        raise make_unprocessable_problem(
            "others", len(asked.others), "none on a GPU: more than two are reported on a link only"
        )
    shares: dict[str, LearntCoRuns] = cache.get_document(board, SECTION, dict[str, LearntCoRuns])
    known = CoRunTables.from_board(board)
    a, b, *others = (known.find_party(_find_job_keys(known, one)) for one in (asked.a, asked.b, *asked.others))
    residuals = cache.get_or_derive(board, ("co-runs", asked.share), lambda: decode_residuals(shares.get(asked.share)))
    pair_speeds = predict_party_speeds(a, b, asked.share, residuals, others)
    as_of_ms = cache.get_as_of_ms(board, SECTION)
    now = _find_present_speeds(cache.get_document(board, NOW, dict[str, ActiveCoRun]), asked)
    found = _make_interference(pair_speeds, asked.share, now, as_of_ms)
    for name, one, party in (("a", asked.a, a), ("b", asked.b, b)):
        if party.keys == NO_KEYS and isinstance(one, str) and name in found.reasons:
            found.reasons[name] = NOT_YET if find_job_row(cache, board, one) else NO_JOB
    return make_aged_answer(context, board, as_of_ms, encode(found))


def _find_present_speeds(going: dict[str, ActiveCoRun], asked: InterferenceQuery) -> dict[str, ActiveCoRun]:
    """Return a, b → the present speed of that job. Empty unless the two jobs share hardware now."""
    found = {}
    for who, one, other in (("a", asked.a, asked.b), ("b", asked.b, asked.a)):
        row = going.get(one) if isinstance(one, str) else None
        if row is not None and (row.beside, row.share) == (other, asked.share):
            found[who] = row
    return found


def _find_job_keys(known: CoRunTables, asked: str | JobLike) -> Keys | None:
    if isinstance(asked, str):
        return known.find_job_keys(asked)
    return make_job_keys(JobShape(user=asked.user, name=asked.name, gpus=asked.gpus))


def _make_interference(pair_speeds: Speeds, share: str, now: dict[str, ActiveCoRun], as_of_ms: int) -> Interference:
    found = pair_speeds.found
    rows = [Speed(round_number(found.p50[n]), round_number(found.lower_90[n])) for n in range(2)]
    observed = int(found.observed.sum())
    basis: Basis = "observed" if "observed" in found.basis else "residuals" if "residuals" in found.basis else "rule"
    reasons = {}
    if any(row.p50 is not None and row.lower_90 is None for row in rows):
        reasons["lower_90"] = NO_BOUND
    for name, known in zip("ab", pair_speeds.known, strict=True):
        if not known:
            reasons[name] = _explain_unknown(share, any(pair_speeds.known))
    if share not in ON_GPU and pair_speeds.fit is None:
        reasons["compatibility"] = "needs steps of every job that report how much of them is communication"
    elif pair_speeds.fit is not None and pair_speeds.fit.shifts_s is None:
        reasons["shifts_s"] = "the steps of these jobs drift against each other, so no shift stays"
    return Interference(
        as_of_ms=as_of_ms,
        known=all(pair_speeds.known),
        known_a=pair_speeds.known[0],
        known_b=pair_speeds.known[1],
        speed_a=rows[0],
        speed_b=rows[1],
        basis=basis,
        observed=observed,
        sentence=_describe_speeds(pair_speeds.known, rows, share, basis, observed) + _describe_slow_jobs(now),
        compatibility=None if pair_speeds.fit is None else round_number(pair_speeds.fit.compatibility),
        shifts_s=None
        if pair_speeds.fit is None or pair_speeds.fit.shifts_s is None
        else [round(at, 4) for at in pair_speeds.fit.shifts_s],
        now=now,
        reasons=reasons,
    )


def _explain_unknown(share: str, other_known: bool) -> str:
    """Explain why a job is unknown. If the other job is known, also say what is assumed about this one."""
    if share not in ON_GPU:
        why = "no steps of it, or of its like, reported their communication"
        so = ""
    else:
        why = "it, or its like, was not seen alone for a minute"
        so = ": it is assumed to use all there is" if share == "gpu" else ""
    return why + (so if other_known else "")


def _describe_slow_jobs(now: dict[str, ActiveCoRun]) -> str:
    """Describe each of the two jobs that now runs slower than its lower bound, in a sentence."""
    return "".join(
        f" {who} runs next to it now at {row.speed:.0%}, slower than its bound of {row.lower_90:.0%}: part them."
        for who, row in now.items()
        if row.slower and row.lower_90 is not None
    )


def _describe_speeds(known: tuple[bool, bool], rows: list[Speed], share: str, basis: Basis, observed: int) -> str:
    alone = [(who, row.p50) for who, row in zip("ab", rows, strict=True) if row.p50 is not None]
    unknown = [who for who, of in zip("ab", known, strict=True) if not of]
    if not alone:
        of = "either job" if len(unknown) == 2 else "job " + unknown[0] if unknown else "the two"
        return f"On a shared {share} nothing is known of {of}, so nothing is guessed."
    on = {"rule": "by their loads alone", "residuals": "from co-runs of jobs like them"}
    of = on.get(basis, "from co-runs of these two") + (f" ({observed} seen)" if observed else "")
    text = (
        f"On a shared {share} {' and '.join(f'{who} at {speed:.0%}' for who, speed in alone)} of the speed alone, {of}."
    )
    return text + (f" Nothing is known of {unknown[0]}." if unknown else "")


async def answer_isolation_check(request: Request, context: Context, query: Query) -> Response:
    """Answer with a comparison of a GPU's expected fields and its present observation."""
    asked = decode_json_body(await read_body(request, context.config.api.max_body_bytes), EXPECTED)
    cache, board = context.cache, context.cache.get_board()
    row = cache.get_node_answers(board).rows.get(asked.node.encode())
    if row is None:
        raise UnknownEntity(f"no node {asked.node[:200]!r}")
    as_of_ms = cache.get_as_of_ms(board, DOCUMENT)
    seen: IsolationReport = cache.get_document(board, DOCUMENT, IsolationReport)
    sight = _read_observed_gpu(board, seen, row, asked)
    rows = check_isolation(asked.expected, sight, as_of_ms)
    if not rows:
        raise make_unprocessable_problem(
            "expected", {}, f"at least one of {', '.join(IsolationExpectation.__struct_fields__)}"
        )
    ok = combine_checks(rows)
    body = Isolation(as_of_ms, ok, rows, _format_verdict(ok, rows, sight.is_reported))
    return make_aged_answer(context, board, as_of_ms, encode(body))


def _read_observed_gpu(board: Board, seen: IsolationReport, row: int, asked: ToVerify) -> ObservedGpu:
    """Return what telemetry observes of a GPU.

    Raises UnknownEntity if the board has no row for the GPU. Also raises it if the GPU has no readings and
    its index is not below the node's number of GPUs.
    """
    readings, counts = board.array(READINGS), board.array("node.gpus")
    count = int(counts[row]) if row < len(counts) else 0
    known = f", which has {count} GPUs, from 0 on" if count else ""
    missing = UnknownEntity(f"no GPU {asked.gpu} on node {asked.node[:200]!r}{known}")
    if row >= len(readings) or not 0 <= asked.gpu < readings.shape[1]:
        raise missing
    values = readings[row, asked.gpu].astype(np.float64).tolist()
    gpu = f"{asked.node}/{asked.gpu}"
    sight = ObservedGpu(
        dict(zip(OBSERVED, values, strict=True)),
        float(board.array(NETWORK)[row]),
        seen.mig.get(gpu, {}),
        seen.holders.get(gpu, []),
        seen.somewhere.get(asked.node, []),
    )
    if count and asked.gpu >= count and not sight.is_reported:
        raise missing
    return sight


def _format_verdict(ok: bool | None, rows: list[IsolationCheck], is_reported: bool) -> str:
    wrong = [row for row in rows if row.ok is False]
    if wrong:
        named = "; ".join(f"{row.field} is {row.observed}, not {row.expected}" for row in wrong)
        return f"Not in force: {named}."
    hidden = [row for row in rows if row.ok is None]
    names = ", ".join(row.field for row in hidden)
    if hidden and not is_reported:
        return f"This GPU sent no telemetry, so {names} cannot be known."
    if hidden:
        return f"Unknown: {names}: {'; '.join(dict.fromkeys(row.reason or '' for row in hidden))}."
    if any(row.field in LIMITS for row in rows):
        return "Nothing says otherwise now; of limits only their use is seen."
    return "All that is expected is in force."


ROWS = (
    Row(
        "POST",
        "/v1/interference",
        answer_interference,
        "How much two jobs slow each other on shared hardware",
        "jobs",
        params=(),
        body=(InterferenceQuery,),
        body_example={"a": "train-42", "b": {"user": "ada", "name": "finetune-7", "gpus": 1}, "share": "gpu"},
        answer=Interference,
        problems=(400, 413, 415, 422, 503),
        scope=Scope.READ,
        example={
            "as_of_ms": 1760000000000,
            "known": True,
            "known_a": True,
            "known_b": True,
            "speed_a": {"p50": 0.91, "lower_90": 0.83},
            "speed_b": {"p50": 0.95, "lower_90": 0.87},
            "basis": "residuals",
            "observed": 5,
            "sentence": "On a shared gpu a at 91% and b at 95% of the speed alone, from co-runs of jobs like them "
            "(5 seen).",
            "compatibility": None,
            "shifts_s": None,
            "now": {},
            "reasons": {},
        },
    ),
    Row(
        "POST",
        "/v1/isolation/verify",
        answer_isolation_check,
        "Whether an isolation that is relied upon is in force",
        "jobs",
        params=(),
        body=(ToVerify,),
        body_example={"node": "n041", "gpu": 3, "expected": {"mig_profile": "1g.10gb", "pcie_link_gen": 5}},
        answer=Isolation,
        problems=(400, 404, 413, 415, 422, 503),
        scope=Scope.READ,
        example={
            "as_of_ms": 1760000000000,
            "ok": False,
            "checks": [
                {
                    "field": "mig_profile",
                    "expected": "1g.10gb",
                    "observed": "9.5 GiB, 9.5 GiB",
                    "ok": True,
                    "as_of_ms": 1760000000000,
                    "reason": "by the memory of its instances: telemetry does not report their slices",
                },
                {
                    "field": "pcie_link_gen",
                    "expected": 5,
                    "observed": 3.0,
                    "ok": False,
                    "as_of_ms": 1760000000000,
                    "reason": None,
                },
            ],
            "sentence": "Not in force: pcie_link_gen is 3.0, not 5.",
        },
    ),
)
