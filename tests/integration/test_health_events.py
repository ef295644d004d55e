"""What kernels, health checkers and training loops say, at a running service: on the node's page within a second."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetcast.ingest.health.ufm import PATH
from tests.ingest.health.test_nvsentinel import envelope
from tests.ingest.health_daemon import Daemon, running
from tests.integration.service_process import PATIENCE, Service, soon

pytestmark = pytest.mark.integration

NODES = ("n1", "n2", "n3", "n4", "n5", "n6")
BUSES = ("1B", "43", "52", "9B", "A1", "C3", "D1", "E7")


def pages() -> str:
    """What DCGM says of the healthy GPUs of all nodes."""
    lines = []
    for node in NODES:
        for gpu, bus in enumerate(BUSES):
            labels = f'gpu="{gpu}",UUID="GPU-{node}-{gpu}",pci_bus_id="00000000:{bus}:00.0",Hostname="{node}"'
            lines += [f"DCGM_FI_DEV_SM_CLOCK{{{labels}}} 1980", f"DCGM_FI_DEV_GPU_TEMP{{{labels}}} 60"]
    return "\n".join(lines) + "\n"


@pytest.fixture
def daemons() -> Iterator[dict[str, Daemon]]:
    with running(Daemon()) as gpud, running(Daemon()) as ufm:
        yield {"gpud": gpud, "ufm": ufm}


@pytest.fixture
def service(
    folder_server: tuple[Path, str], start_service: Callable[..., Service], tmp_path: Path, daemons: dict[str, Daemon]
) -> Service:
    """Six nodes in steady health, a kernel log that is followed, and health daemons that are asked."""
    root, url = folder_server
    (root / "metrics").write_text(pages())
    (root / "topology.toml").write_text('[[rack]]\nname = "r1"\nnodes = ["n[1-6]"]\ngpus = 8\ngpu_model = "H100"\n')
    made = start_service(
        speed=1.0,
        scrape={"targets": [url], "interval_s": 2.0},
        fleet={"topology": str(root / "topology.toml")},
        pipeline={
            "tick_s": 10.0,
            "sources": [
                {"use": "kernel_log", "options": {"paths": [f"{tmp_path}/{{node}}.log"]}},
                {"use": "gpud", "options": {"targets": [f"n5={daemons['gpud'].url}"], "poll_s": 0.2}},
                {"use": "ufm", "options": {"url": daemons["ufm"].url, "poll_s": 0.5, "timeout_s": 2.0}},
            ],
        },
    )
    made.until("ready", lambda: made.get("/readyz"), 60)
    made.until("scored", lambda: (made.get("/v1/nodes/n4") or {}).get("state") == "ok", 60)
    return made


def struck(service: Service, node: str, began_s: float, limit_s: float = 1.0) -> dict[str, Any]:
    """The node's page once it tells of something grave, and no later than the limit."""
    while time.monotonic() < began_s + 20 * PATIENCE:
        page = service.get(f"/v1/nodes/{node}")
        if page["state"] != "ok":
            assert time.monotonic() - began_s < soon(limit_s)
            return dict(page)
        time.sleep(0.01)
    raise AssertionError(f"{node} stays ok\n{service.log()[-3000:]}")


def stamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime())


def test_what_is_grave_is_on_the_nodes_page_within_a_second(
    service: Service, tmp_path: Path, daemons: dict[str, Daemon]
) -> None:
    line = f"{stamp()} n1 kernel: NVRM: Xid (PCI:0000:9b:00): 79, pid=1, GPU has fallen off the bus.\n"
    began = time.monotonic()
    (tmp_path / "n1.log").write_text(line)  # the source looks for new files every five seconds
    page = struck(service, "n1", began, 6.5)
    assert "GPU 3 of n1 (0000:9b:00)" in json.dumps(page.get("urgent", page["reasons"]))

    began = time.monotonic()
    with open(tmp_path / "n1.log", "a") as file:
        file.write(line)
    push = "tail -n 1 -F LOG | grep --line-buffered -E 'NVRM|nvswitch|amdgpu|mlx5|AER|PCIe' | "
    push += 'while IFS= read -r line; do curl -sS --retry 5 --data-binary "$line" "URL/v1/kernel-log?node=n2"; done'
    log = tmp_path / "pushed"
    log.write_text(line.replace("n1", "n2").replace("9b", "a1"))
    command = push.replace("LOG", str(log)).replace("URL", f"http://127.0.0.1:{service.port}")
    shell = subprocess.Popen(["bash", "-c", command], start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        struck(service, "n2", time.monotonic(), 1.5)
    finally:
        os.killpg(shell.pid, 15)
        shell.wait()

    told = envelope("one", nodeName="n3", generatedTimestamp=stamp().replace("+0000", "Z"))
    began = time.monotonic()
    assert service.request("POST", "/v1/webhooks/nvsentinel", told)[0] == 202
    page = struck(service, "n3", began)
    assert page["urgent"][0]["advice"] == "contact support"

    remapping: dict[str, Any] = {"health": "Unhealthy", "reason": "remapping failed", "name": "remapped-rows"}
    remapping["suggested_actions"] = {"repair_actions": ["HARDWARE_INSPECTION"]}
    daemons["ufm"].pages[PATH] = [
        {"node_name": "n6 mlx5_3", "port": 1, "probability": 80.0, "description": "bit errors"}
    ]
    daemons["gpud"].pages["/v1/states"] = [{"component": "remapped-rows", "states": [remapping]}]
    page = struck(service, "n5", time.monotonic(), 1.5)
    assert page["urgent"][0]["advice"] == "have the hardware inspected"

    def acted(node: str) -> Any:
        return service.get(f"/v1/nodes/{node}")["action"]["code"] == "drain_now" and service.get(f"/v1/nodes/{node}")

    page = service.until("scored with the event", lambda: acted("n1"), 15)
    assert page["action"]["sentence"].endswith("NVIDIA's advice for XID 79: restart the node.")
    assert page["reasons"][0]["sentence"].startswith("GPU 3: XID 79: GPU has fallen off the bus")
    page = service.until("scored with the health", lambda: acted("n3"), 15)
    assert "nvsentinel: GpuNvlinkWatch: NVLink errors on GPU 7" in page["action"]["sentence"]
    assert service.get("/v1/nodes/n4")["action"]["code"] == "none"
    page = service.until("the link's prior", lambda: service.get("/v1/nodes/n6")["reasons"], 15)
    assert page[0]["entity"] == "n6/mlx5_3/1"
    assert "port mlx5_3: a link failure is predicted with probability 0.8" in page[0]["sentence"]
    sources = {row["name"]: row for row in service.get("/v1/ingestion")["sources"]}
    assert {"kernel_log", "gpud", "ufm"} <= sources.keys()
    assert all(sources[name]["up"] for name in ("kernel_log", "gpud", "ufm"))

    well = envelope("two", nodeName="n3", isHealthy=True, isFatal=False, message="well")
    well["data"]["healthEvent"]["generatedTimestamp"] = stamp().replace("+0000", "Z")
    assert service.request("POST", "/v1/webhooks/nvsentinel", well)[1]["accepted"] == 1
    service.until("taken back", lambda: service.get("/v1/nodes/n3")["action"]["code"] != "drain_now", 30)


LOOP = """
import time
from fleetcast_client import Client, Reporter
with Reporter() as report:
    report.phase("loading")
    report.phase("steady")
    for number in range(20):
        with report.step(tokens=65536) as step:
            with step.part("compute"):
                time.sleep(0.01)
    assert report.flush(10), report.counts()
    assert report.counts().sent == 22, report.counts()
"""


def test_a_training_loop_tells_of_itself(service: Service) -> None:
    sdk = Path(__file__).parents[2] / "sdk"
    url = f"http://127.0.0.1:{service.port}"
    env = {**os.environ, "PYTHONPATH": str(sdk), "FLEETCAST_URL": url, "SLURM_JOB_ID": "42", "WORLD_SIZE": "2"}
    now_ms = time.time_ns() // 1_000_000
    ranks = [{"rank": rank, "node": node, "gpus": [0]} for rank, node in enumerate(("n1", "n2"))]
    events = [
        {"job": "42", "sequence": 1, "time_ms": now_ms, "type": "submitted", "gang": 2},
        {"job": "42", "sequence": 3, "time_ms": now_ms, "type": "started", "ranks": ranks},
    ]
    assert service.request("POST", "/v1/events", events)[1]["accepted"] == 2
    loops = [
        subprocess.Popen([sys.executable, "-c", LOOP], env={**env, "SLURM_PROCID": str(rank)}) for rank in range(2)
    ]
    assert [loop.wait(60) for loop in loops] == [0, 0]

    def told() -> Any:
        job = service.get("/v1/jobs/42")
        return job if job and any(event["type"] == "step" for event in job["events"]) else None

    job = service.until("the steps are told", told, 30)
    assert job["state"] == "running"
    if shutil.which("curl"):
        step = {**events[0], "type": "step", "sequence": 4294967297, "rank": 0, "step": 21, "duration_s": 1.5}
        del step["gang"]
        done = subprocess.run(
            ["curl", "-sS", f"{url}/v1/events", "-H", "content-type: application/json", "-d", json.dumps(step)],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        assert json.loads(done.stdout)["accepted"] == 1
    code = (
        "from fleetcast_client import Client; c = Client(); "
        "print(c.node('n4')['state'], c.job('42')['state'], len(c.risk()['rows']), c.jobs()['rows'][0]['job'], "
        "len(c.demand()['series']) >= 0, c.place({'request_id': 'a', 'gang': 1, 'dry_run': True})['outcome'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["ok", "running", "6", "42", "True", "placed"], done.stderr
