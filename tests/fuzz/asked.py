"""Requests to every route, each right in the beginning and then wrong in some places: path, query, headers, body, wire.

One generator makes the same request whenever it is given the same random numbers; nothing else goes into it.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any
from urllib.parse import quote

from fleetcast.service.api.routes.all import ROWS
from fleetcast.service.api.routes.placements import REQUEST
from fleetcast.service.http.table import Param, Row
from tests.fuzz.asgi import Asked
from tests.fuzz.door_decoders import DRAIN, OTHERS, PACKED, STARTED, STEP, SUBMITTED, WRAPPED
from tests.fuzz.json_mutants import Raw, mutant
from tests.fuzz.mutants import WORDS
from tests.ingest.write_requests import T0, gpu, message_v1, message_v2, packed

NODES = ("n041", "n042", "n043", "n044")
BOMB_BYTES = 64 * 2**20
Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A route as the fuzzer knows it. params None: whoever answers checks the query himself; bodies: right ones."""

    app: str
    method: str
    path: str
    params: tuple[Param, ...] | None = ()
    bodies: tuple[Any, ...] = ()
    content_type: str = "application/json"


PLACEMENTS: tuple[dict[str, Any], ...] = (
    {"request_id": "r", "gang": 2, "gpus_per_node": 8},
    {"request_id": "s", "job": "team/a", "attempt": 2, "gang": {"min": 1, "desired": 4, "step": 1}, "spread": True},
    {"request_id": "t", "topology": {"required": "rack", "preferred": "node"}, "max_risk": 0.5, "dry_run": True},
    {"request_id": "u", "avoid_nodes": ["n041"], "limit_s": 3600, "cpus": 4, "host_memory_gib": 1.5, "user": "ada"},
    REQUEST,
)
TOLD = (STARTED, SUBMITTED, STEP, DRAIN, *OTHERS)
EVENTS = (
    *(json.loads(body) for body in (*TOLD, *TOLD, WRAPPED, PACKED)),
    *([json.loads(body) for body in TOLD], Raw(b"\n".join(OTHERS))),
)
LINES = (
    b"2025-11-21T04:12:09+0000 n042 kernel: NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus",
    b"[ 12.5] mlx5_core 0000:9b:00.0: Port module event: module 0, Cable unplugged",
    b"<4>Nov 21 04:12:09 n041 kernel: NVRM: Xid (PCI:0000:9b:00): 94, Contained error\n" * 3,
)
SERIES = [(gpu("DCGM_FI_DEV_POWER_USAGE", index, "n041"), [(T0 + 15_000, 401.5)]) for index in range(4)]
WRITES = tuple(Raw(packed(message(SERIES))) for message in (message_v1, message_v2))
PROTOBUF = "application/x-protobuf"
QUEUES = (
    Raw(b"[policy]\nhalf_life_h = 24\n\n[queue.a]\nweight = 40\nguaranteed = {gpu = 8}\n\n[queue.b]\nweight = 20\n"),
    Raw(b'[queue.research]\nweight = 40\n\n[queue."research/nlp"]\nweight = 50\nlimit = {gpu = 16}\n'),
)


def bodies_of(row: Row) -> tuple[Any, ...]:
    """Right bodies of a route of the API."""
    match row.path:
        case "/v1/placements" | "/v1/queue" | "/v1/jobs/estimate":
            return PLACEMENTS
        case "/v1/events":
            return (*EVENTS, *row.body_example, list(row.body_example))
        case "/v1/kernel-log":
            return tuple(map(Raw, LINES))
        case "/api/v1/write":
            return WRITES
        case "/v1/adapters/{name}/{verb}":
            return ({},)
        case "/v1/queues":
            return QUEUES
        case "/v1/interference":
            return (row.body_example, {"a": "team/a", "b": "b", "share": "nic"})
        case _:
            return (row.body_example,)


PLACER = tuple(
    Known("placer", method, path, None, {"POST": PLACEMENTS, "PUT": QUEUES}.get(method, ()))
    for method, path in (
        *(
            ("POST", "/placements"),
            ("GET", "/placements"),
            ("GET", "/placements/{name}"),
            ("DELETE", "/placements/{name}"),
        ),
        *(("POST", "/queue"), ("GET", "/queue"), ("DELETE", "/queue/{name}"), ("POST", "/estimate"), ("GET", "/audit")),
        *(("GET", "/queue/{name}/why"), ("GET", "/queues"), ("PUT", "/queues"), ("GET", "/charges")),
        *(("GET", "/actions"), ("GET", "/actions/{name}"), ("POST", "/actions/{name}/accept")),
        *(("POST", "/actions/{name}/refuse"), ("POST", "/actions/pause"), ("POST", "/actions/resume")),
        *(("POST", "/actions/reset"), ("GET", "/plan")),
        *(("GET", "/fragmentation"), ("GET", "/metrics"), ("GET", "/healthz"), ("GET", "/nowhere")),
    )
)
ODD_PATHS = (
    "/",
    "/nowhere",
    "//",
    "/v1",
    "/v1/",
    "/docs",
    "/openapi.json",
    "/../etc/passwd",
    "/{name}",
    "/v1/{name}/{name}",
)


TELLING = ("POST", "PUT")


def routes() -> tuple[Known, ...]:
    """Every route of both applications, those that take something in more often, and paths that are none."""
    api = tuple(
        Known("api", row.method, row.path, row.params, bodies_of(row) if row.method in TELLING else (), row.takes[0])
        for row in ROWS
    )
    taking = [known for known in (*api, *PLACER) if known.bodies]
    return (*api, *PLACER, *taking, *taking, *(Known("api", "GET", path) for path in ODD_PATHS))


# -- paths and queries -----------------------------------------------------------------------------------------------

NAMES = (*NODES, "n042", "team/a", "team%2Fa", "a", "b", "r", "s", "t", "u", "train-42-1", "train-42", "kube", "filter")
JOBS = ("team/a", "a", "b", "r", "s", *(f"r{number}" for number in range(40)))
WILD = tuple(quote(word, "") for word in WORDS if len(word) < 2000)
WILD_PATHS = (
    *WILD,
    "",
    "/",
    "//",
    ".",
    "..",
    "%00",
    "%ff%fe",
    "%0d%0aX:1",
    "%",
    "%zz",
    "a" * 5000,
    "%F0%9F%98%80",
    "*",
)
NUMBERS = ("0", "1", "-1", "3600", "0.5", "1e3", "1e400", "nan", "inf", "-inf", "9" * 30, "9" * 5000, "1_000", "%D9%A3")
OFTEN = ("after", "limit", "request_id")


def _target(rng: Random, known: Known, is_wrong: bool) -> str:
    path = known.path
    while "{" in path:
        head, _, rest = path.partition("{")
        name = rng.choice(WILD_PATHS) if is_wrong and rng.random() < 0.5 else rng.choice(NAMES)
        path = head + name + rest.partition("}")[2]
    if is_wrong and rng.random() < 0.2:
        path = rng.choice(
            (path + "/", "/" + path, path.upper(), path + rng.choice(WILD_PATHS), path.replace("/", "//"))
        )
    query = _query(rng, known, is_wrong)
    return f"{path}?{query}" if query else path


def _query(rng: Random, known: Known, is_wrong: bool) -> str:
    params = {param.name: param for param in known.params or ()}
    names = [name for name in params if rng.random() < 0.4]
    if known.params is None:
        names += [name for name in OFTEN if rng.random() < 0.3]
    if is_wrong and rng.random() < 0.4:
        names += [rng.choice((*params, *OFTEN, *WILD))]
    pairs = [f"{name}={_value(rng, params.get(name), is_wrong)}" for name in names]
    return rng.choice(("&", "&&", ";")).join(pairs) if is_wrong and rng.random() < 0.1 else "&".join(pairs)


def _value(rng: Random, param: Param | None, is_wrong: bool) -> str:
    if is_wrong and rng.random() < 0.6:
        return rng.choice((*WILD_PATHS, *NUMBERS))
    if param is not None and param.choices:
        return quote(str(rng.choice(param.choices)), "")
    return rng.choice((*NUMBERS[:5], *NAMES, "all", "r01", "train", "n041"))


# -- headers ---------------------------------------------------------------------------------------------------------

KINDS = (
    *(
        "application/json",
        "application/json; charset=utf-16",
        "text/plain",
        "application/x-ndjson",
        "multipart/form-data",
    ),
    *("application/cloudevents+json", "application/cloudevents-batch+json", PROTOBUF, "", ";", "a" * 3000, "é"),
    f"{PROTOBUF};proto=io.prometheus.write.v2.Request",
)
HEADERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("content-length", ("0", "5", "-1", "9" * 30, "abc", "2097152", "\u00b2")),
    ("if-none-match", ("*", '"a"', 'W/"a"', '"', "a" * 5000, '"a","b"')),
    ("if-match", ("*", '"0"', "0", "\xff", "a" * 5000)),
    ("accept", ("*/*", "text/html", "application/openmetrics-text; version=1.0.0", ";q=", "\xff")),
    ("accept-encoding", ("gzip", "identity;q=0", "*;q=x", "\x00")),
    ("host", ("localhost", "127.0.0.1:8080", "example.org", "", "[::1", "\xff", "a" * 3000, "localhost:99999999")),
    ("origin", ("null", "http://example.org", "http://127.0.0.1:8080", "\xff")),
    ("sec-fetch-site", ("cross-site", "none", "same-origin", "")),
    ("authorization", ("Bearer", "Bearer x", "Basic !!!", "Basic dTpw", "\xff", "a" * 9000)),
    ("ce-specversion", ("1.0", "0.3", "", "\xff")),
    ("ce-type", ("t", "\xff")),
    ("expect", ("100-continue", "x")),
    ("range", ("bytes=0-0", "bytes=-1", "bytes=9-1", "x")),
    ("user-agent", ("", "a" * 9000, "\xff\x00")),
    ("x-forwarded-for", ("1.2.3.4", "\xff")),
    ("transfer-encoding", ("chunked", "gzip", "x")),
    ("last-event-id", ("0", "-1", "9" * 30)),
)


def _headers(rng: Random, known: Known, is_wrong: bool) -> list[tuple[bytes, bytes]]:
    told = [(b"host", b"127.0.0.1:8080")]
    if known.bodies:
        kind = rng.choice(KINDS) if is_wrong and rng.random() < 0.4 else known.content_type
        told.append((b"content-type", kind.encode("latin-1")))
    if known.method == "PUT":
        told.append((b"if-match", rng.choice((b"*", b'"0"'))))
    for _ in range(rng.randint(1, 3) if is_wrong else 0):
        name, values = rng.choice(HEADERS)
        told.append((name.encode(), rng.choice(values).encode("latin-1")))
    return told


# -- bodies ----------------------------------------------------------------------------------------------------------


def _body(rng: Random, known: Known, is_wrong: bool) -> bytes:
    """A body as it is before it is packed."""
    body = rng.choice(known.bodies)
    if isinstance(body, Raw):
        return _cut(rng, bytes(body)) if is_wrong else bytes(body)
    body = _named_anew(rng, body)
    told = mutant(rng, body, rng.randint(1, 3) if is_wrong else 0)
    return _cut(rng, told) if is_wrong and rng.random() < 0.15 else told


def _named_anew(rng: Random, body: Any) -> Any:
    """Placements under other ids and events of other jobs, so that not all are retries."""
    if isinstance(body, list):
        return [_named_anew(rng, row) for row in body]
    if not isinstance(body, dict) or rng.random() < 0.3:
        return body
    if "request_id" in body:
        return body | {"request_id": f"r{rng.randrange(3000)}"}
    if "sequence" not in body:
        return body
    name = {"job": rng.choice(JOBS)} if "job" in body else {"node": rng.choice(NODES)}
    told_ms = T0 + rng.randrange(-600_000, 200_000)
    return body | name | {"sequence": rng.randrange(500), "time_ms": told_ms}


def _cut(rng: Random, body: bytes) -> bytes:
    """Bytes put in, taken away, turned or said twice."""
    at = rng.randint(0, len(body))
    end = min(len(body), at + rng.randint(0, 40))
    edits: tuple[Callable[[], bytes], ...] = (
        lambda: body[:at],
        lambda: body[:at] + body[end:],
        lambda: body[:at] + rng.choice(WORDS) + body[at:],
        lambda: body[:at] + rng.choice(WORDS) + body[end:],
        lambda: body[:at] + body[at:end] * 20 + body[end:],
        lambda: body[:at] + rng.randbytes(4) + body[end:],
        lambda: body + b"\n" + body,
        lambda: body.decode("utf-8", "replace").encode("utf-16"),
        lambda: b"",
    )
    return rng.choice(edits)()


@cache
def bombs() -> tuple[tuple[bytes, bytes], ...]:
    """(coding, body): small bodies that inflate to `BOMB_BYTES`, one of them within itself, or to nothing for ever."""
    zeros = bytes(BOMB_BYTES)
    flat = gzip.compress(zeros, mtime=0)
    brackets = gzip.compress(b"[" * (BOMB_BYTES // 8), mtime=0)
    return (
        *((b"gzip", flat), (b"gzip", gzip.compress(flat, mtime=0)), (b"gzip", brackets)),
        *((b"deflate", zlib.compress(zeros)), (b"gzip", gzip.compress(b"", mtime=0) * 20_000)),
        *((b"snappy", packed(bytes(2**20 * 32))), (b"snappy", b"\xff\xff\xff\xff\x0f\x00")),
    )


def _packed(rng: Random, body: bytes, headers: list[tuple[bytes, bytes]], is_wrong: bool) -> bytes:
    """The body in some coding, told in the headers; of wrong ones now and then a bomb, or not what is told."""
    if is_wrong and rng.random() < 0.03:
        coding, body = rng.choice(bombs())
        headers.append((b"content-encoding", coding))
        return body
    coding, pack = rng.choice(PACKS)
    headers.append((b"content-encoding", coding))
    told = pack(body)
    return _cut(rng, told) if is_wrong and rng.random() < 0.5 else told


def _gzip(body: bytes) -> bytes:
    return gzip.compress(body, 1, mtime=0)


PACKS: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
    *((b"gzip", _gzip), (b"x-gzip", _gzip), (b"GZIP ", _gzip), (b"deflate", zlib.compress), (b"identity", bytes)),
    *((b"br", bytes), (b"snappy", bytes), (b"gzip, gzip", lambda body: _gzip(_gzip(body))), (b"\xff", bytes)),
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "X" * 200)
WRONG_SHARE = 0.4


def one(rng: Random, known: Sequence[Known]) -> tuple[Known, Asked]:
    """One request, and the route that it began as."""
    route = rng.choice(known)
    wrong = [rng.random() < WRONG_SHARE for _ in range(5)]
    method = rng.choice(METHODS) if wrong[0] and rng.random() < 0.3 else route.method
    target = _target(rng, route, wrong[1])
    headers = _headers(rng, route, wrong[2])
    body = b""
    if route.bodies or (wrong[3] and rng.random() < 0.1):
        body = _body(rng, route, wrong[3]) if route.bodies else rng.choice(WORDS)
        if rng.random() < (0.3 if wrong[4] else 0.1) and route.content_type != PROTOBUF:
            body = _packed(rng, body, headers, wrong[4])
        elif route.content_type == PROTOBUF and wrong[4] and rng.random() < 0.1:
            coding, body = rng.choice(bombs()[-2:])
            headers.append((b"content-encoding", coding))
    leaves = route.path == "/v1/stream" or (wrong[4] and rng.random() < 0.05)
    return route, Asked(method, target, tuple(headers), _chunks(rng, body), leaves)


def _chunks(rng: Random, body: bytes) -> tuple[bytes, ...]:
    """The body as it comes: mostly whole, else in pieces, some of them empty."""
    if len(body) < 2 or rng.random() < 0.9:
        return (body,)
    cuts = sorted(rng.randint(0, len(body)) for _ in range(rng.randint(1, 6)))
    return tuple(body[first:last] for first, last in zip([0, *cuts], [*cuts, len(body)], strict=True))
