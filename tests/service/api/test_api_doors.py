"""How adapters stand and what they wrote, over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.service.adapter_records import AdapterAuditLine, AdapterRecords, AdaptersStatus, AdapterStatus
from fleetcast.service.api.app import create_app
from fleetcast.service.config import GRPC_SERVICES, AdapterConfig, AdaptersConfig, Config
from fleetcast.service.doors import ANSWERERS
from tests.service.api_world import NOW_MS, Client, config


def line(key: str) -> AdapterAuditLine:
    return AdapterAuditLine(
        time_ms=NOW_MS,
        decision=f"bands-{key}",
        adapter="bands",
        mode="write",
        board=4,
        key=key,
        field="band",
        seen="low",
        value="high",
        why="risk 81%",
        outcome="done",
    )


@pytest.fixture
def configured(tmp_path: Path) -> Config:
    row = AdapterConfig(use="band_file", name="bands", mode="write", options={"path": str(tmp_path / "bands")})
    return msgspec.structs.replace(config(tmp_path), adapters=AdaptersConfig(adapter=(row,)))


@pytest.fixture
def client(configured: Config) -> Iterator[Client]:
    with Client(create_app(configured, ManualClock(NOW_MS))) as made:
        yield made


def test_an_adapter_that_has_not_run_stands_beside_those_that_answer(client: Client) -> None:
    rows = {row["name"]: row for row in client.get("/v1/adapters").json()["rows"]}
    assert (rows["kube"]["kind"], rows["kube"]["mode"]) == ("answerer", "answer")
    assert (rows["bands"]["kind"], rows["bands"]["mode"], rows["bands"]["board"]) == ("writer", "write", None)
    assert client.get("/v1/adapters/bands").json()["writes"] == []


def test_what_an_adapter_wrote_is_told_newest_first(client: Client, configured: Config) -> None:
    records = AdapterRecords(configured.folder)
    records.append_lines([line("n1"), line("n2"), line("n3")])
    status = AdapterStatus(name="bands", use="band_file", mode="observe", writes=3, held_back=2, last=line("n3"))
    records.write_status(AdaptersStatus(NOW_MS, adapters=[status]))
    records.close()
    row = client.get("/v1/adapters").json()["rows"][-1]
    assert (row["mode"], row["writes"], row["held_back"], row["last"]["key"]) == ("write", 3, 2, "n3")
    told = client.get("/v1/adapters/bands?limit=2").json()
    assert [write["key"] for write in told["writes"]] == ["n3", "n2"]
    assert told["adapter"] == row


def test_an_adapter_that_is_not_there_is_named_with_those_that_are(client: Client) -> None:
    answer = client.get("/v1/adapters/kueu")
    assert answer.status_code == 404
    known = [name for name in ANSWERERS if name not in {"external_metrics", *GRPC_SERVICES}]  # their ports are closed
    assert answer.json()["detail"] == f"no adapter 'kueu': there are {', '.join([*known, 'bands'])}"
    assert client.get("/v1/adapters/bands?limit=-1").status_code == 422
