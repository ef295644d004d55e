"""Ends between any two writes: each role ends itself at each failpoint of what it writes, several times, under load.

Inbox by the api, ledger by the placer, board, snapshot and archive by the pipeline. Meanwhile users place, start and
finish jobs, reporters tell of steps, a reader looks at the board; at the end the run is compared with an uninterrupted
one of the same input, as in test_kills.py.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from fleetcast.fleet.clock import ScaledClock
from fleetcast.fleet.failpoints import OPERATIONS
from fleetcast.service.config import load_config
from tests.integration.crash.armed import ArmedRole, Arming
from tests.integration.crash.load import Diary, Door, answered
from tests.integration.crash.recorded import EVERY_MS, record
from tests.integration.crash.trial import SPEED, clients, exporter, finish, judge, sections
from tests.integration.service_process import write_config
from tests.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

SEED = 1
LONGEST_S = 900.0
COUNTS = {"inbox": (1, 4), "board": (1, 3), "snapshot": (1, 7), "archive": (1,), "ledger": (1, 2, 4, 7)}
ONCE = {"inbox.sync_folder", "snapshot.link", "snapshot.rename", "archive.sync_folder"}  # a life, or a snapshot
ROLES = {"api": ("inbox",), "placer": ("ledger",), "pipeline": ("board", "snapshot", "archive")}


def armings(role: str) -> Iterator[Arming]:
    """A kill before and after each operation, and writes that are torn."""
    for area in ROLES[role]:
        for operation in OPERATIONS[area]:
            counts = (1,) if f"{area}.{operation}" in ONCE else COUNTS[area]
            for when in ("before", "after"):
                for count in counts if operation != "truncate" else (1,):
                    yield Arming(f"{area}.{when}_{operation}:{count}=kill", tears=operation == "truncate")
        if "write" in OPERATIONS[area]:
            yield from (Arming(f"{area}.before_write:{count}=torn") for count in COUNTS[area])


def test_ends_between_any_two_writes_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    with exporter() as target:
        port = free_port()
        path = write_config(tmp_path, port, SPEED, sections(tmp_path, target))
        config = load_config(path)
        clock = ScaledClock(config.clock.epoch_ms, config.clock.wall_ms, SPEED)
        record(tmp_path / "pages", config.clock.epoch_ms + EVERY_MS, int(LONGEST_S * 1000 * SPEED / EVERY_MS), SEED)
        roles = []
        for name in ROLES:
            plan = list(armings(name))
            Random(SEED).shuffle(plan)
            roles.append(ArmedRole(path, name, plan))
        diary = Diary()
        door = Door(port, Diary())
        try:
            door.until("GET", "/readyz", done=answered(200))
            crowd = clients(port, clock, diary, SEED, users=2, reporters=1)
            for client in crowd:
                client.start()
            for armed in roles:
                armed.start()
            until_over(roles, diary)
            door.until("GET", "/readyz", done=answered(200))
            finish(crowd)
            door.until("POST", "/v1/placements", {"request_id": "last look", "dry_run": True}, done=answered(200))
        finally:
            codes = [armed.stop() for armed in roles]
    assert codes == [0, 0, 0]
    print(f"ends: {', '.join(f'{len(armed.reached)} of the {armed.role.name}' for armed in roles)}; ", end="")
    judge(config, tmp_path, diary, crowd, clock.now_ms())


def until_over(roles: list[ArmedRole], diary: Diary) -> None:
    """Wait until all failpoints were reached."""
    began = time.monotonic()
    while any(armed.is_alive() for armed in roles):
        assert time.monotonic() - began < LONGEST_S, [armed.reached[-3:] for armed in roles]
        assert not diary.troubles, diary.troubles[:5]
        time.sleep(0.2)
    assert not [armed.trouble for armed in roles if armed.trouble]
    print(f"{time.monotonic() - began:.0f} s; ", end="")
