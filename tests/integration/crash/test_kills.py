"""At least 100 SIGKILLs of pipeline, api, placer, adapters and supervisor at random moments under load.

Nothing acknowledged is lost, nothing counts twice, no GPU is promised twice, readers always get a whole board, and
everything returns by itself. At the end the killed run is compared with an uninterrupted one of the same input
(straight.py says in what). CRASH_SEED and CRASH_KILLS choose another run; the moments of the kills differ each time.
"""

import os
import random
import time
from pathlib import Path

import pytest

from fleetcast.fleet.clock import ScaledClock
from fleetcast.service.config import Config, load_config
from tests.integration.crash.load import Client, Diary
from tests.integration.crash.recorded import EVERY_MS, record
from tests.integration.crash.site import ROLES, Site
from tests.integration.crash.trial import SPEED, clients, exporter, finish, judge, sections

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

SEED = int(os.environ.get("CRASH_SEED", "1"))
KILLS = int(os.environ.get("CRASH_KILLS", "100"))
LONGEST_S = 600.0
WEIGHTS = (3, 3, 3, 2, 1)  # of ROLES; a supervisor takes the others along


def start(folder: Path, target: str) -> tuple[Site, Config, ScaledClock]:
    site = Site(folder, SPEED, **sections(folder, target))
    config = load_config(folder / "config.toml")
    begin_ms = config.clock.epoch_ms
    record(folder / "pages", begin_ms + EVERY_MS, int(LONGEST_S * 1000 * SPEED / EVERY_MS), SEED)
    return site, config, ScaledClock(begin_ms, config.clock.wall_ms, SPEED)


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
    finish(crowd)
    site.service.request("POST", "/v1/placements", {"request_id": "last look", "dry_run": True})
    print(f"ready {took_s:.1f} s after the last kill; {site.restarts} restarts of the supervisor")
    assert site.stop() == 0


def test_a_hundred_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    with exporter() as target:
        site, config, clock = start(tmp_path, target)
        diary = Diary()
        try:
            site.until_ready()
            crowd = clients(site.service.port, clock, diary, SEED)
            for client in crowd:
                client.start()
            kill_at_random(site, diary)
            come_to_an_end(site, crowd)
        finally:
            site.stop()
    print(f"seed {SEED}: {dict(site.kills)}; ", end="")
    judge(config, tmp_path, diary, crowd, clock.now_ms())
