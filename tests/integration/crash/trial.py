"""A trial of the service under load while its processes are killed: what it is made of, and the judgement at the end.

Five users, three reporters and a reader keep asking with retries; pages of two nodes are recorded, those of a third are
scraped. Judged is the killed run against an uninterrupted one of the same input (straight.py says in what).
"""

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fleetcast.fleet.clock import ScaledClock
from fleetcast.fleet.samples import EntityKind
from fleetcast.service.config import Config
from fleetcast.service.pipeline.state import FleetState
from tests.integration.crash.load import Client, Diary, Door, Reader, Reporter, User
from tests.integration.crash.straight import (
    account,
    check_no_gpu_was_promised_twice,
    check_replies,
    check_rings,
    check_tables,
    reload,
    run_straight,
)

SPEED = 15.0
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
        "placer": {"intent_expires_s": 360_000.0, "unheard": "ignore"},  # one exporter for sixteen nodes
        "adapters": {"adapter": [{"use": "band_file", "mode": "write", "options": {"path": str(folder / "bands")}}]},
    }


def clients(
    port: int, clock: ScaledClock, diary: Diary, seed: int, *, users: int = USERS, reporters: int = REPORTERS
) -> list[Client]:
    """Not started yet."""
    door = Door(port, diary)
    crowd: list[Client] = [User(f"u{number}", door, clock, seed) for number in range(users)]
    crowd += [Reporter(f"long{number}", door, clock, seed) for number in range(reporters)]
    return [*crowd, Reader("reader", door, clock, seed)]


def finish(crowd: list[Client]) -> None:
    """Let every client finish what it is at, and the reporters' last events be seen on a board."""
    for client in crowd:
        client.ending.set()
    for client in crowd:
        client.join(120)
        assert not client.is_alive(), f"{client.name} waits for an answer"
    for client in crowd:
        if isinstance(client, Reporter):
            client.finish()


def check_scraped_ring(killed: FleetState) -> None:
    """What was scraped between the kills was served, in that order: each page's number is higher than the last."""
    ring = killed.store.ring(EntityKind.GPU)
    row = killed.entities[EntityKind.GPU].names.index("s1/0")
    power = ring.read_slots("power_w", ring.span.slots)[:, row]
    pages = power[~np.isnan(power)]
    assert len(pages) > 2
    assert (pages == np.rint(pages)).all()
    assert (np.diff(pages) > 0).all()


def judge(config: Config, folder: Path, diary: Diary, crowd: list[Client], now_ms: int) -> None:
    """Nothing acknowledged is lost, nothing counts twice, no GPU was promised twice; prints how much was compared."""
    began_s = time.process_time()
    users = sum(client.rounds for client in crowd if isinstance(client, User))
    reader = next(client for client in crowd if isinstance(client, Reader))
    print(f"{users} jobs, {len(diary.entries)} requests acknowledged, ", end="")
    print(f"{reader.answers} reads, the oldest board {reader.oldest_s} s of fleet time")
    assert not diary.troubles, diary.troubles[:5]
    check_replies(config.ledger, diary.replies)
    reused = check_no_gpu_was_promised_twice(config.ledger, diary.released_ms)
    killed = reload(config, folder / "pages", now_ms)
    alone = msgspec.structs.replace(config, state=str(folder / "straight"))
    straight = run_straight(alone, diary.in_order(), folder / "pages", killed.pages_until_ms, now_ms)
    check_tables(killed.state, straight)
    values = check_rings(killed.state, straight)
    check_scraped_ring(killed.state)
    assert account(config.ledger) == account(alone.ledger)
    jobs = sum(1 for _ in straight.jobs)
    print(f"equal: {jobs} jobs of {straight.jobs.position} events, {values} ring values; ", end="")
    print(f"{reused} GPUs promised again, none twice at once; judged in {time.process_time() - began_s:.0f} s of CPU")
