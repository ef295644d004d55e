"""A disk without room: what cannot be kept is refused with the reason, readers are served, and nothing needs a hand.

Two ways: a limit on the size of the files of running processes, which needs no rights, and a small tmpfs, which needs
those of root. Without them the test is skipped; on CI that is a failure.
"""

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.crash.outages import life, now_ms, states
from tests.integration.service_process import Service

pytestmark = pytest.mark.integration

MOUNTED_BYTES = 8 * 2**20


def limit_files(pid: int, size: int) -> None:
    """No file of that process grows beyond `size` bytes."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def unlimit_files(pid: int) -> None:
    limit_files(pid, resource.RLIM_INFINITY)


def test_an_inbox_that_may_not_grow_refuses_events_and_keeps_what_it_took(service: Service) -> None:
    assert service.request("POST", "/v1/events", life("before", now_ms(service)))[0] == 202
    limit_files(service.pids()["api"], 1)
    status, answer, headers = service.request("POST", "/v1/events", life("refused", now_ms(service)))
    assert status == 503
    assert "cannot write the inbox: File too large; nothing was stored" in answer["detail"]
    assert int(headers["retry-after"]) > 0
    assert service.request("GET", "/v1/nodes/n1")[0] == 200
    unlimit_files(service.pids()["api"])
    assert service.request("POST", "/v1/events", life("after", now_ms(service)))[1]["accepted"] == 2
    service.until("both jobs", lambda: {"before", "after"} <= states(service).keys())
    assert "refused" not in states(service)


def test_a_board_that_cannot_be_written_grows_old_and_returns(service: Service) -> None:
    pid = service.pids()["pipeline"]
    limit_files(pid, 5000)  # the board is larger; the log, where the reason is said, is not
    service.until("the reason", lambda: "readers keep the last one" in service.log())
    before = service.get("/v1/nodes/n1")["as_of_ms"]
    time.sleep(1.0)
    status, answer, headers = service.request("GET", "/v1/nodes/n1")
    assert (status, answer["as_of_ms"]) == (200, before)
    assert int(headers["age"]) >= 15
    assert service.request("POST", "/v1/events", life("meanwhile", before))[0] == 202
    unlimit_files(pid)
    service.until("the job", lambda: states(service).get("meanwhile") == "running")
    assert service.pids()["pipeline"] == pid


def test_a_ledger_that_cannot_be_written_promises_nothing(service: Service) -> None:
    pid = service.pids()["placer"]
    limit_files(pid, 1)
    status, answer, _ = service.request("POST", "/v1/placements", {"request_id": "a", "gpus_per_node": 8})
    assert status == 503
    assert "ledger.sqlite cannot be used now" in answer["detail"]
    assert service.request("GET", "/v1/placements/a")[0] == 404
    unlimit_files(pid)
    placed = [service.request("POST", "/v1/placements", {"request_id": f"{n}", "gpus_per_node": 8}) for n in range(4)]
    assert [answer["outcome"] for _, answer, _ in placed] == ["placed"] * 4
    assert len({answer["ranks"][0]["node"] for _, answer, _ in placed}) == 4
    assert service.pids()["placer"] == pid


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The state folder of the first service of a test, on a disk of its own."""
    folder = tmp_path / "service0" / "state"
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={MOUNTED_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        reason = f"cannot mount a tmpfs: {mounted.stderr.strip()}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)


def fill(ballast: Path) -> None:
    """Let a file take all the room that is left."""
    with open(ballast, "ab", buffering=0) as file:
        for size in (2**16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


def test_a_full_disk_refuses_and_when_there_is_room_everything_returns(
    small_disk: Path, four_nodes: Callable[..., Service]
) -> None:
    service = four_nodes()
    kept, refused = [], []
    assert service.request("POST", "/v1/events", life("before", now_ms(service)))[0] == 202
    ballast = small_disk / "ballast"
    for number in range(40):
        fill(ballast)  # again: a snapshot that could not be finished gives its room back
        status, answer, _ = service.request("POST", "/v1/events", life(f"j{number}", now_ms(service)))
        assert status == 503 or answer["accepted"] == 2
        (kept if status == 202 else refused).append(f"j{number}")
    assert "No space left on device; nothing was stored" in answer["detail"]
    service.until("the reason", lambda: "cannot publish the board: [Errno 28] No space left" in service.log())
    decided = {}
    for number in range(20):
        status, decided[number], _ = service.request("POST", "/v1/placements", {"request_id": f"r{number}"})
        assert status in (200, 503)
    assert service.get("/v1/nodes/n1")
    ballast.unlink()
    service.until("ready", lambda: service.get("/readyz"))
    service.until("what was kept", lambda: {"before", *kept} <= states(service).keys())
    assert not states(service).keys() & set(refused)
    for number, answer in decided.items():
        status, again, _ = service.request("POST", "/v1/placements", {"request_id": f"r{number}"})
        assert status == 200
        assert again == answer or "request_id" not in answer
    assert "restarting" not in service.log()


def test_a_read_only_disk_is_named_at_the_start_and_an_api_serves_from_it(
    small_disk: Path, four_nodes: Callable[..., Service]
) -> None:
    service = four_nodes()
    command = [sys.executable, "-m", "fleetcast.cli.main", "run", "--config", str(service.folder / "config.toml")]
    service.stop()
    remount(small_disk, "ro")
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert f"cannot write {small_disk}" in refused.stderr
    assert "Read-only file system" in refused.stderr
    with subprocess.Popen([*command, "--role", "api"], stderr=subprocess.PIPE) as process:
        try:
            service.until("the last board", lambda: service.get("/v1/nodes/n1"))
            status, answer, _ = service.request("POST", "/v1/events", life("late", now_ms(service)))
            assert status == 503
            assert "Read-only file system; nothing was stored" in answer["detail"]
            remount(small_disk, "rw")
            assert service.request("POST", "/v1/events", life("late", now_ms(service)))[1]["accepted"] == 2
        finally:
            process.terminate()
