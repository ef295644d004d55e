import asyncio
import gc
import gzip
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fleetcast.fleet.clock import ScaledClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages import bursts, plain_http, scrape
from fleetcast.ingest.pages.fetch import FetchedPage
from fleetcast.ingest.pages.plain_http import PageClient
from fleetcast.ingest.pages.scrape import Scraper
from fleetcast.ingest.pages.scrape_samples import UNNAMED_ROUNDS
from fleetcast.ingest.pages.text import PageDecoder
from fleetcast.ingest.source import Batch
from tests.ingest.exporter_pages import dcgm_page, page

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
NODE_PAGE = page(
    'node_infiniband_state_id{device="mlx5_0",port="1"} 4',
    'node_uname_info{nodename="n001"} 1',
)


@dataclass
class Options:
    interval_s: float = 15.0
    timeout_s: float = 0.5
    max_body_bytes: int = 100_000
    concurrency: int = 64


@asynccontextmanager
async def exporter(**handlers: Handler) -> AsyncIterator[str]:
    """A web server with one path a handler; yields its base URL."""
    app = web.Application()
    for path, handler in handlers.items():
        app.router.add_get(f"/{path}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def answers(body: bytes, **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, headers=headers)

    return handler


async def hangs(request: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


def fast_clock() -> ScaledClock:
    """15 s of fleet time in a tenth of a second."""
    return ScaledClock(epoch_ms=1_700_000_000_000, wall_ms=1_700_000_000_000, speed=150.0)


class Round:
    """A scraper that takes batches until a condition holds."""

    def __init__(self, targets: Sequence[str], options: Options | None = None) -> None:
        self.entities = Entities()
        self.clock = fast_clock()
        self.scraper = Scraper(self.entities, targets, options or Options(), self.clock)
        self.batches: list[Batch] = []

    async def until(self, done: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not done():
                self.batches.append(await self.scraper.next())

    def values(self, metric: str, entity: str) -> list[float]:
        """All values of a series, in order of arrival."""
        found = []
        for batch in self.batches:
            for samples in batch.samples:
                names = self.entities[samples.kind].names
                rows = zip(samples.metric.tolist(), samples.entity.tolist(), samples.value.tolist(), strict=True)
                found += [v for m, e, v in rows if METRICS[samples.kind][m].name == metric and names[e] == entity]
        return found

    def reasons(self) -> set[str]:
        return {error.reason for batch in self.batches for error in batch.bad}


def test_pages_become_samples_and_the_scrape_itself_is_a_signal() -> None:
    async def scenario() -> Round:
        async with exporter(dcgm=answers(dcgm_page(gpus=8))) as url:
            work = Round([f"{url}/dcgm"])
            await work.until(lambda: len(work.values("scrape_up", "n001")) >= 2)
            await work.scraper.close()
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    assert work.values("power_w", "n001/7")[:2] == [407.0, 407.0]
    assert work.values("gpus_reported", "n001")[:2] == [8.0, 8.0]
    assert work.values("scrape_up", "n001")[:2] == [1.0, 1.0]
    assert work.values("scrape_duration_s", "n001")[0] > 0
    assert work.values("ports_reported", "n001") == []
    assert work.scraper.models() == {"n001": "H100"}
    health = work.scraper.health()
    assert (health["up"], health["down"], health["bad"]) == (1, 0, 0)


def test_rounds_follow_the_fleets_clock() -> None:
    async def scenario() -> tuple[int, int]:
        async with exporter(dcgm=answers(dcgm_page())) as url:
            work = Round([f"{url}/dcgm"])
            first_ms = work.clock.now_ms()
            await work.until(lambda: len(work.values("scrape_up", "n001")) >= 5)
            await work.scraper.close()
            return len(work.values("scrape_up", "n001")), work.clock.now_ms() - first_ms

    rounds, elapsed_ms = asyncio.run(scenario())
    assert elapsed_ms >= (rounds - 1) * 15_000


class SetClock:
    """A fast clock that is set by `off_ms`."""

    def __init__(self) -> None:
        self.clock, self.off_ms = fast_clock(), 0

    def now_ms(self) -> int:
        return self.clock.now_ms() + self.off_ms

    def steady_ms(self) -> int:
        return self.clock.steady_ms()

    def convert_to_wall_s(self, fleet_s: float) -> float:
        return self.clock.convert_to_wall_s(fleet_s)

    async def sleep(self, fleet_s: float) -> None:
        await self.clock.sleep(fleet_s)


@pytest.mark.parametrize("hours", [-5, 5])
def test_rounds_go_on_when_the_clock_is_set(hours: int) -> None:
    async def scenario() -> list[float]:
        async with exporter(dcgm=answers(dcgm_page())) as url:
            clock = SetClock()
            scraper = Scraper(Entities(), [f"{url}/dcgm"], Options(), clock)
            async with asyncio.timeout(60):
                for _ in range(2):
                    await scraper.next()
                clock.off_ms = hours * 3_600_000
                for _ in range(3):
                    await scraper.next()
            health = scraper.health()
            await scraper.close()
            return [health["lag_s"], health["rate_per_s"]]

    lag_s, rate = asyncio.run(scenario())
    assert lag_s >= 0
    assert rate >= 0


def test_an_exporter_that_hangs_delays_nobody() -> None:
    async def scenario() -> None:
        async with exporter(dcgm=answers(dcgm_page()), stuck=hangs) as url:
            targets = [f"{url}/stuck?{number}" for number in range(5)]
            patient = Round([*targets, f"{url}/dcgm"], Options(timeout_s=90.0))
            await patient.until(lambda: len(patient.values("scrape_up", "n001")) >= 3)
            assert patient.scraper.failures["timeout"] == 0
            await patient.scraper.close()
            work = Round([*targets, f"{url}/dcgm"], Options(timeout_s=0.6))
            await work.until(lambda: work.scraper.failures["timeout"] >= 5)
            await work.until(lambda: 1.0 in work.values("scrape_up", "n001"))
            await work.scraper.close()

    asyncio.run(scenario())


def test_a_slow_page_is_not_lost_while_quick_ones_flow() -> None:
    served = 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal served
        await asyncio.sleep(0.12)
        served += 1
        return web.Response(body=dcgm_page(node="slow01") + b"broken\n")

    async def scenario() -> None:
        async with exporter(slow=slow, quick=answers(NODE_PAGE)) as url:
            round_ = Round([f"{url}/slow", f"{url}/quick"])
            await round_.until(lambda: served >= 4)
            await round_.until(lambda: sum(len(batch.bad) for batch in round_.batches) >= 4)
            await round_.scraper.close()

    asyncio.run(scenario())


def test_hanging_exporters_free_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bursts, "SLOW_S", 0.1)

    async def scenario() -> Round:
        async with exporter(dcgm=answers(dcgm_page()), stuck=hangs) as url:
            targets = [f"{url}/stuck?{number}" for number in range(4)]
            work = Round([*targets, f"{url}/dcgm"], Options(timeout_s=90.0, concurrency=2))
            await work.until(lambda: len(work.values("scrape_up", "n001")) >= 3)
            await work.scraper.close()
            return work

    assert asyncio.run(scenario()).scraper.failures == {}


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (answers(b"x" * 100_001), "too_large"),
        (answers(gzip.compress(b"# " + b"x" * 200_000 + b"\n"), **{"Content-Encoding": "gzip"}), "too_large"),
        (answers(gzip.compress(dcgm_page())[:-20], **{"Content-Encoding": "gzip"}), "truncated"),
        (answers(b"no gzip", **{"Content-Encoding": "gzip"}), "bad_gzip"),
        (answers(b"?", **{"Content-Encoding": "br"}), "bad_encoding"),
        (answers(b"<html>\n" * 10), "no_samples"),
        (hangs, "timeout"),
    ],
)
def test_a_scrape_without_a_page_is_counted_and_shown_as_down(handler: Handler, reason: str) -> None:
    async def scenario() -> Round:
        async with exporter(dcgm=handler) as url:
            work = Round([f"{url}/dcgm"], Options(timeout_s=0.2 if handler is hangs else 90.0))
            await work.until(lambda: work.scraper.failures[reason] >= UNNAMED_ROUNDS)
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    assert set(work.scraper.failures) == {reason}
    assert work.scraper.health()["down"] == 1
    assert set(work.values("scrape_up", "127.0.0.1")) == {0.0}


def test_a_body_cut_off_on_the_wire_is_truncated() -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "500"})
        await response.prepare(request)
        await response.write(dcgm_page()[:300])
        assert request.transport is not None
        request.transport.close()
        return response

    async def scenario() -> Round:
        async with exporter(dcgm=cut) as url:
            work = Round([f"{url}/dcgm"])
            await work.until(lambda: sum(work.scraper.failures.values()) >= 2)
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    assert set(work.scraper.failures) == {"truncated"}
    assert len(work.entities[EntityKind.GPU]) == 0


def test_errors_redirects_and_closed_ports_have_reasons_of_their_own() -> None:
    async def error(request: web.Request) -> web.Response:
        return web.Response(status=503)

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound("http://192.0.2.1/metrics")

    async def scenario() -> set[str]:
        async with exporter(gone=answers(b"")) as closed:
            pass
        async with exporter(error=error, redirect=redirect) as url:
            work = Round([f"{url}/error", f"{url}/redirect", f"{closed}/metrics"])
            await work.until(lambda: len(work.scraper.failures) >= 3)
            await work.scraper.close()
            return set(work.scraper.failures)

    assert asyncio.run(scenario()) == {"http_status", "redirect", "refused"}


def test_a_host_without_tls_or_address_is_a_reason_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(plain_http, "resolve_host", resolve)

    async def scenario() -> set[str]:
        async with exporter(dcgm=answers(dcgm_page())) as url:
            work = Round([f"{url.replace('http:', 'https:')}/dcgm", "http://nowhere.invalid:9400"])
            await work.until(lambda: work.scraper.failures["unreachable"] >= 4)
            await work.scraper.close()
            return set(work.scraper.failures)

    assert asyncio.run(scenario()) == {"unreachable"}


def test_packed_pages_are_read() -> None:
    async def scenario() -> Round:
        packed = answers(gzip.compress(dcgm_page()), **{"Content-Encoding": "gzip"})
        async with exporter(dcgm=packed) as url:
            work = Round([f"{url}/dcgm"])
            await work.until(lambda: bool(work.values("power_w", "n001/1")))
            await work.scraper.close()
            return work

    assert asyncio.run(scenario()).values("power_w", "n001/1")[0] == 401.0


def test_bad_lines_of_a_page_are_passed_on_and_the_rest_is_kept() -> None:
    async def scenario() -> Round:
        async with exporter(dcgm=answers(dcgm_page() + b"what?\nDCGM_FI_DEV_GPU_TEMP{gpu=")) as url:
            work = Round([f"{url}/dcgm"])
            await work.until(lambda: bool(work.batches))
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    assert work.reasons() == {"bad_line", "truncated"}
    assert work.values("scrape_up", "n001")[0] == 1.0
    assert work.scraper.health()["bad"] == sum(len(batch.bad) for batch in work.batches)


def test_the_exporter_that_reports_the_gpus_speaks_for_the_node() -> None:
    """node_exporter goes away: the node's GPUs still answer, so the node is up."""

    async def scenario() -> Round:
        stop = False

        async def node(request: web.Request) -> web.Response:
            return web.Response(status=503) if stop else web.Response(body=NODE_PAGE)

        async with exporter(dcgm=answers(dcgm_page()), node=node) as url:
            work = Round([f"{url}/dcgm", f"{url}/node"])
            await work.until(lambda: bool(work.values("ports_reported", "n001") and work.values("scrape_up", "n001")))
            stop = True
            await work.until(lambda: work.scraper.failures["http_status"] >= 3)
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    assert work.values("ports_reported", "n001")[0] == 1.0
    assert set(work.values("scrape_up", "n001")) == {1.0}
    assert work.entities[EntityKind.NODE].names == ["n001"]


def test_a_node_whose_gpus_vanish_reports_none() -> None:
    async def scenario() -> Round:
        pages = iter([dcgm_page(gpus=1)] * 2)

        async def shrinking(request: web.Request) -> web.Response:
            return web.Response(body=next(pages, b"# nothing left\n"))

        async with exporter(dcgm=shrinking) as url:
            work = Round([f"{url}/dcgm"])
            await work.until(lambda: 0.0 in work.values("gpus_reported", "n001"))
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    assert work.values("gpus_reported", "n001")[:3] == [1.0, 1.0, 0.0]
    assert set(work.values("scrape_up", "n001")) == {1.0}


def test_a_node_that_changes_its_name_does_not_leave_a_ghost() -> None:
    async def scenario() -> Round:
        pages = iter([dcgm_page(node="pod-a")] * 2)

        async def renamed(request: web.Request) -> web.Response:
            return web.Response(body=next(pages, dcgm_page(node="pod-b")))

        async with exporter(dcgm=renamed) as url:
            work = Round([f"{url}/dcgm"])
            await work.until(lambda: len(work.values("scrape_up", "pod-b")) >= 2)
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    assert work.values("scrape_up", "pod-a") == [1.0, 1.0]


def test_a_target_that_never_answers_is_named_after_its_host() -> None:
    async def scenario() -> Round:
        async with exporter(gone=answers(b"")) as closed:
            pass
        work = Round([f"{closed}/metrics", f"{closed}/other gpu-7"])
        await work.until(lambda: bool(work.values("scrape_up", "127.0.0.1") and work.values("scrape_up", "gpu-7")))
        await work.scraper.close()
        return work

    work = asyncio.run(scenario())
    assert work.scraper.failures["refused"] >= UNNAMED_ROUNDS
    assert set(work.values("scrape_up", "gpu-7")) == {0.0}


def test_targets_come_and_go_with_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "RELOAD_S", 0.05)
    path = tmp_path / "targets"

    async def scenario() -> list[str]:
        async with exporter(a=answers(dcgm_page(node="a")), b=answers(dcgm_page(node="b"))) as url:
            path.write_text(f"{url}/a\n")
            work = Round([f"file:{path}"])
            await work.until(lambda: bool(work.values("scrape_up", "a")))
            path.write_text(f"{url}/b\n# {'x' * 50}\n")
            await work.until(lambda: bool(work.values("scrape_up", "b")))
            await work.scraper.close()
            return [target.spec.url.rpartition("/")[2] for target in work.scraper.targets.values()]

    assert asyncio.run(scenario()) == ["b"]


def test_a_consumer_that_stands_still_makes_rounds_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "MAX_PENDING", 3)

    async def scenario() -> Scraper:
        async with exporter(dcgm=answers(dcgm_page())) as url:
            work = Round([f"{url}/dcgm"])
            await work.until(lambda: bool(work.batches))
            async with asyncio.timeout(60):
                while not work.scraper.skipped_rounds:
                    await asyncio.sleep(0.01)
            assert len(work.scraper._pending) <= 3
            await work.scraper.close()
            return work.scraper

    assert asyncio.run(scenario()).skipped_rounds > 0


def test_a_bug_in_a_scrape_reaches_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with exporter(dcgm=answers(dcgm_page())) as url:
            work = Round([f"{url}/dcgm"])
            monkeypatch.setattr(work.scraper, "_add_node_samples", None)
            try:
                with pytest.raises(TypeError):
                    await work.until(lambda: False)
            finally:
                await work.scraper.close()

    asyncio.run(scenario())


def test_a_service_lists_targets_and_what_it_said_last_counts_while_it_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scrape, "RELOAD_S", 0.05)
    monkeypatch.setattr(scrape, "ASK_S", 0.05)
    asked = []

    async def scenario() -> Round:
        async with exporter(dcgm=answers(dcgm_page(gpus=1))) as url:

            async def groups(request: web.Request) -> web.Response:
                asked.append(request.path)
                if len(asked) > 1:
                    return web.Response(status=503)
                labels = {"__metrics_path__": "/dcgm", "node": "listed"}
                return web.json_response([{"targets": [url.removeprefix("http://")], "labels": labels}])

            async with exporter(groups=groups) as service:
                work = Round([f"http_sd:{service}/groups"])
                await work.until(lambda: len(asked) > 3 and len(work.values("power_w", "listed/0")) > 3)
            await work.scraper.close()
            return work

    assert asyncio.run(scenario()).values("scrape_up", "listed")


def test_an_invalid_byte_of_a_service_ends_nothing_and_its_row_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scrape, "RELOAD_S", 0.05)
    monkeypatch.setattr(scrape, "ASK_S", 0.05)
    asked = []

    async def scenario() -> dict[str, str]:
        async with exporter(dcgm=answers(dcgm_page(gpus=1))) as url:

            async def groups(request: web.Request) -> web.Response:
                asked.append(request.path)
                if len(asked) > 1:
                    return web.Response(body=b'[{"targets": ["n\xff:9400"]}]')
                labels = {"__metrics_path__": "/dcgm", "node": "listed"}
                return web.json_response([{"targets": [url.removeprefix("http://")], "labels": labels}])

            async with exporter(groups=groups) as service:
                work = Round([f"http_sd:{service}/groups"])
                await work.until(lambda: len(asked) > 4)
                refused: dict[str, str] = work.scraper.health()["refused_lists"]
                seen = len(work.values("power_w", "listed/0"))
                await work.until(lambda: len(work.values("power_w", "listed/0")) > seen)
            await work.scraper.close()
            return {url.removeprefix(service): why for url, why in refused.items()}

    assert "byte 16 (0xff) is not UTF-8" in asyncio.run(scenario())["/groups"]
    assert caplog.text.count("cannot read targets from") == 1


def test_a_bug_in_the_decoding_of_one_page_is_that_targets_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decode = PageDecoder.decode

    def with_a_bug(decoder: PageDecoder, page: bytes, now_ms: int, *, open_metrics: bool) -> Batch:
        if b"poison" in page:
            raise IndexError("a bug")
        return decode(decoder, page, now_ms, open_metrics=open_metrics)

    monkeypatch.setattr(PageDecoder, "decode", with_a_bug)

    async def scenario() -> Round:
        async with exporter(good=answers(dcgm_page(gpus=1)), bad=answers(b"poison")) as url:
            work = Round([f"{url}/good n001", f"{url}/bad n002"])
            await work.until(
                lambda: len(work.values("scrape_up", "n001")) > 2 and len(work.values("scrape_up", "n002")) > 2
            )
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    assert set(work.values("scrape_up", "n001")) == {1.0}
    assert set(work.values("scrape_up", "n002")) == {0.0}
    assert work.scraper.health()["failures"]["decoder_bug"] > 2
    assert caplog.text.count("IndexError: a bug") == 2  # the traceback, and that the target is down


@pytest.mark.parametrize("host", ["n001..svc.cluster.local", "n" * 64])
def test_a_host_name_that_cannot_be_looked_up_is_that_targets_alone(host: str) -> None:
    async def scenario() -> Round:
        async with exporter(good=answers(dcgm_page(gpus=1))) as url:
            work = Round([f"{url}/good n001", f"http://{host}:9400/metrics n002"])
            await work.until(
                lambda: len(work.values("scrape_up", "n001")) > 2 and len(work.values("scrape_up", "n002")) > 2
            )
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    assert set(work.values("scrape_up", "n001")) == {1.0}
    assert set(work.values("scrape_up", "n002")) == {0.0}
    assert set(work.scraper.failures) == {"bad_http"}


def test_a_service_whose_name_cannot_be_looked_up_ends_nothing() -> None:
    async def scenario() -> dict[str, str]:
        async with exporter(good=answers(dcgm_page(gpus=1))) as url:
            work = Round([f"{url}/good n001", "http_sd:http://sd..cluster.local:9400/groups"])
            await work.until(lambda: len(work.values("scrape_up", "n001")) > 2)
            await work.scraper.close()
            refused: dict[str, str] = work.scraper.health()["refused_lists"]
            return refused

    (why,) = asyncio.run(scenario()).values()
    assert why.startswith("bad_http: ")


def break_fetches_of(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each fetch of a URL with this end raise."""
    fetch = PageClient.fetch

    async def with_a_bug(client: PageClient, url: str, max_body_bytes: int) -> FetchedPage:
        if url.endswith(path):
            raise IndexError("a bug at http://n002/bad?token=hidden")
        return await fetch(client, url, max_body_bytes)

    monkeypatch.setattr(PageClient, "fetch", with_a_bug)


def test_a_bug_in_the_fetch_of_one_page_is_that_targets_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_fetches_of("/bad", monkeypatch)

    async def scenario() -> Round:
        async with exporter(good=answers(dcgm_page(gpus=1))) as url:
            work = Round([f"{url}/good n001", f"{url}/bad n002"])
            await work.until(
                lambda: len(work.values("scrape_up", "n001")) > 2 and len(work.values("scrape_up", "n002")) > 2
            )
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    assert set(work.values("scrape_up", "n001")) == {1.0}
    assert set(work.values("scrape_up", "n002")) == {0.0}
    health = work.scraper.health()
    assert health["failures"]["fetch_bug"] > 2
    (failing,) = health["targets_failing"]
    assert failing["reason"] == "its page cannot be fetched: IndexError: a bug at http://n002/bad?token=***"
    assert caplog.text.count("Traceback") == 1


def test_a_bug_in_asking_a_service_for_targets_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_fetches_of("/groups", monkeypatch)

    async def scenario() -> dict[str, str]:
        async with exporter(good=answers(dcgm_page(gpus=1))) as url:
            work = Round([f"{url}/good n001", f"http_sd:{url}/groups"])
            await work.until(lambda: len(work.values("scrape_up", "n001")) > 2)
            await work.scraper.close()
            refused: dict[str, str] = work.scraper.health()["refused_lists"]
            return refused

    (why,) = asyncio.run(scenario()).values()
    assert "IndexError: a bug" in why
    assert caplog.text.count("Traceback") == 1


def test_a_failed_scrape_leaves_no_connection_to_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[weakref.ref[Any]] = []
    made = plain_http._Connection.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        made(self, transport)
        connections.append(weakref.ref(self))

    monkeypatch.setattr(plain_http._Connection, "connection_made", connection_made)

    async def scenario() -> None:
        async with exporter(hangs=hangs) as url:
            work = Round([f"{url}/hangs n001"], Options(timeout_s=0.1))
            await work.until(lambda: work.scraper.failures["timeout"] > 2)
            await work.scraper.close()
        async with asyncio.timeout(60):
            while any(ref() is not None for ref in connections):
                await asyncio.sleep(0)

    gc.disable()
    try:
        asyncio.run(scenario())
        assert len(connections) > 2
    finally:
        gc.enable()
