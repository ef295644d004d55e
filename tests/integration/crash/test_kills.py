"""At least 100 SIGKILLs of pipeline, api, placer, adapters and supervisor at random moments under load.

Nothing acknowledged is lost, nothing counts twice, no GPU is promised twice, readers always get a whole board, and
everything returns by itself. At the end the killed run is compared with an uninterrupted one of the same input
(straight.py says in what). CRASH_SEED and CRASH_KILLS choose another run; the moments of the kills differ each time.
"""

import http.server
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleet.clock import ScaledClock
from fleet.samples import EntityKind
from service.config import Config, load_config
from service.state import FleetState
from tests.integration.crash.load import Client, Diary, Door, Reader, Reporter, User
from tests.integration.crash.recorded import EVERY_MS, record
from tests.integration.crash.site import ROLES, Site
from tests.integration.crash.straight import (
    account,
    check_no_gpu_was_promised_twice,
    check_replies,
    check_rings,
    check_tables,
    reload,
    run_straight,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

SEED = int(os.environ.get("CRASH_SEED", "1"))
KILLS = int(os.environ.get("CRASH_KILLS", "100"))
SPEED = 15.0
LONGEST_S = 600.0
WEIGHTS = (3, 3, 3, 2, 1)  # of ROLES; a supervisor takes the others along
USERS = 5
REPORTERS = 3
TOPOLOGY = "\n".join(
    f'[[rack]]\nname = "r{rack}"\nblock = "b"\nnodes = ["r{rack}n[1-8]"]\ngpus = 8\ngpu_model = "H100"\n'
    for rack in (1, 2)
)


class Exporter(http.server.BaseHTTPRequestHandler):
    """A page of one GPU whose power is the number of the page."""

    def do_GET(self) -> None:
        served: list[int] = self.server.served  # type: ignore[attr-defined]
        served.append(len(served) + 1)
        labels = 'gpu="0",UUID="GPU-s1-0",modelName="NVIDIA A100-SXM4-80GB",Hostname="s1"'
        page = f"DCGM_FI_DEV_POWER_USAGE{{{labels}}} {served[-1]}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def exporter() -> Iterator[str]:
    """Its URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Exporter) as server:
        server.served = []  # type: ignore[attr-defined]
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


def sections(folder: Path, target: str) -> dict[str, dict[str, Any]]:
    (folder / "topology.toml").write_text(TOPOLOGY)
    source = {"use": "tests.integration.crash.recorded:recorded_pages", "options": {"folder": str(folder / "pages")}}
    return {
        "fleet": {"topology": str(folder / "topology.toml")},
        "scrape": {"targets": [target]},
        "pipeline": {"tick_s": 6.0, "snapshot_s": 15.0, "sources": [source]},
        "placer": {"intent_expires_s": 360_000.0},
        "adapters": {"adapter": [{"use": "band_file", "options": {"path": str(folder / "bands")}}]},
    }


def start(folder: Path, target: str) -> tuple[Site, Config, ScaledClock]:
    site = Site(folder, SPEED, **sections(folder, target))
    config = load_config(folder / "config.toml")
    begin_ms = config.clock.epoch_ms
    record(folder / "pages", begin_ms + EVERY_MS, int(LONGEST_S * 1000 * SPEED / EVERY_MS), SEED)
    return site, config, ScaledClock(begin_ms, config.clock.wall_ms, SPEED)


def clients(site: Site, clock: ScaledClock, diary: Diary) -> list[Client]:
    door = Door(site.service.port, diary)
    users = [User(f"u{number}", door, clock, SEED) for number in range(USERS)]
    reporters = [Reporter(f"long{number}", door, clock, SEED) for number in range(REPORTERS)]
    return [*users, *reporters, Reader("reader", door, clock, SEED)]


def kill_at_random(site: Site, diary: Diary) -> None:
    """Bursts of up to four kills; now and then everything may come back before the next."""
    rng = random.Random(SEED)
    began = time.monotonic()
    while sum(site.kills.values()) < KILLS:
        assert time.monotonic() - began < LONGEST_S, f"only {dict(site.kills)} in {LONGEST_S:.0f} s"
        assert not diary.troubles, diary.troubles[:5]
        for _ in range(rng.randint(1, 4)):
            site.kill(rng.choices(ROLES, WEIGHTS)[0])
            time.sleep(rng.uniform(0, 0.6))
        if rng.random() < 0.3:
            site.until_ready()
        time.sleep(rng.uniform(0.1, 1.8))


def come_to_an_end(site: Site, crowd: list[Client]) -> None:
    """Let every client finish what it is at, and the service settle and stop in order."""
    took_s = site.until_ready()
    for client in crowd:
        client.ending.set()
    for client in crowd:
        client.join(120)
        assert not client.is_alive(), f"{client.name} waits for an answer"
    for client in crowd:
        if isinstance(client, Reporter):
            client.finish()
    site.service.request("POST", "/v1/placements", {"request_id": "last look", "dry_run": True})
    print(f"ready {took_s:.1f} s after the last kill; {site.restarts} restarts of the supervisor")
    assert site.stop() == 0


def check_scraped_ring(killed: FleetState) -> None:
    """What was scraped between the kills was served, in that order: each page's number is higher than the last."""
    ring = killed.store.ring(EntityKind.GPU)
    row = killed.entities[EntityKind.GPU].names.index("s1/0")
    power = ring.slots("power_w", ring.span.slots)[:, row]
    pages = power[~np.isnan(power)]
    assert len(pages) > 2
    assert (pages == np.rint(pages)).all()
    assert (np.diff(pages) > 0).all()


def test_a_hundred_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    with exporter() as target:
        site, config, clock = start(tmp_path, target)
        diary = Diary()
        try:
            site.until_ready()
            crowd = clients(site, clock, diary)
            for client in crowd:
                client.start()
            kill_at_random(site, diary)
            come_to_an_end(site, crowd)
        finally:
            site.stop()
    now_ms, began_s = clock.now_ms(), time.process_time()
    users = sum(client.rounds for client in crowd if isinstance(client, User))
    reader = next(client for client in crowd if isinstance(client, Reader))
    print(f"seed {SEED}: {dict(site.kills)}; {users} jobs, {len(diary.entries)} requests acknowledged, ", end="")
    print(f"{reader.answers} reads, the oldest board {reader.oldest_s} s of fleet time")
    assert not diary.troubles, diary.troubles[:5]

    ledger = config.ledger
    check_replies(ledger, diary.replies)
    reused = check_no_gpu_was_promised_twice(ledger, diary.released_ms)
    killed = reload(config, tmp_path / "pages", now_ms)
    alone = msgspec.structs.replace(config, state=str(tmp_path / "straight"))
    straight = run_straight(alone, diary.in_order(), tmp_path / "pages", killed.pages_until_ms, now_ms)
    check_tables(killed.state, straight)
    values = check_rings(killed.state, straight)
    check_scraped_ring(killed.state)
    assert account(ledger) == account(alone.ledger)
    jobs = sum(1 for _ in straight.jobs)
    print(f"equal: {jobs} jobs of {straight.jobs.position} events, {values} ring values; ", end="")
    print(f"{reused} GPUs promised again, none twice at once; judged in {time.process_time() - began_s:.0f} s of CPU")
