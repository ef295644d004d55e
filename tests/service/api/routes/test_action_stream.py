"""Actions on running jobs in the event stream: an api and a real placer."""

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleetcast.service.http.access import Access, parse_tokens
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


TOKENS = """
boss admin 0123456789abcdefgh
lead read 123456789abcdefghi queues=research
other read 23456789abcdefghij queues=teaching,batch
"""
BOSS, LEAD, OTHER = (
    {"authorization": f"Bearer {token}"} for token in ("0123456789abcdefgh", "123456789abcdefghi", "23456789abcdefghij")
)


def read_until(lines: Iterator[str], job: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of all events, and the rows of actions, up to the action on a job."""
    names, found = list[str](), list[dict[str, Any]]()
    for line in lines:
        if line.startswith("event: "):
            names.append(line.removeprefix("event: "))
        if line.startswith("data: ") and names[-1] == "action":
            found += json.loads(line.removeprefix("data: "))
            if any(row["job"] == job for row in found):
                return names, found
    raise AssertionError("the stream ended")


def test_a_bound_token_streams_boards_and_the_actions_of_its_queues_alone(tmp_path: Path) -> None:
    with serve_placer(tmp_path, access=Access(parse_tokens(TOKENS, "test"))) as served:
        control, url = served.world.service.actions, f"{served.url}/v1/stream"

        def propose(job: str, queue: str) -> None:
            control.propose([make_action(job, by_ms=NOW_MS + 10**7, gpus=1.0, queue=queue, payer="secret")], NOW_MS)

        propose("first", "research/nlp")
        with (
            httpx.stream("GET", url, headers=LEAD, timeout=20) as bound,
            httpx.stream("GET", url, headers=BOSS, timeout=20) as whole,
            httpx.stream("GET", url, headers=OTHER, timeout=20) as other,
        ):
            of_bound, of_whole, of_other = (one.iter_lines() for one in (bound, whole, other))
            read_until(of_bound, "first")
            read_until(of_whole, "first")
            for number, queue in enumerate(("teaching", "research-2", "research")):
                propose(f"j{number}", queue)
            names, rows = read_until(of_bound, "j2")
            assert ([row["job"] for row in rows], {row["payer"] for row in rows}) == (["j2"], {""})
            assert [row["job"] for row in read_until(of_whole, "j2")[1]] == ["j0", "j1", "j2"]
            assert [row["job"] for row in read_until(of_other, "j0")[1]] == ["j0"]
            assert set(names) <= {"action", "board"}
