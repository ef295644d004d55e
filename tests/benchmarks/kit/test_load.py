import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fleetcast.benchmarks.kit.load import LoadRequest, make_get, make_post, run_closed_loop, run_open_loop


class Server:
    """Answers each request on a line of its own; `stall_s` before the fifth answer; sends in two pieces."""

    def __init__(self, stall_s: float = 0.0, status: str = "200 OK") -> None:
        self.stall_s = stall_s
        self.status = status
        self.asked: list[bytes] = []
        self.port = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            self.asked.append(head.partition(b" HTTP")[0])
            if len(self.asked) == 5:
                await asyncio.sleep(self.stall_s)
            writer.write(f"HTTP/1.1 {self.status}\r\ncontent-length: 4\r\n\r\n".encode() + b"ab")
            await writer.drain()
            writer.write(b"cd")

    async def _run(self, ready: threading.Event) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._guarded, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        server.close()

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @contextmanager
    def running(self) -> Iterator["Server"]:
        ready = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._run(ready)))
        thread.start()
        ready.wait(10)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join()


def test_a_closed_loop_asks_until_nothing_is_left() -> None:
    bodies: list[bytes] = []
    asks = [make_get(f"/{number}", lambda head, body: bodies.append(body)) for number in range(20)]
    with Server().running() as server:
        load = run_closed_loop(server.port, lambda: asks.pop() if asks else None, connections=3, seconds=10)
        assert sorted(server.asked) == sorted(f"GET /{number}".encode() for number in range(20))
    assert len(load.latency_s) == load.checked == 20
    assert bodies == [b"abcd"] * 20


def test_an_open_loop_charges_a_stall_to_all_that_were_due_meanwhile() -> None:
    # 100 a second over one connection; the fifth waits 0.4 s, and so do about 40 behind it, each a little less
    with Server(stall_s=0.4).running() as server:
        load = run_open_loop(server.port, lambda: make_get("/"), connections=1, seconds=1.0, rate=100)
    assert len(load.latency_s) == 100
    assert sum(latency > 0.1 for latency in load.latency_s) >= 25
    assert load.compute_quantile_ms(1.0) >= 390


@pytest.mark.parametrize("status", ["500 Oops", "404 Not Found"])
def test_an_answer_with_another_status_ends_the_run(status: str) -> None:
    with Server(status=status).running() as server, pytest.raises(AssertionError, match=status[:3]):
        run_closed_loop(server.port, lambda: make_get("/"), connections=1, seconds=5)


def test_a_body_goes_out_with_its_length() -> None:
    assert make_post("/x", b"{}", b"202") == LoadRequest(
        b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}", b"202"
    )
