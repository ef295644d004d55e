"""What a job would take and when it would start, asked of a running service before and after jobs have run there."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service_process import Service

pytestmark = pytest.mark.integration

NODES = ("n1", "n2")
WANTED = {
    "request_id": "train-99",
    "user": "ada",
    "queue": "train",
    "gang": 1,
    "gpus_per_node": 8,
    "topology": {"required": "node"},
}


def pages(memory_mib: int, power_w: int) -> str:
    """What DCGM says of the GPUs of both nodes."""
    lines = []
    for node in NODES:
        for gpu in range(8):
            labels = f'gpu="{gpu}",UUID="GPU-{node}-{gpu}",Hostname="{node}"'
            values = {"SM_CLOCK": 1980, "GPU_TEMP": 60, "POWER_USAGE": power_w, "FB_USED": memory_mib}
            lines += [f"DCGM_FI_DEV_{name}{{{labels}}} {value}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


@pytest.fixture
def service(folder_server: tuple[Path, str], start_service: Callable[..., Service]) -> Service:
    root, url = folder_server
    (root / "metrics").write_text(pages(0, 75))
    (root / "topology.toml").write_text('[[rack]]\nname = "r1"\nnodes = ["n[1-2]"]\ngpus = 8\ngpu_model = "H100"\n')
    made = start_service(
        scrape={"targets": [url], "interval_s": 15.0},
        fleet={"topology": str(root / "topology.toml")},
    )
    made.until("ready", lambda: made.get("/readyz"), 60)
    return made


def events(job: str, start_ms: int, end_ms: int | None, node: str) -> list[dict[str, Any]]:
    ranks = [{"rank": 0, "node": node, "gpus": list(range(8))}]
    about = {"user": "ada", "queue": "train", "gpus_per_node": 8, "class": "training"}
    told: list[dict[str, Any]] = [
        {"type": "submitted", "sequence": 0, "time_ms": start_ms - 1000, **about},
        {"type": "started", "sequence": 1, "time_ms": start_ms, "ranks": ranks},
    ]
    if end_ms is not None:
        told.append({"type": "finished", "sequence": 2, "time_ms": end_ms})
    return [{"job": job, "attempt": 1, **event} for event in told]


def estimated(service: Service, **more: Any) -> Any:
    status, answer, _ = service.request("POST", "/v1/jobs/estimate", {**WANTED, **more})
    assert status == 200, answer
    return answer


def tell(service: Service, told: list[dict[str, Any]]) -> None:
    status, answer, _ = service.request("POST", "/v1/events", told)
    assert (status, answer["rejected"]) == (202, [])


def test_estimates_learn_from_the_jobs_that_ran(service: Service, folder_server: tuple[Path, str]) -> None:
    answer = service.until("a start", lambda: (found := estimated(service))["start_ms"] and found)
    assert answer["run_s"] is None
    assert answer["reasons"].keys() == {"run_s", "peak_gpu_memory_gib", "power_w"}
    assert "free now" in answer["sentence"]

    now_ms = answer["as_of_ms"]
    past = [
        event
        for number in range(12)
        for event in events(
            f"train-{number}", now_ms - (number + 2) * 3_600_000, now_ms - (number + 1) * 3_600_000, "n1"
        )
    ]
    tell(service, past)
    tell(
        service,
        [*events("train-50", now_ms - 1_800_000, None, "n1"), *events("train-51", now_ms - 900_000, None, "n2")],
    )
    (folder_server[0] / "metrics").write_text(pages(40_960, 500))
    service.until("the jobs at work", lambda: service.get("/v1/nodes/n2")["gpus"][0].get("power_w") == 500, 70)
    answer = service.until(
        "a later start", lambda: (found := estimated(service))["blocked_by"] and found["run_s"] and found, 70
    )
    assert answer["run_s"]["p50"] == pytest.approx(3600, rel=0.02)
    assert answer["similar"]["run_s"] == "user, name and GPUs"
    assert answer["start_ms"]["p90"] >= answer["start_ms"]["p50"] >= answer["as_of_ms"]
    assert {blocker["job"] for blocker in answer["blocked_by"]} <= {"train-50", "train-51"}
    assert answer["sentence"].startswith("needs 8 GPUs with fast intra-node links")
    assert "It should run 1 h" in answer["sentence"]

    row = service.until("what is left", lambda: (found := service.get("/v1/jobs/train-50"))["run_s"] and found)
    assert row["run_s"]["p50"] == pytest.approx(3600, rel=0.02)
    assert 0 < row["remaining_s"]["p50"] <= 1800
    assert answer["start_ms"]["p50"] - answer["as_of_ms"] == pytest.approx(1_800_000, rel=0.35)

    tell(service, events("train-51", now_ms - 900_000, row["as_of_ms"], "n2"))
    answer = service.until("needs", lambda: (found := estimated(service))["power_w"] and found)
    assert (answer["peak_gpu_memory_gib"], answer["power_w"]) == (40.0, 4000.0)
    assert answer["reasons"] == {}

    service.process.send_signal(signal.SIGSTOP)  # nobody starts them again meanwhile
    try:
        for role in ("pipeline", "placer"):  # the run time is told while they are away
            service.kill(role)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            assert estimated(service)["run_s"]["p50"] == pytest.approx(3600, rel=0.02)
            time.sleep(0.1)
    finally:
        service.process.send_signal(signal.SIGCONT)
    service.until("all of it again", lambda: (found := estimated(service))["start_ms"] and found["run_s"], 60)
