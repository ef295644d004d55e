import asyncio
import json
from pathlib import Path

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import Failed
from fleetcast.ingest.inbox.inbox import InboxSource
from fleetcast.service.api.app import create_app
from fleetcast.service.http.access import Access
from tests.ingest.health.test_torchelastic import event
from tests.service.api_world import NOW_MS, Client, config


def test_what_a_launcher_says_is_on_disk_before_the_answer_and_counts_once(tmp_path: Path) -> None:
    record = event("FAILED", raw_error='{"message": "x"}')
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS), access=Access())) as client:
        first = client.post("/v1/webhooks/torchelastic?attempt=2", content=json.dumps(record))
        again = client.post("/v1/webhooks/torchelastic?attempt=2", content=json.dumps([record, {}]))
        lines = client.post("/v1/webhooks/torchelastic?job=b", content=f"{json.dumps(record)}\n{json.dumps(record)}\n")
        wrong = client.post("/v1/webhooks/torchelastic?attempt=-1", content="{}")
    assert (first.status_code, first.json()) == (202, {"accepted": 1, "duplicates": 0, "rejected": []})
    assert (again.json()["accepted"], again.json()["duplicates"]) == (0, 1)
    assert again.json()["rejected"][0]["index"] == 1
    assert (lines.json()["accepted"], lines.json()["duplicates"]) == (1, 1)
    assert wrong.status_code == 422
    batch = asyncio.run(InboxSource(config(tmp_path).inbox).next())
    assert [(row.job, row.attempt, type(row)) for row in batch.events] == [("train-42", 2, Failed), ("b", 1, Failed)]
