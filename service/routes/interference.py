"""How much two jobs slow each other on shared hardware, and whether an isolation is in force."""

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from features.co_runs import Keys, job_keys
from features.run_history import JobShape
from fleet.entities import MAX_NAME_LENGTH
from fleet.errors import UnknownEntity
from service.access import Scope
from service.board import Board
from service.documents import number
from service.interference import SECTION, Known, Party, Speeds, Taught, residuals_of, speeds
from service.isolation import DOCUMENT, NETWORK, OBSERVED, READINGS, Expected, Seen, Sight, checks, verdict
from service.placement_body import field_of
from service.problems import FieldError, Problem, unprocessable
from service.request_body import read_body
from service.routes.context import Context
from service.routes.table import Query, Row, answer, encode

ShareName = Literal["gpu", "mig", "pcie", "nic", "rail"]
Basis = Literal["rule", "residuals", "observed"]
MOST_GPUS = 1_000_000  # of one job
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]


class JobLike(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A job that has not come yet, as it will be submitted."""

    user: Name = ""
    name: Name = ""
    gpus: Annotated[int, msgspec.Meta(ge=1, le=MOST_GPUS)] = 1


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """Two jobs by name (they run or wait), or as they will be submitted."""

    a: Name | JobLike
    b: Name | JobLike
    share: ShareName = "gpu"


class Speed(msgspec.Struct):
    """Relative to alone; null where nothing is known, `lower_90` also while too few co-runs were seen for a bound."""

    p50: float | None
    lower_90: float | None


class Interference(msgspec.Struct):
    """observed: co-runs of the two jobs, or of their kinds, that this rests on."""

    as_of_ms: int
    known: bool
    speed_a: Speed
    speed_b: Speed
    basis: Basis
    observed: int
    sentence: str
    compatibility: float | None = None
    reasons: dict[str, str] = {}


class ToVerify(msgspec.Struct, forbid_unknown_fields=True):
    node: str
    gpu: int
    expected: Expected


class Check(msgspec.Struct):
    """ok: null where it cannot be seen."""

    field: str
    expected: Any
    observed: Any
    ok: bool | None
    as_of_ms: int


class Isolation(msgspec.Struct):
    as_of_ms: int
    ok: bool | None
    checks: list[Check]
    sentence: str


async def interference(request: Request, context: Context, query: Query) -> Response:
    """Speeds of two jobs side by side; `known` is false, and no number is made up, where nothing is known of either."""
    asked = _read(await read_body(request, context.config.api.max_body_bytes), Asked)
    feed, board = context.feed, context.feed.board()
    shares: dict[str, Taught] = feed.document(board, SECTION, dict[str, Taught])
    known = Known.on(board)
    a, b = (known.party(_keys(known, one)) for one in (asked.a, asked.b))
    residuals = feed.kept(board, ("co-runs", asked.share), lambda: residuals_of(shares.get(asked.share)))
    told = speeds(a, b, asked.share, residuals)
    as_of_ms = feed.as_of_ms(board, SECTION)
    return answer(context, board, as_of_ms, encode(_answer(told, a, b, asked.share, as_of_ms)))


def _read(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise Problem(
            422, "bad_request", str(error), errors=[FieldError(field_of(str(error)), expected=str(error))]
        ) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Problem(400, "not_json", f"the body is not JSON: {error}") from None


def _keys(known: Known, asked: str | JobLike) -> Keys | None:
    if isinstance(asked, str):
        return known.of_job(asked)
    return job_keys(JobShape(user=asked.user, name=asked.name, gpus=asked.gpus))


def _answer(told: Speeds, a: Party, b: Party, share: str, as_of_ms: int) -> Interference:
    found = told.found
    rows = [Speed(number(found.p50[n]), number(found.lower_90[n])) for n in range(2)]
    known, observed = bool(found.known.any()), int(found.observed.sum())
    basis: Basis = "observed" if "observed" in found.basis else "residuals" if "residuals" in found.basis else "rule"
    reasons = {}
    if known and any(row.lower_90 is None for row in rows):
        reasons["lower_90"] = "a bound needs nine co-runs that were seen here"
    for name, one in (("a", a), ("b", b)):
        if known and share == "gpu" and not one.known:
            reasons[name] = "nothing is known of it alone: it is taken to use all there is"
    return Interference(
        as_of_ms=as_of_ms,
        known=known,
        speed_a=rows[0],
        speed_b=rows[1],
        basis=basis,
        observed=observed,
        sentence=_sentence(known, rows, share, basis, observed),
        compatibility=None if told.meets is None else number(told.meets.compatibility),
        reasons=reasons,
    )


def _sentence(known: bool, rows: list[Speed], share: str, basis: Basis, observed: int) -> str:
    if not known:
        return f"Nothing is known of either job on a shared {share}, so nothing is guessed."
    on = {"rule": "by their loads alone", "residuals": "from co-runs of jobs like them"}
    of = on.get(basis, "from co-runs of these two") + (f" ({observed} seen)" if observed else "")
    speeds_of = [f"{who} at {row.p50:.0%}" for who, row in zip("ab", rows, strict=True) if row.p50 is not None]
    return f"On a shared {share} {' and '.join(speeds_of)} of the speed alone, {of}."


async def verify(request: Request, context: Context, query: Query) -> Response:
    """A check for every field that is expected of a GPU, with what is observed there now."""
    asked: ToVerify = _read(await read_body(request, context.config.api.max_body_bytes), ToVerify)
    feed, board = context.feed, context.feed.board()
    row = feed.node_answers(board).rows.get(asked.node.encode())
    if row is None:
        raise UnknownEntity(f"no node {asked.node[:200]!r}")
    as_of_ms = feed.as_of_ms(board, DOCUMENT)
    seen: Seen = feed.document(board, DOCUMENT, Seen)
    sight = _sight(board, seen, row, asked)
    rows = checks(asked.expected, sight, as_of_ms)
    if not rows:
        raise unprocessable("expected", {}, f"at least one of {', '.join(Expected.__struct_fields__)}")
    ok = verdict(rows)
    body = {"as_of_ms": as_of_ms, "ok": ok, "checks": rows, "sentence": _verdict_sentence(ok, rows, sight.heard)}
    return answer(context, board, as_of_ms, encode(body))


def _sight(board: Board, seen: Seen, row: int, asked: ToVerify) -> Sight:
    readings = board.array(READINGS)
    if row >= len(readings) or not 0 <= asked.gpu < readings.shape[1]:
        raise UnknownEntity(f"no GPU {asked.gpu} on node {asked.node[:200]!r}")
    values = dict(zip(OBSERVED, readings[row, asked.gpu].astype(np.float64).tolist(), strict=True))
    gpu = f"{asked.node}/{asked.gpu}"
    return Sight(values, float(board.array(NETWORK)[row]), seen.mig.get(gpu, {}), seen.holders.get(gpu, []))


def _verdict_sentence(ok: bool | None, rows: list[dict[str, Any]], heard: bool) -> str:
    wrong = [row for row in rows if row["ok"] is False]
    if wrong:
        named = "; ".join(f"{row['field']} is {row['observed']}, not {row['expected']}" for row in wrong)
        return f"Not in force: {named}."
    hidden = ", ".join(row["field"] for row in rows if row["ok"] is None)
    if hidden and not heard:
        return f"Nothing was heard of this GPU, so nobody can tell {hidden}."
    return f"Telemetry does not tell of {hidden}." if hidden else "All that is expected is in force."


ROWS = (
    Row(
        "POST",
        "/v1/interference",
        interference,
        "How much two jobs slow each other on shared hardware",
        "jobs",
        params=(),
        body=(Asked,),
        body_example={"a": "train-42", "b": {"user": "ada", "name": "finetune-7", "gpus": 1}, "share": "gpu"},
        answer=Interference,
        problems=(400, 413, 415, 422, 503),
        scope=Scope.READ,
        example={
            "as_of_ms": 1760000000000,
            "known": True,
            "speed_a": {"p50": 0.91, "lower_90": 0.83},
            "speed_b": {"p50": 0.95, "lower_90": 0.87},
            "basis": "residuals",
            "observed": 5,
            "sentence": "On a shared gpu a at 91% and b at 95% of the speed alone, from co-runs of jobs like them "
            "(5 seen).",
            "compatibility": None,
            "reasons": {},
        },
    ),
    Row(
        "POST",
        "/v1/isolation/verify",
        verify,
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
                },
                {
                    "field": "pcie_link_gen",
                    "expected": 5,
                    "observed": 3.0,
                    "ok": False,
                    "as_of_ms": 1760000000000,
                },
            ],
            "sentence": "Not in force: pcie_link_gen is 3.0, not 5.",
        },
    ),
)
