"""The exporter server: pages over HTTP, nodes that are gone, bad lines that are counted exactly."""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import numpy as np
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.simulator.hardware.cluster import FleetSpec, SimulatedFleet
from fleetcast.simulator.hardware.exporters import Breakage, ExporterServer

Client = aiohttp.ClientSession


def serve(
    use: Callable[[ExporterServer, Client, ManualClock], Awaitable[None]], *, nodes: int = 2, bad_share: float = 0.0
) -> ExporterServer:
    """Run `use` against a server of a small fleet; its clock stands until the test moves it."""

    async def main() -> ExporterServer:
        clock = ManualClock(1_000_000)
        fleet = SimulatedFleet(FleetSpec(nodes=nodes), seed=1)
        breakage = Breakage(np.random.default_rng([1, 5]), bad_share) if bad_share > 0 else None
        server = ExporterServer(fleet, clock, breakage)
        await server.start("127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession() as client:
                await use(server, client, clock)
        finally:
            await server.close()
        return server

    return asyncio.run(main())


async def get(client: Client, url: str) -> tuple[int, bytes]:
    async with client.get(url) as response:
        return response.status, await response.read()


def test_every_node_and_exporter_has_a_path_of_its_own() -> None:
    async def use(server: ExporterServer, client: Client, clock: ManualClock) -> None:
        assert server.paths == ["/n001/dcgm/metrics", "/n001/node/metrics", "/n002/dcgm/metrics", "/n002/node/metrics"]
        for url in server.list_urls():
            status, body = await get(client, url)
            assert status == 200
            assert (b"DCGM_FI_DEV_SM_CLOCK{" in body) == ("dcgm" in url)
        assert server.pages_served == 4

    serve(use)


def test_an_unknown_path_is_404_and_another_method_405() -> None:
    async def use(server: ExporterServer, client: Client, clock: ManualClock) -> None:
        url = f"http://127.0.0.1:{server.port}"
        assert (await get(client, url + "/n999/dcgm/metrics"))[0] == 404
        async with client.post(url + "/n001/dcgm/metrics") as response:
            assert response.status == 405

    serve(use)


def test_the_fleet_moves_with_the_clock() -> None:
    async def use(server: ExporterServer, client: Client, clock: ManualClock) -> None:
        url = server.list_urls()[0]
        first = await get(client, url)
        assert await get(client, url) == first
        clock.advance(15)
        assert await get(client, url) != first
        assert server.source.time_ms == 1_015_000

    serve(use)


def test_a_lost_node_closes_the_connection_and_the_others_answer() -> None:
    async def use(server: ExporterServer, client: Client, clock: ManualClock) -> None:
        assert isinstance(server.source, SimulatedFleet)
        server.source.faults.inject("node_lost", "n001", None, 1_000_000)
        with pytest.raises(aiohttp.ClientError):
            await get(client, server.list_urls()[0])
        assert (await get(client, server.list_urls()[2]))[0] == 200

    serve(use)


def test_a_node_whose_gpu_fell_off_the_bus_answers_late() -> None:
    async def use(server: ExporterServer, client: Client, clock: ManualClock) -> None:
        assert isinstance(server.source, SimulatedFleet)
        server.source.faults.inject("gpu_off_bus", "n001", 1, 1_000_000, delay_s=0.2, warns_s=0.0)
        begin = asyncio.get_running_loop().time()
        assert b'gpu="1"' not in (await get(client, server.list_urls()[0]))[1]
        assert asyncio.get_running_loop().time() - begin >= 0.19

    serve(use)


def test_the_server_reports_its_counts() -> None:
    async def use(server: ExporterServer, client: Client, clock: ManualClock) -> None:
        await get(client, server.list_urls()[0])
        status, body = await get(client, f"http://127.0.0.1:{server.port}/")
        assert (status, body) == (200, b'{"bad_records_injected": 0, "pages": 1}')

    serve(use)


def test_requests_in_one_packet_are_answered_in_order() -> None:
    async def use(server: ExporterServer, client: Client, clock: ManualClock) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        request = "GET {} HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write((request.format("/nope") + request.format("/n001/node/metrics")).encode())
        heads = []
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head.split(b"\r\n")[0])
            await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
        assert heads == [b"HTTP/1.1 404 Not Found", b"HTTP/1.1 200 OK"]
        writer.close()
        await writer.wait_closed()

    serve(use)


def test_the_decoder_counts_exactly_the_bad_lines_that_were_served() -> None:
    counted: list[str] = []

    async def use(server: ExporterServer, client: Client, clock: ManualClock) -> None:
        resolver = ExporterResolver(Entities())
        decoders = {url: PageDecoder(resolver, Target("n")) for url in server.list_urls()}
        for _ in range(12):
            for url in server.list_urls():
                batch = decoders[url].decode((await get(client, url))[1], clock.now_ms())
                counted.extend(error.reason for error in batch.bad)
            clock.advance(15)

    server = serve(use, nodes=4, bad_share=0.5)
    assert server.bad_records_injected == len(counted) > 15
    assert len(set(counted)) >= 2


def test_a_spoilt_page_differs_in_one_line() -> None:
    fleet = SimulatedFleet(FleetSpec(nodes=1), seed=1)
    fleet.advance(0)
    page = fleet.render_page("n001", "dcgm")
    breakage = Breakage(np.random.default_rng(1), share=1.0)
    spoilt = [broken for broken, bad in (breakage.break_line(page) for _ in range(30)) if bad]
    assert len(spoilt) > 10
    for broken in spoilt:
        pairs = list(zip(page.split(b"\n"), broken.split(b"\n"), strict=True))
        assert sum(old != new for old, new in pairs) == 1


def test_a_blanked_number_is_no_bad_record() -> None:
    fleet = SimulatedFleet(FleetSpec(nodes=1), seed=1)
    fleet.advance(0)
    breakage = Breakage(np.random.default_rng(1), share=1.0)
    spoilt = [breakage.break_line(fleet.render_page("n001", "dcgm")) for _ in range(60)]
    blanked = [page for page, bad in spoilt if b" 9223372036854775794\n" in page and bad == 0]
    assert blanked
    decoder = PageDecoder(ExporterResolver(Entities()), Target("n001"))
    assert decoder.decode(blanked[0], 0).bad == ()
    assert decoder.noted["blank"] == 1


def test_a_page_without_breakable_lines_is_left_alone() -> None:
    assert Breakage(np.random.default_rng(1), share=1.0).break_line(b"up 1\n") == (b"up 1\n", 0)


def test_a_response_that_was_cut_off_does_not_count() -> None:
    async def use(server: ExporterServer, client: Client, clock: ManualClock) -> None:
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /n001/dcgm/metrics HTTP/1.1\r\n\r\n" * 200)  # 15 MB: more than socket buffers take
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.transport.abort()
        await asyncio.sleep(0.05)
        assert server.pages_served < 20 * 200

    serve(use, nodes=1)
