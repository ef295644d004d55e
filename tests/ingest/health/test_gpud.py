"""What gpud says of a node, over HTTP and HTTPS: changes, once; and a daemon that is away holds up nobody."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.fleet.events import NodeEvent
from fleetcast.ingest.health import gpud
from fleetcast.ingest.health.gpud import TOKEN, GpudSource, parse_gpud_target
from tests.ingest.health_daemon import Daemon, make_certificate, running

NOW_MS = 1_763_700_000_000


def state(health: str, reason: str = "", *actions: str, name: str = "") -> dict[str, Any]:
    suggested = {"description": "d", "repair_actions": list(actions)} if actions else None
    return {
        **{"time": "2025-11-21T04:00:00Z", "component": "c", "name": name, "health": health, "reason": reason},
        "suggested_actions": suggested,
    }


def states(**by_component: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"component": name, "states": [value]} for name, value in by_component.items()]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running(Daemon()) as made:
        yield made


def source(*targets: str, clock: ManualClock | None = None, **options: Any) -> GpudSource:
    given = {"targets": list(targets), "poll_s": 0.05, "timeout_s": 30.0, **options}
    return GpudSource(Entities(), clock or ManualClock(NOW_MS), given)


async def first(made: GpudSource, limit_s: float = 60.0) -> tuple[NodeEvent, ...]:
    try:
        return (await asyncio.wait_for(made.next(), limit_s)).node_events
    finally:
        await made.close()


def test_bad_components_are_told_with_what_to_do(daemon: Daemon) -> None:
    daemon.pages["/v1/states"] = states(
        cpu=state("Healthy"),
        memory=state("Initializing"),
        disk=state("Degraded", "slow"),
        ecc=state("Unhealthy", "remapping failed", "HARDWARE_INSPECTION"),
        app=state("Unhealthy", "xid 31", "CHECK_USER_APP_AND_GPU", name="other"),
    )
    events = asyncio.run(first(source(f"n1={daemon.url}")))
    assert [(event.node, event.check, event.severity, event.message, event.advice) for event in events] == [
        ("n1", "disk", "warning", "slow", ""),
        ("n1", "ecc", "fatal", "remapping failed", "have the hardware inspected"),
        ("n1", "app/other", "warning", "xid 31", "check the application and the GPU"),
    ]
    assert {event.source for event in events} == {"gpud"}


def test_only_changes_are_told_and_a_restart_goes_on(daemon: Daemon) -> None:
    clock = ManualClock(NOW_MS)
    bad = states(fan=state("Unhealthy", "stuck", "REBOOT_SYSTEM"))

    async def scenario() -> list[Any]:
        daemon.pages["/v1/states"] = bad
        made = source(f"n1={daemon.url}", clock=clock)
        told: list[Any] = [await made.next()]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.next(), 0.3)
        place = json.loads(json.dumps(made.position()))
        await made.close()
        made = source(f"n1={daemon.url}", clock=clock)
        made.seek(place)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.next(), 0.3)
        clock.advance(90_000)
        told.append(await asyncio.wait_for(made.next(), 60))  # still bad after a day
        daemon.pages["/v1/states"] = states(fan=state("Healthy"))
        told.append(await asyncio.wait_for(made.next(), 60))
        await made.close()
        return told

    batches = asyncio.run(scenario())
    assert [event.severity for batch in batches for event in batch.node_events] == ["fatal", "fatal", "ok"]


def test_its_xids_are_xids(daemon: Daemon) -> None:
    when = "2025-11-21T04:00:00Z"
    daemon.pages["/v1/events"] = [
        {
            "component": "accelerator-nvidia-error-xid",
            "startTime": when,
            "events": [
                {"time": when, "name": "error_xid", "type": "Fatal", "message": "XID 79 detected on PCI:0000:9B:00"},
                {"time": "1", "name": "reboot", "type": "Info", "message": "nothing"},
            ],
        },
        {"component": "os", "events": [{"time": when, "name": "x", "message": "XID 13 in a dream"}]},
        {"component": "empty", "events": None},
    ]
    (event,) = asyncio.run(first(source(f"n1={daemon.url}")))
    assert (event.type, event.code, event.device, event.time_ms) == ("xid", 79, "0000:9b:00", NOW_MS - 2_400_000)
    assert any(path.startswith("/v1/events?startTime=") for path in daemon.asked)
    again = asyncio.run(first(source(f"n1={daemon.url}", clock=ManualClock(NOW_MS + 5_000))))
    assert again[0].sequence == event.sequence


def test_a_daemon_that_is_away_holds_up_nobody(daemon: Daemon) -> None:
    daemon.pages["/v1/states"] = states(fan=state("Degraded"))
    made = source("n0=http://127.0.0.1:9", f"n1={daemon.url}", "n2=http://127.0.0.1:9")
    assert [event.node for event in asyncio.run(first(made))] == ["n1"]
    assert (made.health()["targets"], made.health()["targets_up"], made.health()["up"]) == (3, 1, True)


def test_when_all_are_away_it_says_so(daemon: Daemon) -> None:
    daemon.status = 500
    made = source(f"n1={daemon.url}", "n2=http://127.0.0.1:9")
    with pytest.raises(SourceError):
        asyncio.run(first(made))
    assert made.health()["up"] is False


@pytest.mark.parametrize("page", [b"{", b'{"a": 1}', b"[3]", b"\xff"])
def test_an_answer_that_cannot_be_read_is_counted(daemon: Daemon, page: bytes) -> None:
    daemon.pages["/v1/states"] = page

    async def scenario() -> Any:
        made = source(f"n1={daemon.url}")
        try:
            return (await asyncio.wait_for(made.next(), 60)).bad
        finally:
            await made.close()

    assert len(asyncio.run(scenario())) >= 1


def test_a_bug_in_reading_one_answer_is_that_targets_alone(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.pages["/v1/states"] = states(fan=state("Degraded"))
    told = gpud.make_state_events

    def with_a_bug(node: str, *rest: Any) -> Any:
        return 1 / 0 if node == "n0" else told(node, *rest)

    monkeypatch.setattr(gpud, "make_state_events", with_a_bug)
    made = source(f"n0={daemon.url}", f"n1={daemon.url}")
    assert [event.node for event in asyncio.run(first(made))] == ["n1"]
    row = made.health()
    assert (row["bugs"], row["targets_up"]) == (1, 1)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_with_our_authority_and_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    certificate = make_certificate(tmp_path)
    with running(Daemon({"/v1/states": states(fan=state("Degraded"))}), certificate) as daemon:
        assert len(asyncio.run(first(source(f"n1={daemon.url}", ca_file=str(tmp_path / "cert.pem"))))) == 1
        assert len(asyncio.run(first(source(f"n1={daemon.url}", verify=False)))) == 1
        assert set(daemon.logins) == {"Bearer secret"}
        with pytest.raises(SourceError, match="unreachable"):
            asyncio.run(first(source(f"n1={daemon.url}")))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"targets": []}, "at least one"),
        ({"targets": ["n001:15132"]}, "https://n001:15132"),
        ({"targets": ["https://n1"], "poll_s": 0.0}, "poll_s"),
        ({"targets": ["https://n1"], "timeout_s": -1.0}, "timeout_s"),
        ({"targets": ["https://n1"], "ca_file": "/nowhere"}, "/nowhere"),
        ({"targets": ["https://n1"], "max_body_bytes": 0}, "max_body_bytes"),
        ({"targets": ["https://n1"], "token": "x"}, "token"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GpudSource(Entities(), ManualClock(NOW_MS), options)


def test_targets_name_their_nodes() -> None:
    assert parse_gpud_target("https://n001:15132/") == ("n001", "https://n001:15132")
    assert parse_gpud_target("n7=https://10.0.0.7:15132") == ("n7", "https://10.0.0.7:15132")


def test_a_closed_source_ends() -> None:
    made = source("n1=http://127.0.0.1:9")

    async def scenario() -> None:
        await made.close()
        await made.close()
        with pytest.raises(StopAsyncIteration):
            await made.next()

    asyncio.run(scenario())
