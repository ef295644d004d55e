"""Actions on running jobs in the event stream: an api and a real placer."""

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.placement.actions.action_world import make_action
from tests.service.placer_world import NOW_MS
from tests.service.served_placer import ServedPlacer, serve_placer


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedPlacer]:
    with serve_placer(tmp_path) as found:
        yield found


def read_actions(lines: Iterator[str]) -> list[dict[str, Any]]:
    """Return the rows of the next event `action`."""
    for line in lines:
        if line == "event: action":
            rows: list[dict[str, Any]] = json.loads(next(lines).removeprefix("data: "))
            return rows
    raise AssertionError("the stream ended")


def test_a_client_is_notified_of_each_state_of_an_action(served: ServedPlacer) -> None:
    control, due_ms = served.world.service.actions, NOW_MS + 10**7
    stop = threading.Event()

    def propose_until_stopped() -> None:
        """The feed begins at some moment after the client came: propose one action after the other."""
        for number in itertools.count():
            if stop.wait(0.2):
                return
            control.propose([make_action(f"j{number}", by_ms=due_ms, gpus=1.0)], NOW_MS)

    with httpx.stream("GET", f"{served.url}/v1/stream", timeout=20) as answer:
        lines = answer.iter_lines()
        thread = threading.Thread(target=propose_until_stopped)
        thread.start()
        row = read_actions(lines)[0]
        stop.set()
        thread.join()
        assert (row["state"], row["by_ms"]) == ("proposed", due_ms)
        control.send([row["action_id"]], NOW_MS)
        sent = next(
            found for rows in iter(lambda: read_actions(lines), []) for found in rows if found["state"] == "sent"
        )
        assert (sent["action_id"], sent["job"], sent["grace_s"]) == (row["action_id"], row["job"], row["grace_s"])
