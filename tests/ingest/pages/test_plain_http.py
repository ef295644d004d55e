"""The client of exporter pages: the same answers as aiohttp, whatever a peer sends, and nothing left behind."""

import asyncio
import gc
import gzip
import logging
import os
import socket
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from itertools import pairwise
from typing import Any, TypeVar

import aiohappyeyeballs
import aiohttp.connector
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.ingest.pages import plain_http
from fleetcast.ingest.pages.fetch import FetchError, fetch, open_session
from fleetcast.ingest.pages.plain_http import PageClient
from tests.fuzz.bounds import examples
from tests.ingest.pages.http_peers import Act, Peer, Script, answer, chunked, outcome, peer

T = TypeVar("T")
LIMIT = 100_000
PAGE = b"DCGM_FI_DEV_GPU_TEMP 61\n" * 40
OK = answer(PAGE)
CHUNKED = "Transfer-Encoding: chunked"
GZIP = "Content-Encoding: gzip"

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


def run(scenario: Coroutine[Any, Any, T], loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop) -> T:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(scenario)


def sockets() -> int:
    """Return how many sockets this process has open."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except OSError:
            continue
    return found


NAMED = "http://n001.example:9400/metrics"


async def unknown(host: str, port: int) -> list[Any]:
    """Replace a lookup: no name is known."""
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def at_port(port: int) -> list[Any]:
    """Return what a lookup returns: a port of this machine."""
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


HANGING: dict[str, Script] = {
    "says nothing": [Act.HANG],
    "one byte at a time": [Act.DRIP, OK],
    "one byte of the body at a time": [OK[:-900], Act.DRIP, OK[-900:]],
    "stops in the status line": [b"HTTP/1.1 2", Act.HANG],
    "stops in the head": [OK[:30], Act.HANG],
    "stops before the body": [answer(length=500), Act.HANG],
    "stops in the body": [OK[:-9], Act.HANG],
    "stops in a chunk": [answer(chunked(PAGE)[:-20], CHUNKED, length=-1), Act.HANG],
    "stops between chunks": [answer(chunked(PAGE, end=b""), CHUNKED, length=-1), Act.HANG],
    "stops in a trailer": [answer(chunked(PAGE, end=b"0\r\nX-Sum: 12"), CHUNKED, length=-1), Act.HANG],
    "never closes a body without a length": [answer(PAGE, length=-1), Act.HANG],
}
BROKEN: dict[str, tuple[Script, str]] = {
    "closes at once": ([Act.CLOSE], "disconnected"),
    "closes before it is asked": ([Act.EARLY, Act.CLOSE], "disconnected"),
    "resets before it is asked": ([Act.EARLY, Act.RESET], "disconnected"),
    "closes in the head": ([OK[:30], Act.CLOSE], "disconnected"),
    "resets in the head": ([OK[:30], Act.RESET], "disconnected"),
    "closes in the body": ([OK[:-9], Act.CLOSE], "truncated"),
    "resets in the body": ([OK[:-9], Act.RESET], "truncated"),
    "closes in a chunk": ([answer(chunked(PAGE)[:-20], CHUNKED, length=-1), Act.CLOSE], "truncated"),
    "closes before the last chunk": ([answer(chunked(PAGE, end=b""), CHUNKED, length=-1), Act.CLOSE], "truncated"),
    "a length that is too long": ([answer(PAGE, length=2000), Act.CLOSE], "truncated"),
    "a length that is too short": ([answer(PAGE, length=20), Act.CLOSE], "bad_http"),
    "a length that is no number": ([answer(PAGE, "Content-Length: many", length=-1), Act.CLOSE], "bad_http"),
    "two lengths": ([answer(PAGE, "Content-Length: 20"), Act.CLOSE], "bad_http"),
    "a length below 0": ([answer(PAGE, "Content-Length: -5", length=-1), Act.CLOSE], "bad_http"),
    "a length of 20 digits": ([answer(PAGE, f"Content-Length: {10**20}", length=-1), Act.CLOSE], "bad_http"),
    "a length beyond the limit": ([answer(length=LIMIT + 1), Act.HANG], "too_large"),
    "a body beyond the limit": ([answer(b"x" * (LIMIT + 1), length=-1), Act.CLOSE], "too_large"),
    "a body without an end": ([answer(b"x" * 1000, length=-1), b"x" * 1000, Act.FLOOD], "too_large"),
    "chunks beyond the limit": ([answer(chunked(b"x" * LIMIT, b"y"), CHUNKED, length=-1), Act.HANG], "too_large"),
    "chunks without an end": ([answer(chunked(end=b""), CHUNKED, length=-1), b"1\r\nx\r\n", Act.FLOOD], "too_large"),
    "a chunk size that is no number": ([answer(b"zz\r\nab\r\n0\r\n\r\n", CHUNKED, length=-1), Act.CLOSE], "bad_http"),
    "a gzip bomb": ([answer(gzip.compress(b"x" * 9_000_000), GZIP), Act.HANG], "too_large"),
    "gzip that ends early": ([answer(gzip.compress(PAGE)[:-9], GZIP), Act.HANG], "truncated"),
    "gzip that is none": ([answer(PAGE, GZIP), Act.HANG], "bad_gzip"),
    "an encoding that nobody asked for": ([answer(PAGE, "Content-Encoding: br"), Act.HANG], "bad_encoding"),
    "two encodings": ([answer(PAGE, "Content-Encoding: gzip, gzip"), Act.HANG], "bad_encoding"),
    "rubbish": ([b"\x00\xff" * 200, Act.HANG], "bad_http"),
    "a first line that is none": ([b"SSH-2.0-OpenSSH_9.6\r\n", Act.HANG], "bad_http"),
    "a TLS alert": ([b"\x15\x03\x01\x00\x02\x02\x16", Act.CLOSE], "bad_http"),
    "a huge header": ([answer(PAGE, "X-Huge: " + "x" * 60_000), Act.HANG], "bad_http"),
    "a header without an end": ([b"HTTP/1.1 200 OK\r\nX-Huge: ", b"x" * 1000, Act.FLOOD], "bad_http"),
    "headers without an end": ([b"HTTP/1.1 200 OK\r\n", b"X-Many: 1\r\n", Act.FLOOD], "bad_http"),
    "a redirect": ([answer(b"", "Location: /elsewhere", status="HTTP/1.1 302 Found"), Act.HANG], "redirect"),
    "an error that hangs": ([answer(length=9, status="HTTP/1.1 503 Busy"), Act.HANG], "http_status"),
    "an error with a huge page": ([answer(length=10**9, status="HTTP/1.0 500 Oops"), Act.CLOSE], "http_status"),
    "no content": ([answer(status="HTTP/1.1 204 No Content", length=-1), Act.HANG], "http_status"),
    "not modified": ([answer(status="HTTP/1.1 304 Not Modified", length=-1), Act.HANG], "redirect"),
    "another protocol": (
        [answer(b"", "Connection: Upgrade", "Upgrade: h2c", status="HTTP/1.1 101 Switch", length=-1), Act.CLOSE],
        "http_status",
    ),
}
CONTINUE = answer(status="HTTP/1.1 100 Continue", length=-1)
ODD: dict[str, Script] = {
    "100-continue before the answer": [CONTINUE, CONTINUE + OK, Act.HANG],
    "an answer before the request": [Act.EARLY, OK, Act.HANG],
    "early hints before the answer": [
        answer(b"", "Link: </style.css>", "Content-Length: 7", status="HTTP/1.1 103 Early Hints", length=-1) + OK,
        Act.HANG,
    ],
    "HTTP/1.0 without keep-alive": [answer(PAGE, status="HTTP/1.0 200 OK"), Act.CLOSE],
    "HTTP/1.0 with keep-alive": [answer(PAGE, "Connection: keep-alive", status="HTTP/1.0 200 OK"), Act.HANG],
    "HTTP/1.0 without a length": [answer(PAGE, status="HTTP/1.0 200 OK", length=-1), Act.CLOSE],
    "no length, read to the end": [answer(PAGE[:99], length=-1), PAGE[99:], Act.CLOSE],
    "two answers at once": [OK + answer(b"other 1\n"), Act.HANG],
    "a chunked answer and another": [answer(chunked(PAGE), CHUNKED, length=-1) + OK, Act.HANG],
    "small chunks": [answer(chunked(*(PAGE[at : at + 1] for at in range(len(PAGE)))), CHUNKED, length=-1), Act.HANG],
    "extensions and trailers of chunks": [
        answer(b"3c0;name=value\r\n" + PAGE + b"\r\n0\r\nContent-Encoding: br\r\n\r\n", CHUNKED, length=-1),
        Act.HANG,
    ],
    "spaces behind the size of a chunk": [answer(b"3c0  \r\n" + chunked(PAGE)[5:], CHUNKED, length=-1), Act.HANG],
    "gzip in chunks": [answer(chunked(gzip.compress(PAGE)), CHUNKED, GZIP, length=-1), Act.HANG],
    "an offer of another protocol": [answer(PAGE, "Connection: Upgrade", "Upgrade: h2,h2c"), Act.HANG],
    "lines that end in LF alone": [OK.replace(b"\r\n", b"\n"), Act.HANG],
    "capitals and spaces": [answer(gzip.compress(PAGE), "CONTENT-ENCODING:   X-GZIP  "), Act.HANG],
    "no reason behind the status": [answer(PAGE, status="HTTP/1.1 200"), Act.HANG],
    "an empty page": [answer(), Act.HANG],
    "a hundred headers": [answer(PAGE, *(f"X-{number}: {'x' * 400}" for number in range(100))), Act.HANG],
    "a hundred headers, then the page": [
        answer(b"", *(f"X-{number}: {'x' * 400}" for number in range(100)), length=len(PAGE)),
        PAGE,
        Act.HANG,
    ],
    "OpenMetrics": [answer(PAGE, "content-type: Application/OpenMetrics-Text; version=1.0.0"), Act.HANG],
}


async def both(script: Script, timeout_s: float) -> tuple[tuple[str, bytes, bool], tuple[str, bytes, bool]]:
    """Return the outcomes of our client and of aiohttp, over peers that play the same script."""
    client = PageClient(timeout_s, 15)
    async with peer(script) as ours:
        mine = await outcome(client.fetch(ours.url, LIMIT))
        await client.close()
        await ours.until(lambda it: it.closed == it.opened)
    async with open_session(timeout_s, 15) as session, peer(script) as other:
        return mine, await outcome(fetch(session, other.url, LIMIT))


def check_both(script: Script, timeout_s: float, loop: Callable[[], asyncio.AbstractEventLoop], reason: str) -> None:
    before = sockets()
    mine, other = run(both(script, timeout_s), loop)
    assert mine == other
    assert mine[0] == reason
    assert sockets() <= before


@LOOPS
@pytest.mark.parametrize("name", HANGING)
def test_a_peer_that_stops_or_drips_ends_at_the_timeout(name: str, loop: Callable[[], Any]) -> None:
    check_both(HANGING[name], 0.2, loop, "timeout")


@LOOPS
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_answer_has_the_reason_that_aiohttp_gives(name: str, loop: Callable[[], Any]) -> None:
    script, reason = BROKEN[name]
    check_both(script, 60, loop, reason)


@LOOPS
@pytest.mark.parametrize("body", [chunked(PAGE, end=b"0\r\nX-Huge: "), b"5;name=", chunked(PAGE, end=b"0")])
def test_bytes_beside_the_body_are_bounded(body: bytes, loop: Callable[[], Any]) -> None:
    """aiohttp reads trailers, and what stands behind the size of a chunk, until the timeout."""

    async def scenario() -> str:
        client = PageClient(60, 15)
        async with peer([answer(body, CHUNKED, length=-1), b"0" * 1000, Act.FLOOD]) as it:
            found = await outcome(client.fetch(it.url, LIMIT))
            await client.close()
            await it.until(lambda it: it.closed == 1)
            return found[0]

    assert run(scenario(), loop) == "bad_http"


@LOOPS
@pytest.mark.parametrize("end", [Act.HANG, Act.CLOSE])
def test_a_banner_before_the_request_is_no_timeout(end: Act, loop: Callable[[], Any]) -> None:
    """The reason is that of aiohttp, which depends on the event loop."""
    mine, other = run(both([Act.EARLY, b"SSH-2.0-OpenSSH_9.6\r\n", end], 60), loop)
    assert {mine[0], other[0]} <= {"bad_http", "disconnected"}


@LOOPS
@pytest.mark.parametrize("name", ODD)
def test_an_odd_answer_is_read_as_aiohttp_reads_it(name: str, loop: Callable[[], Any]) -> None:
    check_both(ODD[name], 60, loop, "page")


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, bytes, bool]:
    """Return a well-formed answer, its page, and whether the server must close behind it."""
    page = draw(st.binary(max_size=3000) | st.just(PAGE * 3))
    headers = draw(st.lists(st.sampled_from(["Date: now", "content-type: text/plain", "X-A:", "Server: a b"])))
    body = page
    if draw(st.booleans()):
        body = gzip.compress(page)
        headers.append(draw(st.sampled_from(["Content-Encoding: gzip", "content-encoding: x-gzip"])))
    status = draw(st.sampled_from(["HTTP/1.1 200 OK", "HTTP/1.1 200", "HTTP/1.0 200 OK"]))
    framing = draw(st.sampled_from(["length", "chunks", "close"]))
    if framing == "chunks" and status.startswith("HTTP/1.1"):
        cuts = sorted({0, len(body), *draw(st.lists(st.integers(0, len(body)), max_size=5))})
        pieces = [body[start:end] for start, end in pairwise(cuts)]
        end = draw(st.sampled_from([b"0\r\n\r\n", b"0\r\nX-Sum: 1\r\n\r\n", b"000\r\n\r\n"]))
        return answer(chunked(*pieces, end=end), CHUNKED, *headers, status=status, length=-1), page, False
    length = None if framing == "length" else -1
    before = CONTINUE * draw(st.integers(0, 2)) if status.startswith("HTTP/1.1") else b""
    return before + answer(body, *headers, status=status, length=length), page, length == -1


@examples(60)
@given(st.data())
def test_answers_cut_anywhere_are_read_as_aiohttp_reads_them(data: st.DataObject) -> None:
    """Three answers come at once, over connections that share a buffer."""
    drawn = data.draw(st.lists(answers(), min_size=3, max_size=3))
    scripts: list[Script] = []
    for whole, _, closes in drawn:
        cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=8))})
        pieces = [whole[start:end] for start, end in pairwise(cuts)]
        scripts.append([*pieces, Act.CLOSE if closes else Act.HANG])

    async def scenario() -> list[tuple[str, bytes, bool]]:
        client = PageClient(60, 15)
        found = []
        async with peer(scripts[0]) as a, peer(scripts[1]) as b, peer(scripts[2]) as c:
            found += await asyncio.gather(*(outcome(client.fetch(it.url, LIMIT)) for it in (a, b, c)))
            async with open_session(60, 15) as session:
                found += [await outcome(fetch(session, it.url, LIMIT)) for it in (a, b, c)]
        assert not client._unusual
        await client.close()
        return found

    found = run(scenario())
    assert found[:3] == found[3:]
    assert [(reason, body) for reason, body, _ in found[:3]] == [("page", page) for _, page, _ in drawn]


URL_TEXT = st.text("abcXYZ019-._~!$&'()*,;=:@/", max_size=12)


@examples(40)
@given(URL_TEXT, URL_TEXT)
def test_the_request_is_the_one_that_aiohttp_sends(path: str, query: str) -> None:
    async def scenario() -> list[bytes]:
        client = PageClient(60, 15)
        async with peer([OK, Act.HANG]) as it, open_session(60, 15) as session:
            url = f"{it.url}/{path}?{query}" if query else f"{it.url}/{path}"
            await client.fetch(url, LIMIT)
            await fetch(session, url, LIMIT)
            await client.close()
            return it.requests

    mine, other = (request.split(b"\r\n") for request in run(scenario()))
    assert mine[0] == other[0]
    assert set(mine) == set(other)


def test_a_connection_serves_scrape_after_scrape() -> None:
    async def scenario() -> Peer:
        client = PageClient(60, 15)
        async with peer([OK, Act.NEXT, answer(chunked(PAGE), CHUNKED, length=-1), Act.NEXT, OK, Act.HANG]) as it:
            for _ in range(3):
                assert (await client.fetch(it.url, LIMIT)).body == PAGE
            await client.close()
            await it.until(lambda it: it.closed == 1)
            return it

    it = run(scenario())
    assert (it.opened, len(it.requests)) == (1, 3)


@LOOPS
@pytest.mark.parametrize("status", ["503 Busy", "404 Not Found", "302 Found", "204 No Content", "304 Not Modified"])
def test_a_connection_serves_on_after_a_whole_answer_of_another_status(status: str, loop: Callable[[], Any]) -> None:
    has_body = status[:3] not in ("204", "304")
    error = answer(b"busy" if has_body else b"", status=f"HTTP/1.1 {status}", length=None if has_body else -1)

    async def scenario() -> list[Any]:
        client = PageClient(60, 15)
        async with peer([error, Act.NEXT, error, Act.NEXT, OK, Act.HANG]) as it:
            reasons = [(await outcome(client.fetch(it.url, LIMIT)))[0] for _ in range(3)]
            await client.close()
            await it.until(lambda it: it.closed == it.opened)
            return [*reasons, it.opened]

    reason = "redirect" if status.startswith("30") else "http_status"
    assert run(scenario(), loop) == [reason, reason, "page", 1]


@pytest.mark.parametrize(
    "error",
    [
        answer(b"busy", length=9, status="HTTP/1.1 503 Busy"),
        answer(b"busy", "Connection: close", status="HTTP/1.1 503 Busy"),
        answer(b"busy", status="HTTP/1.0 503 Busy"),
        answer(b"busy", status="HTTP/1.1 503 Busy", length=-1),
        answer(b"busy", status="HTTP/1.1 503 Busy") + OK,
        answer(b"zz\r\n", CHUNKED, status="HTTP/1.1 503 Busy", length=-1),
        answer(b"x" * 50_000, length=10**6, status="HTTP/1.1 503 Busy"),
    ],
)
def test_a_connection_ends_after_part_of_an_answer_of_another_status(error: bytes) -> None:
    async def scenario() -> list[Any]:
        client = PageClient(60, 15)
        async with peer([error, Act.HANG], [OK, Act.HANG]) as it:
            reasons = [(await outcome(client.fetch(it.url, LIMIT)))[0]]
            await it.until(lambda it: it.closed == 1)
            reasons.append((await outcome(client.fetch(it.url, LIMIT)))[0])
            await client.close()
            return [*reasons, it.opened]

    assert run(scenario()) == ["http_status", "page", 2]


@pytest.mark.parametrize("end", [[Act.CLOSE], [Act.NEXT, Act.CLOSE], [Act.NEXT, Act.RESET], [b"HTTP/1.1 408 \r\n"]])
def test_a_connection_that_the_peer_has_given_up_costs_no_scrape(end: Script) -> None:
    """Between two scrapes, or as the second request comes: it is sent again over a new connection."""

    async def scenario() -> int:
        client = PageClient(60, 15)
        async with peer([OK, *end], [OK, Act.HANG]) as it:
            for _ in range(2):
                assert (await client.fetch(it.url, LIMIT)).body == PAGE
                await asyncio.sleep(0.02)
            await client.close()
            return it.opened

    assert run(scenario()) == 2


def test_a_peer_that_always_closes_is_asked_twice_a_scrape() -> None:
    async def scenario() -> int:
        client = PageClient(60, 15)
        async with peer([Act.CLOSE]) as it:
            assert (await outcome(client.fetch(it.url, LIMIT)))[0] == "disconnected"
            await client.close()
            return it.opened

    assert run(scenario()) == 2


def test_a_peer_that_httptools_cannot_read_is_aiohttps_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_http, "UNUSUAL_S", 0.0)

    async def scenario() -> list[int]:
        client = PageClient(60, 15)
        opened = []
        async with peer([OK.replace(b"\r\n", b"\n"), Act.CLOSE]) as it:
            for _ in range(2):
                assert (await client.fetch(it.url, LIMIT)).body == PAGE
                opened.append(it.opened)
            client._close_idle_connections()  # the while is over
            await client.fetch(it.url, LIMIT)
            opened.append(it.opened)
        await client.close()
        return opened

    assert run(scenario()) == [2, 3, 5]


@pytest.mark.parametrize(
    "url",
    [
        "https://n001:9400/metrics",
        "http://user:secret@n001:9400/metrics",
        "http://n001:9400/metrics#part",
        "http://n001:9400/a/../metrics",
        "http://n\u00fc1:9400/metrics",
        "http://n001:9400/metrics?collect[]=cpu",
        "http://[fe80::1%25eth0]:9400/metrics",
        "http://n001:99999/metrics",
        "http://n001:0/metrics",
        "http://[1.2.3.4]:9400/metrics",
        "http://127.1:9400/metrics",
        "http://2130706433:9400/metrics",
        "http://0x7f.1:9400/metrics",
        "http://0X7F000001:9400/metrics",
        "http://127.0.0.01:9400/metrics",
        "http://127.0.0.1.:9400/metrics",
        "http://n001:9400/metric\u017f",
        "http://n001:9400/\u212a",
        "http://\u212a8s:9400/metrics",
    ],
)
def test_urls_of_another_form_are_aiohttps(url: str) -> None:
    assert plain_http._make_plain_request(url) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "n001", "c01", "10-0-0-1.svc", "[::1]", "fe80.example"])
def test_hosts_of_these_forms_are_plain(host: str) -> None:
    assert plain_http._make_plain_request(f"http://{host}:9400/metrics") is not None


def test_a_url_cannot_add_lines_to_a_request() -> None:
    assert plain_http._make_plain_request("http://n001:9400/a\r\nX: 1") is None
    assert plain_http._make_plain_request("http://n001:9400/a\n") is None
    assert plain_http._make_plain_request("http://n001:9400/a b") is None


def test_an_ipv6_address_and_its_host_header() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")

    async def scenario() -> bytes:
        client = PageClient(60, 15)
        async with peer([OK, Act.HANG], host="::1") as it:
            url = f"http://[::1]:{it.port}/metrics"
            assert (await client.fetch(url, LIMIT)).body == PAGE
            await client.close()
            return it.requests[0].replace(str(it.port).encode(), b"PORT")

    try:
        request = run(scenario())
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    assert b"\r\nHost: [::1]:PORT\r\n" in request


def test_a_name_is_looked_up_again_once_its_address_no_longer_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ports: list[int] = []

    async def resolve(host: str, port: int) -> list[Any]:
        asked.append(host)
        return at_port(ports[0])

    monkeypatch.setattr(plain_http, "resolve_host", resolve)
    url = "http://n001.example:9400/metrics"

    async def scenario() -> list[str]:
        client = PageClient(60, 15)
        reasons = []
        async with peer([OK, Act.CLOSE]) as first:
            ports.append(first.port)
            for _ in range(2):
                reasons.append((await outcome(client.fetch(url, LIMIT)))[0])
                await first.until(lambda it: it.closed == it.opened)
        assert asked == ["n001.example"]
        async with peer([OK, Act.HANG]) as second:
            ports[:] = [second.port]
            for _ in range(2):
                reasons.append((await outcome(client.fetch(url, LIMIT)))[0])
            await client.close()
        return reasons

    assert run(scenario()) == ["page", "page", "refused", "page"]
    assert asked == ["n001.example"] * 2


def test_a_name_with_a_dead_address_is_reached_at_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = socket.socket()  # bound and not listening
    closed.bind(("127.0.0.1", 0))

    async def scenario() -> str:
        client = PageClient(60, 15)
        async with peer([OK, Act.HANG]) as it:

            async def resolve(host: str, port: int) -> list[Any]:
                return at_port(closed.getsockname()[1]) + at_port(it.port)

            monkeypatch.setattr(plain_http, "resolve_host", resolve)
            found = await outcome(client.fetch("http://n001.example:9400/metrics", LIMIT))
            await client.close()
            return found[0]

    assert run(scenario()) == "page"
    closed.close()


@LOOPS
def test_a_slow_lookup_stops_no_other_target(monkeypatch: pytest.MonkeyPatch, loop: Callable[[], Any]) -> None:
    async def scenario() -> FetchError:
        release = asyncio.Event()

        async def resolve(host: str, port: int) -> list[Any]:
            await release.wait()
            return await unknown(host, port)

        monkeypatch.setattr(plain_http, "resolve_host", resolve)
        client = PageClient(60, 15)
        slow = asyncio.create_task(client.fetch(NAMED, LIMIT))
        async with peer([OK, Act.HANG]) as it:
            assert (await client.fetch(it.url, LIMIT)).body == PAGE
        release.set()
        with pytest.raises(FetchError) as failure:
            await slow
        await client.close()
        return failure.value

    assert run(scenario(), loop).reason == "unreachable"


@LOOPS
def test_a_lookup_that_is_slower_than_the_timeout_serves_the_next_fetch(
    monkeypatch: pytest.MonkeyPatch, loop: Callable[[], Any]
) -> None:
    """One lookup runs for all fetches of a name, and a fetch that times out does not end it."""
    asked: list[str] = []

    async def scenario() -> list[str]:
        release = asyncio.Event()
        client = PageClient(0.1, 15)
        async with peer([OK, Act.CLOSE]) as it:

            async def resolve(host: str, port: int) -> list[Any]:
                asked.append(host)
                await release.wait()
                return at_port(it.port)

            monkeypatch.setattr(plain_http, "resolve_host", resolve)
            reasons = [(await outcome(client.fetch(NAMED, LIMIT)))[0]]
            both = await asyncio.gather(*(outcome(client.fetch(NAMED, LIMIT)) for _ in "ab"))
            reasons += [reason for reason, _, _ in both]
            release.set()
            await asyncio.sleep(0)
            client._timeout_s = 60
            reasons += [(await outcome(client.fetch(NAMED, LIMIT)))[0] for _ in "ab"]
            await client.close()
        return reasons

    assert run(scenario(), loop) == ["timeout"] * 3 + ["page"] * 2
    assert asked == ["n001.example"]


@pytest.mark.parametrize("ends", [True, False], ids=["fails later", "hangs"])
def test_a_lookup_without_a_waiting_fetch_leaves_no_task_and_no_complaint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def resolve(host: str, port: int) -> list[Any]:
            await release.wait()
            return await unknown(host, port)

        monkeypatch.setattr(plain_http, "resolve_host", resolve)
        client = PageClient(0.05, 15)
        assert (await outcome(client.fetch(NAMED, LIMIT)))[0] == "timeout"
        assert len(asyncio.all_tasks()) == 2  # this one and the lookup
        if ends:
            release.set()
            async with asyncio.timeout(60):
                while len(asyncio.all_tasks()) > 1:
                    await asyncio.sleep(0)
        await client.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        run(scenario())
        gc.collect()
    assert "never retrieved" not in caplog.text


@LOOPS
def test_the_address_of_a_connect_that_hangs_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch, loop: Callable[[], Any]
) -> None:
    asked: list[str] = []
    connect = aiohappyeyeballs.start_connection

    async def scenario() -> list[str]:
        client = PageClient(60, 15)
        async with peer([OK, Act.HANG]) as it:

            async def resolve(host: str, port: int) -> list[Any]:
                asked.append(host)
                return at_port(it.port if len(asked) > 1 else 1)

            async def start_connection(found: Any, **options: Any) -> Any:
                if found[0][4][1] == 1:
                    await asyncio.sleep(3600)
                return await connect(found, **options)

            monkeypatch.setattr(plain_http, "resolve_host", resolve)
            monkeypatch.setattr(aiohappyeyeballs, "start_connection", start_connection)
            client._timeout_s = 0.05
            reasons = [(await outcome(client.fetch(NAMED, LIMIT)))[0]]
            client._timeout_s = 60
            reasons.append((await outcome(client.fetch(NAMED, LIMIT)))[0])
            await client.close()
        return reasons

    assert run(scenario(), loop) == ["timeout", "page"]
    assert len(asked) == 2


@LOOPS
def test_addresses_need_no_name_service(loop: Callable[[], Any]) -> None:
    found = run(plain_http.resolve_host("127.0.0.1", 9400), loop)
    assert [entry[4] for entry in found] == [("127.0.0.1", 9400)]


@LOOPS
@pytest.mark.parametrize("host", ["n001..svc.cluster.local", f"{'n' * 64}.cluster.local", ".n001", "[1.2.3.4]"])
def test_a_host_that_no_name_service_can_be_asked_for_is_a_failure(host: str, loop: Callable[[], Any]) -> None:
    async def scenario() -> str:
        client = PageClient(60, 15)
        reason = (await outcome(client.fetch(f"http://{host}:9400/metrics", LIMIT)))[0]
        await client.close()
        return reason

    assert run(scenario(), loop) == "bad_http"


def test_an_event_loop_that_refuses_to_connect_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop raises RuntimeError for a socket that it cannot use."""

    async def start_connection(*_: Any, **__: Any) -> Any:
        raise RuntimeError("File descriptor 9 is used by transport")

    monkeypatch.setattr(aiohappyeyeballs, "start_connection", start_connection)

    async def scenario() -> str:
        client = PageClient(60, 15)
        reason = (await outcome(client.fetch("http://127.0.0.1:9400/metrics", LIMIT)))[0]
        await client.close()
        return reason

    assert run(scenario()) == "unreachable"


ENDS: dict[str, Script] = {
    "closed": [answer(PAGE, "Connection: close"), Act.CLOSE],
    "failed": [answer(length=9, status="HTTP/1.1 503 Busy"), Act.HANG],
    "cut off": [OK[:-9], Act.CLOSE],
    "unreadable": [b"\x00\xff" * 200, Act.HANG],
    "timed out": [OK[:-9], Act.HANG],
    "idle": [OK, Act.HANG],
    "idle after an error": [answer(b"busy", status="HTTP/1.1 503 Busy"), Act.HANG],
}


@LOOPS
@pytest.mark.parametrize("name", ENDS)
def test_nothing_of_a_page_remains_after_its_fetch(
    name: str, loop: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service rarely runs the garbage collector, so all must be freed without it."""
    connections: list[weakref.ref[Any]] = []
    made = plain_http._Connection.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        made(self, transport)
        connections.append(weakref.ref(self))

    monkeypatch.setattr(plain_http._Connection, "connection_made", connection_made)

    async def scenario() -> None:
        client = PageClient(0.5 if name == "timed out" else 60, 15)
        async with peer(ENDS[name]) as it:
            await outcome(client.fetch(it.url, LIMIT))
            if not name.startswith("idle"):
                await it.until(lambda it: it.closed == it.opened)
            async with asyncio.timeout(60):  # until the event loop has called connection_lost
                while sum(ref() is not None for ref in connections) > name.startswith("idle"):
                    await asyncio.sleep(0)
            alive = [connection for ref in connections if (connection := ref()) is not None]
            assert len(alive) == name.startswith("idle")
            kept = [value for it in alive for value in vars(it).values()]
            assert not any(isinstance(value, bytes | dict) or hasattr(value, "getvalue") for value in kept)
            assert not any(hasattr(value, "feed_data") for value in kept)
            await client.close()

    gc.disable()
    try:
        run(scenario(), loop)
        assert connections
    finally:
        gc.enable()


@LOOPS
def test_refused_and_unknown_targets_read_as_aiohttp_reports_them(
    monkeypatch: pytest.MonkeyPatch, loop: Callable[[], Any]
) -> None:
    async def resolve(_: Any, host: str, port: int = 0, **__: Any) -> list[Any]:
        return await unknown(host, port)

    monkeypatch.setattr(plain_http, "resolve_host", unknown)
    monkeypatch.setattr(aiohttp.connector.DefaultResolver, "resolve", resolve)

    async def text(page: Awaitable[Any]) -> str:
        with pytest.raises(FetchError) as failure:
            await page
        return str(failure.value)

    async def scenario() -> list[tuple[str, str]]:
        async with peer([OK, Act.HANG]) as it:
            closed = it.url
        client = PageClient(60, 15)
        async with open_session(60, 15) as session:
            urls = [closed, "http://nowhere.invalid:9400/metrics"]
            found = [(await text(client.fetch(url, LIMIT)), await text(fetch(session, url, LIMIT))) for url in urls]
        await client.close()
        return found

    (refused, refused_before), (missing, missing_before) = run(scenario(), loop)
    assert refused == refused_before
    assert refused.startswith("refused: http://127.0.0.1:")
    assert missing == missing_before
    assert missing.startswith("unreachable: http://nowhere.invalid:9400/metrics")


@LOOPS
@pytest.mark.parametrize("script", [[Act.HANG], [OK[:30], Act.HANG], [OK[:-5], Act.HANG]])
def test_a_cancelled_fetch_leaves_no_socket(script: Script, loop: Callable[[], Any]) -> None:
    async def scenario() -> None:
        client = PageClient(60, 15)
        async with peer(script) as it:
            task = asyncio.create_task(client.fetch(it.url, LIMIT))
            await it.until(lambda it: bool(it.requests))
            await asyncio.sleep(0.02)
            task.cancel()
            await it.until(lambda it: it.closed == 1)
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            await client.close()
            assert not client._idle

    before = sockets()
    run(scenario(), loop)
    assert sockets() <= before


@LOOPS
def test_idle_connections_are_closed_after_a_while(loop: Callable[[], Any]) -> None:
    async def scenario() -> None:
        client = PageClient(60, keepalive_s=0.05)
        async with peer([OK, Act.HANG]) as it:
            await asyncio.gather(*(client.fetch(it.url, LIMIT) for _ in range(5)))
            assert it.opened == 5
            await it.until(lambda it: it.closed == 5)
            assert not client._idle
            await client.close()

    run(scenario(), loop)


@LOOPS
def test_close_ends_every_connection_and_leaves_no_task(loop: Callable[[], Any]) -> None:
    async def scenario() -> None:
        client = PageClient(60, 15)
        async with peer([OK, Act.HANG]) as it:
            await asyncio.gather(*(client.fetch(it.url, LIMIT) for _ in range(5)))
            await client.close()
            await it.until(lambda it: it.closed == 5)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    before = sockets()
    run(scenario(), loop)
    assert sockets() <= before


def test_unasked_bytes_close_an_idle_connection() -> None:
    async def scenario() -> int:
        client = PageClient(60, 15)
        async with peer([OK, b"", answer(b"late 1\n"), Act.HANG], [OK, Act.HANG]) as it:
            for _ in range(2):
                assert (await client.fetch(it.url, LIMIT)).body == PAGE
                await asyncio.sleep(0.02)
            await client.close()
            return it.opened

    assert run(scenario()) == 2


def test_an_error_names_no_secret_of_the_url() -> None:
    async def scenario() -> str:
        client = PageClient(60, 15)
        async with peer([answer(status="HTTP/1.1 500 Oops"), Act.HANG]) as it:
            with pytest.raises(FetchError) as failure:
                await client.fetch(f"{it.url}?token=hidden", LIMIT)
        await client.close()
        return str(failure.value)

    text = run(scenario())
    assert "hidden" not in text
    assert text.endswith("?token=*** answered 500")
