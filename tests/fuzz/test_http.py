"""Whatever comes over HTTP, at the API or at the placer: an answer that is documented, never 500, never none."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from random import Random
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.clock import ManualClock
from fleetcast.service.api.app import create_app
from fleetcast.service.api.hot_path import make_hot_protocol
from fleetcast.service.api.routes.all import ROWS
from fleetcast.service.http.access import Access
from fleetcast.service.http.connection_pool import ConnectionLimits, ConnectionPool
from fleetcast.service.http.connections import make_limited_protocol
from fleetcast.service.http.problems import MEDIA_TYPE
from fleetcast.service.http.table import Param, Row
from tests.fuzz.bounds import examples, prompt
from tests.fuzz.door_decoders import DRAIN, STARTED
from tests.fuzz.json_mutants import mutant
from tests.fuzz.law import check_words
from tests.fuzz.mutants import WORDS, mutants
from tests.fuzz.wire import Door, door
from tests.service.api_world import NOW_MS, config, publish
from tests.service.placer_world import World

PLAIN = make_limited_protocol(ConnectionPool(ConnectionLimits()))
PROBE = "/healthz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("http")
    publish(folder)
    return folder


@pytest.fixture(scope="module")
def api(folder: Path) -> Iterator[Door]:
    app = create_app(config(folder), ManualClock(NOW_MS + 7_900), writer="fuzz", access=Access())
    with door(app, PLAIN) as opened:
        yield opened


@pytest.fixture(scope="module")
def hot(folder: Path) -> Iterator[Door]:
    app = create_app(config(folder), ManualClock(NOW_MS + 7_900), writer="hot", access=Access())
    with door(app, make_hot_protocol(app.state.context, PLAIN)) as opened:
        yield opened


@pytest.fixture(scope="module")
def placer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    world = World(tmp_path_factory.mktemp("placer"))
    world.board.publish()
    with door(world.app, PLAIN) as opened:
        yield opened
    world.close()


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# -- requests that are spelled right ---------------------------------------------------------------------------------

WILD = st.text(max_size=20) | st.sampled_from(WORDS).map(lambda word: word.decode("latin-1"))
NAMES = WILD.filter(bool).map(lambda text: quote(text, ""))
METHODS = st.sampled_from(("GET", "POST", "HEAD", "DELETE", "PUT", "PATCH", "OPTIONS", "TRACE"))
HEADERS = st.dictionaries(
    st.sampled_from(("content-type", "content-encoding", "if-none-match", "accept", "ce-specversion", "user-agent")),
    st.sampled_from(("application/json", "gzip", "deflate", "*", '"a"', "text/plain; charset=x", "1.0", "multipart/x")),
    max_size=3,
)
BODY = mutants((STARTED, DRAIN, b'{"request_id": "r", "gang": 2}', b'{"request_id": "r", "topology": {}}', b""))


def _value(param: Param) -> st.SearchStrategy[str]:
    known = [str(choice) for choice in param.choices] or ["1", "0.5", "r01", "all", "3600"]
    return st.sampled_from(known) | WILD


@st.composite
def targets(draw: st.DrawFn, rows: tuple[Row, ...]) -> tuple[Row, str]:
    """A route, and a path and query for it."""
    row = draw(st.sampled_from(rows))
    path = row.path
    while "{" in path:
        head, _, rest = path.partition("{")
        name = draw(
            st.sampled_from(("n001", "team/a", "r", "a%2Fb", "n001.x")) | WILD.map(lambda text: quote(text, ""))
        )
        path = head + name + rest.partition("}")[2]
    params = {param.name: param for param in row.params or ()}
    names = st.sampled_from(sorted(params)) if params else st.nothing()
    given = draw(st.lists(names | st.sampled_from(("after", "limit", "request_id")) | WILD, max_size=3))
    pairs = [(name, draw(_value(params[name]) if name in params else WILD)) for name in given]
    query = "&".join(f"{quote(name)}={quote(value)}" for name, value in pairs)
    return row, f"{path}?{query}" if pairs else path


def spelled(method: str, target: str, headers: dict[str, str], body: bytes) -> bytes:
    """The bytes of a request from this machine."""
    lines = [f"{method} {target} HTTP/1.1", "host: localhost", *(f"{key}: {value}" for key, value in headers.items())]
    lines += [f"content-length: {len(body)}"] if body else []
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


API_ROWS = tuple(row for row in ROWS if row.path not in ("/v1/stream",))  # which never ends


@examples(250)
@given(targets(API_ROWS), METHODS, HEADERS, BODY)
def test_the_api_answers_what_it_documents(
    api: Door, target: tuple[Row, str], method: str, headers: dict[str, str], body: bytes
) -> None:
    row, path = target
    with prompt():
        heard = api.ask(spelled(method, path, headers, body))
    status, answered, text = heard.one()
    assert status < 500 or status == 503, text
    if method == row.method and "%2F" not in path.upper():
        assert status in (row.status, *row.problems, 204, 304, 404, 400, 413, 415, 422, 403), text
    if status >= 400 and method != "HEAD":
        _check_problem(status, answered, text)


def _check_problem(status: int, headers: dict[str, str], text: bytes) -> None:
    problem = json.loads(text)
    assert headers["content-type"] == MEDIA_TYPE
    assert problem["status"] == status
    assert problem["detail"]
    assert "retry-after" in headers or status != 503
    assert "allow" in headers or status != 405


NUMBERS = st.sampled_from(
    (0, 1, 2, 8, 64, -1, 1_000_000, 2**31, 2**53, 2**63, 10**30, 0.0, 0.5, -1.0, 1e-9, 1e12, 1e308)
)
ANY = NUMBERS | WILD | st.booleans() | st.none() | st.lists(NUMBERS | WILD, max_size=3)
FEW = st.integers(1, 8)
GANGS = FEW | NUMBERS | st.fixed_dictionaries({"min": NUMBERS, "desired": NUMBERS}, optional={"step": NUMBERS})
LEVELS = st.sampled_from(("node", "nvlink_domain", "rack", "block", "cluster", "galaxy", None))
FIELDS = {
    "gang": GANGS,
    "gpus_per_node": FEW | NUMBERS,
    "topology": st.fixed_dictionaries({}, optional={"required": LEVELS, "preferred": LEVELS}),
    "avoid_nodes": st.lists(st.sampled_from(("n01", "n02", "")) | WILD, max_size=3),
    **dict.fromkeys(("spread", "preemptible", "dry_run", "host_offload"), st.booleans() | ANY),
    **dict.fromkeys(
        ("cpus", "host_memory_gib", "gpu_memory_gib", "limit_s", "max_risk", "priority", "attempt"), FEW | ANY
    ),
    **dict.fromkeys(("job", "user", "queue", "class", "gpu_model", "unknown"), st.just("training") | ANY),
}
SOME = st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True)
WANTED = SOME.flatmap(
    lambda names: st.fixed_dictionaries(
        {"request_id": st.uuids().map(str) | st.sampled_from(("r", "s")) | WILD}
        | {name: FIELDS[name] for name in names}
    )
)


@examples(150)
@given(st.sampled_from(("/placements", "/queue")), WANTED)
def test_the_placer_decides_or_says_what_is_wrong(placer: Door, path: str, wanted: dict[str, object]) -> None:
    with prompt():
        status, answered, text = placer.ask(spelled("POST", path, {}, json.dumps(wanted).encode())).one()
    if status in (200, 202):
        decision = json.loads(text)
        assert decision["nodes"] == decision["candidates"] + sum(decision["rejected"].values())
    else:
        assert status in (400, 409, 422), text
        _check_problem(status, answered, text)


PLACER_PATHS = ("/placements", "/queue", "/audit", "/healthz", "/metrics", "/placements/r", "/queue/r", "/nowhere")


@examples(250)
@given(st.sampled_from(PLACER_PATHS), st.lists(WILD, max_size=2), METHODS, HEADERS, BODY)
def test_the_placer_answers_anybody(
    placer: Door, path: str, more: list[str], method: str, headers: dict[str, str], body: bytes
) -> None:
    names = ("limit", "after", "request_id")
    query = "&".join(f"{name}={quote(value)}" for name, value in zip(names, more, strict=False))
    with prompt():
        status, answered, text = placer.ask(spelled(method, f"{path}?{query}", headers, body)).one()
    assert status < 500 or status == 503, text
    if status >= 400 and method != "HEAD":
        _check_problem(status, answered, text)


BODIES = {row.path: row.body_example for row in API_ROWS if row.method == "POST" and row.body_example is not None}
PLACER_BODIES = dict.fromkeys(("/placements", "/queue", "/estimate"), BODIES["/v1/placements"])


@examples(300)
@given(st.sampled_from(sorted({**BODIES, **PLACER_BODIES})), st.randoms(use_true_random=False), st.integers(1, 3))
def test_no_answer_to_a_wrong_body_speaks_the_words_of_a_library(
    api: Door, placer: Door, path: str, rng: Random, edits: int
) -> None:
    opened, document = (api, BODIES[path]) if path in BODIES else (placer, PLACER_BODIES[path])
    with prompt():
        status, _, text = opened.ask(spelled("POST", path, {}, mutant(rng, document, edits))).one()
    assert status < 500 or status == 503, text
    check_words(text)


# -- bytes that may be no request at all -----------------------------------------------------------------------------

NODE = b"GET /v1/nodes/n002 HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.0\r\nAccept: */*\r\n\r\n"
EVENTS = b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(DRAIN), DRAIN)
CHUNKED = b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
FLEET = b"GET /v1/risk/nodes?limit=1&min=0.1 HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n"
PIECES = (
    *(b"\r\n", b" HTTP/1.1", b" HTTP/1.0", b"GET /v1/nodes/", b"n001", b"n002", b"%6e002", b"?", b"//", b"/../", b": "),
    *(
        b"Content-Length: 5\r\n",
        b"Connection: close\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Expect: 100-continue\r\n",
    ),
    *(b"Upgrade: websocket\r\n", b"Host: other\r\n", b"Origin: http://other\r\n", b"x-a: \x80\r\n", b"\r\n\r\n"),
)
RAW = mutants((NODE, NODE + NODE, EVENTS, CHUNKED, FLEET, NODE[:-2]), PIECES)


@examples(250)
@given(RAW)
def test_the_hot_path_answers_as_the_ordinary_way_does(api: Door, hot: Door, raw: bytes) -> None:
    with prompt():
        ordinary, quick = api.ask(raw), hot.ask(raw)
    assert all(status < 500 or status == 503 for status in ordinary.statuses())
    if ordinary.is_whole:
        assert _lines(quick.sent) == _lines(ordinary.sent)
        assert quick.is_closed == ordinary.is_closed


def _lines(sent: bytes) -> list[bytes]:
    """Sorted: the two ways put their headers in another order."""
    return sorted(sent.split(b"\r\n"))


@examples(100)
@given(RAW, st.lists(st.integers(0, 400), max_size=4).map(sorted))
def test_packets_may_be_cut_anywhere(hot: Door, raw: bytes, cuts: list[int]) -> None:
    ends = [*cuts, len(raw)]
    packets = [raw[first:last] for first, last in zip([0, *cuts], ends, strict=True)]
    with prompt():
        whole, cut = hot.ask(raw), hot.ask(*(packet for packet in packets if packet))
    if whole.is_whole and cut.is_whole:
        assert cut.statuses() == whole.statuses()


def test_the_doors_still_answer(api: Door, hot: Door, placer: Door) -> None:
    for opened in (api, hot, placer):
        assert opened.ask(spelled("GET", PROBE, {}, b"")).statuses() == [200]
    assert hot.ask(NODE, NODE).statuses() == [200, 200]
