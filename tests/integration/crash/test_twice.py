"""Started twice by mistake: the second says what is in its way and changes nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from fleetcast.ingest.inbox.segments import list_segments
from tests.integration.crash.load import Diary, Door, answered
from tests.integration.crash.outages import life, now_ms, states
from tests.integration.service_process import Service
from tests.ports import free_port

pytestmark = pytest.mark.integration


def command(service: Service, *more: str) -> list[str]:
    return [sys.executable, "-m", "fleetcast.cli.main", "run", "--config", str(service.folder / "config.toml"), *more]


def test_a_second_of_everything_is_refused_and_the_first_goes_on(service: Service) -> None:
    before = service.pids()
    roles = ("pipeline", "placer", "api")
    seconds = {
        role: subprocess.Popen(command(service, "--role", role), stderr=subprocess.PIPE, text=True) for role in roles
    }
    ended = subprocess.run(command(service), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "another `fleetcast run` uses this folder" in ended.stderr
    for role, second in seconds.items():
        _, words = second.communicate(timeout=60)
        assert second.returncode == 1
        assert f"waiting up to 15 s for process {before[role]} to end" in words
        assert f"works in it (process {before[role]}): end that, or name another folder with --state" in words
    assert service.pids() == before
    assert service.get("/readyz")


def test_a_second_api_on_another_port_writes_segments_of_its_own(service: Service) -> None:
    port = free_port()
    second = Door(port, Diary())
    with subprocess.Popen(command(service, "--role", "api", "--port", str(port))) as process:
        try:
            second.until("GET", "/v1/fleet", done=answered(200))
            for door, job in ((Door(service.port, Diary()), "first"), (second, "second")):
                door.until("POST", "/v1/events", life(job, now_ms(service)), done=answered(202))
            service.until("both jobs", lambda: {"first", "second"} <= states(service).keys())
        finally:
            process.terminate()
    assert set(list_segments(Path(service.folder, "state", "inbox"))) == {"api", "api.1"}
