"""What is pushed about the health of nodes: in the inbox as events, once, before it is acknowledged."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import NodeEvent
from fleetcast.ingest.inbox.inbox import read_newest_events
from fleetcast.service.api.app import create_app
from tests.ingest.health.test_nvsentinel import NOW_MS, envelope
from tests.service.api_world import Client, config

LINES = """2025-11-21T04:12:09+0000 n042 kernel: NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.
2025-11-21T04:12:09+0000 n042 kernel: eth0: link is up
2025-11-21T04:12:10+0000 n042 kernel: NVRM: GPU 0000:9b:00.0: GPU has fallen off the bus.
NVRM: Xid (PCI:0000:9b:00): 31, whose is it?
"""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as made:
        yield made


def kept(folder: Path) -> list[NodeEvent]:
    return [event for event in read_newest_events(folder / "inbox", 100) if isinstance(event, NodeEvent)]


def test_lines_of_a_kernel_log_are_events(client: Client, tmp_path: Path) -> None:
    answer = client.post("/v1/kernel-log", content=LINES)
    assert (answer.status_code, answer.json()["accepted"]) == (202, 1)
    assert "no node is named" in answer.json()["rejected"][0]["reason"]
    again = client.post("/v1/kernel-log", params={"node": "n042"}, content=LINES)
    assert (again.json()["accepted"], again.json()["duplicates"], again.json()["rejected"]) == (1, 1, [])
    assert [(event.node, event.code, event.device) for event in kept(tmp_path)] == [
        ("n042", 79, "0000:9b:00"),
        ("n042", 31, "0000:9b:00"),
    ]


def test_a_boot_time_dates_the_lines_since_the_boot(client: Client, tmp_path: Path) -> None:
    text = "[   60.000000] NVRM: Xid (PCI:0000:9b:00): 79, gone"
    params = {"node": "n1", "boot_ms": NOW_MS - 3_600_000}
    assert client.post("/v1/kernel-log", params=params, content=text).json()["accepted"] == 1
    assert client.post("/v1/kernel-log", params=params, content=text).json()["duplicates"] == 1
    assert [event.time_ms for event in kept(tmp_path)] == [NOW_MS - 3_540_000]


def test_a_log_that_says_nothing_is_no_error(client: Client) -> None:
    answer = client.post("/v1/kernel-log", params={"node": "n1"}, content="eth0: link is up\n")
    assert (answer.status_code, answer.json()) == (202, {"accepted": 0, "duplicates": 0, "rejected": []})


def test_an_empty_log_is_told_what_was_expected(client: Client) -> None:
    answer = client.post("/v1/kernel-log", params={"node": "n1"}, content="")
    assert answer.json()["detail"] == "the body is empty: expected lines of a kernel log"


@pytest.mark.parametrize(
    ("params", "content"),
    [({"node": "a/b"}, "x"), ({"node": "n1"}, ""), ({"boot_ms": "-1"}, "x"), ({"nod": "n1"}, "x")],
)
def test_what_cannot_be_read_is_refused(client: Client, params: dict[str, str], content: str) -> None:
    assert client.post("/v1/kernel-log", params=params, content=content).status_code == 422


def test_nvsentinel_is_believed_once(client: Client, tmp_path: Path) -> None:
    headers = {"content-type": "application/cloudevents-batch+json"}
    body = [envelope("a"), envelope("a"), envelope("b", nodeName="")]
    answer = client.post("/v1/webhooks/nvsentinel", json=body, headers=headers)
    assert answer.status_code == 202
    assert (answer.json()["accepted"], answer.json()["duplicates"]) == (1, 1)
    assert [row["index"] for row in answer.json()["rejected"]] == [2]
    binary = {"ce-specversion": "1.0", "ce-id": "a", "ce-type": envelope()["type"], "ce-source": "x"}
    assert client.post("/v1/webhooks/nvsentinel", json=envelope()["data"], headers=binary).json()["duplicates"] == 1
    assert [(event.node, event.check) for event in kept(tmp_path)] == [("n042", "GpuNvlinkWatch")]


def test_large_bodies_are_read_beside_the_loop(client: Client) -> None:
    body = [envelope(f"id-{number}", message="x" * 400) for number in range(300)]
    assert client.post("/v1/webhooks/nvsentinel", json=body).json()["accepted"] == 300
    text = "x" * 100 + "\n"
    assert client.post("/v1/kernel-log", params={"node": "n1"}, content=text * 2000 + LINES).json()["accepted"] == 2
