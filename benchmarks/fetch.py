"""Exporter pages over HTTP: the CPU time of the scraper's client, compared with aiohttp.

    burst             all targets at once, as in a burst of the scraper
    one at a time     each page is awaited before the next request

The value is the CPU time of this process per page: the request, the answer and its body, without
decoding. The exporters are a process of their own behind one port. Both clients reuse their
connections, in the event loop of the service. They run in PAIRS alternating pairs, and each value
is the median.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import uvloop

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.exporters import ExporterFarm
from fleetcast.ingest.pages.fetch import fetch, open_session
from fleetcast.ingest.pages.plain_http import PageClient

SIZES = (40,)  # targets
PAIRS = 7
ROUNDS = 25  # of all targets in half a pair
LIMIT_BYTES = 16_777_216
TIMEOUT_S, KEEPALIVE_S = 10.0, 60.0

Fetch = Callable[[str], Awaitable[bytes]]


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    for targets in sizes:
        farm = ExporterFarm(targets)
        try:
            cases = uvloop.run(
                _measure_cases([f"http://127.0.0.1:{farm.port}/n{number:05d}" for number in range(targets)])
            )
        finally:
            farm.close()
        for case, pairs in cases.items():
            ours, other = (list(values) for values in zip(*pairs, strict=True))
            line = make_record("fetch", case, {"targets": targets}, ours, "us/page", cpu_s=min(ours) / 1e6)
            line["value"], peer = line["median"], statistics.median(other)
            yield line | {"peer": {"name": "aiohttp", "value": peer}, "ratio": line["value"] / peer}


async def _measure_cases(urls: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """Return case → pairs of CPU microseconds per page, for our client and for aiohttp."""
    client = PageClient(TIMEOUT_S, KEEPALIVE_S)
    async with open_session(TIMEOUT_S, KEEPALIVE_S) as session:

        async def fetch_with_ours(url: str) -> bytes:
            return (await client.fetch(url, LIMIT_BYTES)).body

        async def fetch_with_aiohttp(url: str) -> bytes:
            return (await fetch(session, url, LIMIT_BYTES)).body

        pairs: dict[str, list[tuple[float, float]]] = {"burst": [], "one at a time": []}
        for way in (fetch_with_ours, fetch_with_aiohttp):
            await _measure_cpu_us(way, urls, at_once=True)  # connections are open from here on
        for _ in range(PAIRS):
            for case, found in pairs.items():
                found.append(
                    (
                        await _measure_cpu_us(fetch_with_ours, urls, at_once=case == "burst"),
                        await _measure_cpu_us(fetch_with_aiohttp, urls, at_once=case == "burst"),
                    )
                )
        await client.close()
        return pairs


async def _measure_cpu_us(way: Fetch, urls: Sequence[str], *, at_once: bool) -> float:
    """Return the CPU microseconds of this process per page."""
    began = time.process_time()
    pages: list[bytes] = []
    for _ in range(ROUNDS):
        pages += await asyncio.gather(*map(way, urls)) if at_once else [await way(url) for url in urls]
        assert all(page.startswith(b"# HELP") for page in pages), "a page is no exporter's page"
        pages.clear()
    return (time.process_time() - began) / (ROUNDS * len(urls)) * 1e6
