"""When targets are scraped: few bursts per interval, nobody loses a round, nobody waits for a slow one."""

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.clock import ScaledClock
from fleetcast.ingest.pages import bursts
from fleetcast.ingest.pages.bursts import BURSTS, FetchSlots, compute_burst_phase, compute_next_burst_ms
from fleetcast.ingest.pages.scrape import Scraper
from fleetcast.ingest.source import Batch
from tests.fuzz.bounds import examples
from tests.ingest.exporter_pages import dcgm_page
from tests.ingest.pages.test_scrape import Options, Round, answers, exporter, hangs

URLS = [f"http://n{number}:9400/metrics" for number in range(400)]


def test_targets_share_five_to_fifteen_moments_of_the_interval_evenly() -> None:
    moments = Counter(map(compute_burst_phase, URLS))
    assert 5 <= len(moments) <= 15
    assert min(moments.values()) > 0.5 * len(URLS) / len(moments)
    spread = sorted(moments)
    assert {round(after - before, 6) for before, after in pairwise([*spread, 1 + spread[0]])} == {1 / BURSTS}


@examples(100)
@given(st.integers(0, 2**41), st.sampled_from(URLS), st.floats(0.001, 86_400_000))
def test_the_second_round_falls_into_the_targets_burst_half_an_interval_later_or_more(
    now_ms: int, url: str, period_ms: float
) -> None:
    due_ms = compute_next_burst_ms(now_ms, compute_burst_phase(url), period_ms)
    slack = 1e-3 + 1e-6 * period_ms
    assert now_ms + 0.5 * period_ms - slack <= due_ms <= now_ms + 1.5 * period_ms + slack


@examples(100)
@given(st.floats(1000, 60_000), st.sampled_from(URLS), st.integers(0, 10**12))
def test_bursts_keep_clear_of_the_edges_of_slots(period_ms: float, url: str, now_ms: int) -> None:
    """A clock that is slewed by some milliseconds must not move samples into the slot before."""
    offset_ms = compute_next_burst_ms(now_ms, compute_burst_phase(url), period_ms) % period_ms
    assert 0.04 * period_ms < offset_ms < 0.96 * period_ms


def test_the_pages_of_a_burst_come_in_one_batch() -> None:
    async def scenario() -> list[Batch]:
        async with exporter(dcgm=answers(dcgm_page(gpus=1))) as url:
            work = Round([f"{url}/dcgm?{number} node-{number}" for number in range(40)])
            await work.until(lambda: sum(batch.get_tally().read for batch in work.batches) >= 40)
            await work.scraper.close()
            return work.batches

    batches = asyncio.run(scenario())
    assert len(batches) <= 3
    assert max(len(batch.samples[0].entity) for batch in batches) >= 20


def test_targets_that_find_all_slots_busy_wait_for_their_turn() -> None:
    """A burst of eighty at the default of 64, and smaller ones of the same kind."""
    served = Counter[str]()

    async def page(request: web.Request) -> web.Response:
        served[request.query_string] += 1
        await asyncio.sleep(0.002)
        return web.Response(body=dcgm_page(gpus=1))

    async def scenario(targets: int, concurrency: int) -> Scraper:
        served.clear()
        async with exporter(dcgm=page) as url:
            work = Round(
                [f"{url}/dcgm?{number} n{number}" for number in range(targets)], Options(concurrency=concurrency)
            )
            work.clock = work.scraper._clock = ScaledClock(1_700_000_000_000, 1_700_000_000_000, 1.0)  # real time
            await work.until(lambda: len(served) == targets and sum(served.values()) >= targets)
            await work.scraper.close()
            return work.scraper

    for targets, concurrency in ((80, 64), (10, 1), (30, 7)):
        scraper = asyncio.run(scenario(targets, concurrency))
        assert scraper.skipped_rounds == 0
        assert len(served) == targets


def test_no_more_requests_are_under_way_than_there_are_slots() -> None:
    under_way, most = 0, 0

    async def page(request: web.Request) -> web.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return web.Response(body=dcgm_page(gpus=1))

    async def scenario() -> None:
        async with exporter(dcgm=page) as url:
            work = Round([f"{url}/dcgm?{number} n{number}" for number in range(20)], Options(concurrency=3))
            await work.until(lambda: sum(batch.get_tally().read for batch in work.batches) >= 60)
            await work.scraper.close()

    asyncio.run(scenario())
    assert most == 3


def test_a_burst_is_passed_on_without_the_target_that_hangs() -> None:
    async def scenario() -> Round:
        async with exporter(dcgm=answers(dcgm_page(gpus=1)), stuck=hangs) as url:
            targets = [f"{url}/stuck?{number}" for number in range(3)]
            work = Round([*targets, f"{url}/dcgm"], Options(timeout_s=90.0))
            await work.until(lambda: len(work.values("scrape_up", "n001")) >= 3)
            await work.scraper.close()
            return work

    assert asyncio.run(scenario()).scraper.failures == {}


def test_slow_targets_wait_in_a_lane_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty hang for longer than SLOW_S: from their second round on they take no slot from the one that answers."""
    monkeypatch.setattr(bursts, "SLOW_S", 0.02)

    async def scenario() -> Round:
        async with exporter(dcgm=answers(dcgm_page(gpus=1)), stuck=hangs) as url:
            targets = [f"{url}/stuck?{number}" for number in range(20)]
            work = Round([*targets, f"{url}/dcgm"], Options(timeout_s=0.05, concurrency=1))
            await work.until(
                lambda: all(target.is_slow for target in work.scraper.targets.values() if "stuck" in target.spec.url)
            )
            begun = len(work.values("scrape_up", "n001"))
            await work.until(lambda: len(work.values("scrape_up", "n001")) >= begun + 3)
            await work.scraper.close()
            return work

    work = asyncio.run(scenario())
    assert {target.spec.url.rpartition("/")[2] for target in work.scraper.targets.values() if not target.is_slow} == {
        "dcgm"
    }


def test_a_new_target_is_scraped_at_once() -> None:
    """On a clock of a day per interval, whose next burst is hours away."""

    async def scenario() -> list[float]:
        async with exporter(dcgm=answers(dcgm_page(gpus=1))) as url:
            work = Round([f"{url}/dcgm"], Options(interval_s=86_400.0))
            work.scraper._clock = ScaledClock(1_700_000_000_000, 1_700_000_000_000, 1.0)
            await work.until(lambda: bool(work.values("scrape_up", "n001")))
            await work.scraper.close()
            return work.values("scrape_up", "n001")

    assert asyncio.run(scenario()) == [1.0]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_slots_are_given_in_order_and_given_back_by_those_that_are_cancelled(is_cancelled: bool) -> None:
    order: list[int] = []

    async def hold(slots: FetchSlots, number: int) -> None:
        async with slots.hold_slot(is_slow=False):
            order.append(number)
            await asyncio.sleep(0)

    async def scenario() -> None:
        slots = FetchSlots(1)
        tasks = [asyncio.create_task(hold(slots, number)) for number in range(4)]
        await asyncio.sleep(0)
        assert not slots.is_idle.is_set()
        if is_cancelled:
            tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.is_idle.is_set()
        async with asyncio.timeout(60), slots.hold_slot(is_slow=False):
            order.append(9)

    asyncio.run(scenario())
    assert order == ([0, 2, 3, 9] if is_cancelled else [0, 1, 2, 3, 9])
