"""The main path with real processes: a page served by hand, scores, placements, restarts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service_process import Service

pytestmark = pytest.mark.integration

GPUS = 4


def gpu_page(*, throttled: int | None = None, without: int | None = None) -> str:
    """A page with the names of DCGM 4.6 and `hostname` in lower case."""
    lines = []
    for gpu in range(GPUS):
        if gpu == without:
            continue
        labels = f'gpu="{gpu}",UUID="GPU-{gpu}",modelName="NVIDIA H100 80GB HBM3",hostname="hand01"'
        slow = gpu == throttled
        values = {
            "DCGM_FI_DEV_SM_CLOCK": 990 if slow else 1980,
            "DCGM_FI_DEV_GPU_TEMP_CELSIUS": 88 if slow else 60,
            "DCGM_FI_DEV_BOARD_POWER_WATTS": 420 if slow else 610,
            "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": 64 + 8 if slow else 0,
            "DCGM_FI_DEV_XID_ERROR": 0,
            "DCGM_FI_PROF_SM_UTIL_RATIO": 0.8,
        }
        lines += [f"{name}{{{labels}}} {value}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def reasons(service: Service, node: str) -> list[str]:
    answer = service.get(f"/v1/nodes/{node}")
    return [row["sentence"] for row in answer["reasons"]] if answer else []


def test_a_page_served_by_hand_is_scored_without_any_configuration(
    folder_server: tuple[Path, str], start_service: Callable[..., Service]
) -> None:
    root, url = folder_server
    page = root / "metrics"
    page.write_text(gpu_page())
    service = start_service(scrape={"targets": [url]})
    node = service.until("the node", lambda: service.get("/v1/nodes/hand01"), 60)
    assert node["placed"] is False
    healthy = service.until(
        "scores",
        lambda: (
            (answer := service.get("/v1/nodes/hand01"))
            and len(answer["gpus"]) == GPUS
            and all(row["p"] is not None for row in answer["risk"])
            and answer
        ),
    )
    assert healthy["reasons"] == []
    assert healthy["action"]["code"] == "none"

    page.write_text(gpu_page(throttled=2))
    hot = service.until("a thermal reason", lambda: reasons(service, "hand01"), 20)
    assert "990" in hot[0]
    assert service.get("/v1/nodes/hand01")["reasons"][0]["entity"].endswith("2")

    page.write_text(gpu_page(without=1))
    service.until(
        "the GPU that is not listed",
        lambda: any("no longer lists 1 of 4 GPUs" in sentence for sentence in reasons(service, "hand01")),
        30,
    )


TOPOLOGY = "\n".join(
    f'[[rack]]\nname = "r{rack}"\nblock = "b"\nnodes = ["r{rack}n[1-9]"]\ngpus = 8\ngpu_model = "H100"\n'
    for rack in (1, 2)
)


def started(job: str, nodes: list[str], time_ms: int) -> list[dict[str, Any]]:
    ranks = [{"rank": row, "node": node, "gpus": list(range(8))} for row, node in enumerate(nodes)]
    event = {"job": job, "time_ms": time_ms}
    return [
        event | {"type": "submitted", "sequence": 0, "gang": len(nodes), "gpus_per_node": 8},
        event | {"type": "started", "sequence": 1, "ranks": ranks},
    ]


def as_of_ms(service: Service) -> int:
    return int(service.get("/v1/fleet")["as_of_ms"])


@pytest.fixture
def two_racks(tmp_path: Path, start_service: Callable[..., Service]) -> Service:
    """Two racks of nine nodes; 64 GPUs are free, four nodes in each rack."""
    path = tmp_path / "topology.toml"
    path.write_text(TOPOLOGY)
    service = start_service(fleet={"topology": str(path)})
    service.until("a board", lambda: service.get("/v1/fleet"), 60)
    now_ms = as_of_ms(service)
    events = [
        event
        for rack in (1, 2)
        for number in range(5, 10)
        for event in started(f"blocker-{rack}-{number}", [f"r{rack}n{number}"], now_ms)
    ]
    status, answer, _ = service.request("POST", "/v1/events", events)
    assert (status, answer["accepted"], answer["rejected"]) == (202, len(events), [])
    service.until("occupancy", lambda: service.get("/v1/fleet")["gpus"]["running"] == 80)
    return service


def gang_request(name: str, **extra: Any) -> dict[str, Any]:
    return {"request_id": name, "gang": 8, "gpus_per_node": 8, "topology": {"required": "rack"}, **extra}


def release(service: Service, rack: int, numbers: range) -> None:
    now_ms = as_of_ms(service)
    events = [
        {"job": f"blocker-{rack}-{number}", "sequence": 2, "time_ms": now_ms, "type": "finished"} for number in numbers
    ]
    assert service.request("POST", "/v1/events", events)[0] == 202


def test_a_scattered_gang_is_refused_and_placed_once_one_rack_has_room(two_racks: Service) -> None:
    service = two_racks
    status, refused, _ = service.request("POST", "/v1/placements", gang_request("g1"))
    assert (status, refused["outcome"]) == (200, "refused")
    assert refused["nodes"] == refused["candidates"] + sum(refused["rejected"].values()) == 18

    release(service, 2, range(5, 9))
    trial = gang_request("trial", dry_run=True)
    service.until("the release", lambda: service.request("POST", "/v1/placements", trial)[1]["outcome"] == "placed")
    _, placed, _ = service.request("POST", "/v1/placements", gang_request("g2"))
    assert placed["outcome"] == "placed", placed["sentence"]
    assert {rank["node"][:2] for rank in placed["ranks"]} == {"r2"}
    assert placed["topology_level"] == "rack"
    assert placed["nodes"] == placed["candidates"] + sum(placed["rejected"].values())

    service.stop()
    service.start()
    service.until("the placer", lambda: service.request("POST", "/v1/placements", gang_request("g2"))[0] == 200, 60)
    assert service.request("POST", "/v1/placements", gang_request("g2"))[1] == placed
    assert service.request("POST", "/v1/placements", gang_request("g1"))[1] == refused
    assert service.request("POST", "/v1/placements", gang_request("g2", priority=3))[0] == 422


def test_nonsense_is_refused_with_a_reason_and_never_a_500(two_racks: Service) -> None:
    service = two_racks
    cases: list[tuple[str, str, Any, int]] = [
        ("POST", "/v1/placements", b"{", 400),
        ("POST", "/v1/placements", {"request_id": "x", "gpu": 3}, 422),
        ("POST", "/v1/placements", {"request_id": "x", "gang": 0}, 422),
        ("POST", "/v1/placements", {"request_id": "x", "mig_profile": "1g.10gb"}, 422),
        ("GET", "/v1/nodes/nowhere", None, 404),
        ("GET", "/v1/risk/nodes?horizon_s=17", None, 422),
        ("GET", "/v1/risk/nodes?colour=red", None, 422),
        ("DELETE", "/v1/queue/nothing", None, 404),
        ("PUT", "/v1/queue", None, 405),
        ("POST", "/v1/jobs/estimate", {"request_id": "x", "gang": 0}, 422),
        ("POST", "/v1/interference", {}, 422),
    ]
    for method, path, body, expected in cases:
        status, answer, headers = service.request(method, path, body)
        assert status == expected, (method, path, status, answer)
        assert headers["content-type"].startswith("application/problem+json"), (method, path)
        assert answer["title"]
    status, answer, _ = service.request(
        "POST", "/v1/events", [{"job": "j", "sequence": 0, "time_ms": as_of_ms(service), "type": "finished"}, {"x": 1}]
    )
    assert (status, answer["accepted"], [row["index"] for row in answer["rejected"]]) == (202, 1, [1])
