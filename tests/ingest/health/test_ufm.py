"""Predicted link failures of UFM: told when they come, change and go."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.ingest.health.ufm import PASSWORD, PATH, TOKEN, UfmSource
from tests.ingest.health_daemon import Daemon, running

NOW_MS = 1_763_700_000_000


def alert(**fields: Any) -> dict[str, Any]:
    made = {
        **{"alert_id": 7, "timestamp": "2025-11-21 04:00:00", "node_guid": "0x1", "node_name": "n1 mlx5_3", "port": 1},
        **{"port_name": "1", "severity": "Major", "probability": 80.0, "influencers": ["ber"], "description": "errors"},
    }
    return made | fields


def source(daemon: Daemon, **options: Any) -> UfmSource:
    entities = Entities()
    for name in ("n1", "n2"):
        entities.find_or_add_node(name)
    return UfmSource(entities, ManualClock(NOW_MS), {"url": daemon.url, "poll_s": 0.05, "timeout_s": 1.0, **options})


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running(Daemon({PATH: [alert()]})) as made:
        yield made


def test_a_prediction_is_told_changes_and_goes(daemon: Daemon) -> None:
    async def scenario() -> tuple[list[Any], Any]:
        made = source(daemon)
        told = [*(await made.next()).node_events]
        place = json.loads(json.dumps(made.position()))
        daemon.pages[PATH] = [alert(probability=82.0)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.next(), 0.2)
        daemon.pages[PATH] = [alert(probability=95.0), alert(probability=90.0)]
        told += (await asyncio.wait_for(made.next(), 60)).node_events
        daemon.pages[PATH] = []
        told += (await asyncio.wait_for(made.next(), 60)).node_events
        await made.close()
        return told, place

    told, place = asyncio.run(scenario())
    assert [(event.node, event.device, event.severity, event.probability) for event in told] == [
        *(("n1", "mlx5_3/1", "warning", 0.8), ("n1", "mlx5_3/1", "warning", 0.95), ("n1", "mlx5_3/1", "ok", None)),
    ]
    assert len({event.sequence for event in told}) == 3
    assert place == {"n1|mlx5_3/1": 0.8}
    assert "from=-6h&severities=Critical,Major" in daemon.asked[0]


def test_a_restart_takes_back_what_went_meanwhile(daemon: Daemon) -> None:
    daemon.pages[PATH] = []

    async def scenario() -> Any:
        made = source(daemon)
        made.seek({"n1|mlx5_3/1": 0.8})
        batch = await asyncio.wait_for(made.next(), 60)
        await made.close()
        return batch.node_events, made.position()

    (event,), place = asyncio.run(scenario())
    assert (event.severity, place) == ("ok", {})


def test_ports_of_others_are_passed_and_bad_rows_counted(daemon: Daemon) -> None:
    daemon.pages[PATH] = [
        alert(node_name="leaf-12", port_name="12"),
        alert(node_name="n2.example.org", port_name="mlx5_0/1"),
        alert(node_name="n1", port=4, port_name=""),
        alert(probability=250),
        alert(probability="high"),
        3,
    ]

    async def scenario() -> Any:
        made = source(daemon)
        batch = await made.next()
        await made.close()
        return batch, made.health()

    batch, health = asyncio.run(scenario())
    assert [(event.node, event.device) for event in batch.node_events] == [("n2", "mlx5_0/1"), ("n1", "port 4")]
    assert sorted(error.reason for error in batch.bad) == ["out_of_range", "wrong_type", "wrong_type"]
    assert (health["unknown"], health["standing"], health["up"]) == (1, 2, True)


@pytest.mark.parametrize(
    ("variable", "options", "login"),
    [(TOKEN, {}, "Basic t0ken"), (PASSWORD, {"user": "ada"}, "Basic YWRhOnQwa2Vu"), (PASSWORD, {}, "")],
)
def test_the_login_comes_from_the_environment(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, variable: str, options: dict[str, Any], login: str
) -> None:
    monkeypatch.setenv(variable, "t0ken")

    async def scenario() -> None:
        made = source(daemon, **options)
        await made.next()
        await made.close()

    asyncio.run(scenario())
    assert set(daemon.logins) == {login}


def test_while_it_is_away_it_says_so(daemon: Daemon) -> None:
    daemon.status = 401

    async def scenario() -> None:
        made = source(daemon)
        try:
            await made.next()
        finally:
            await made.close()

    with pytest.raises(SourceError, match="401"):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "ufm:8443"}, "url"),
        ({"url": "http://[::1"}, "url"),
        ({"url": "http://u", "since_h": 0}, "since_h"),
        ({}, "url"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        UfmSource(Entities(), ManualClock(NOW_MS), options)
