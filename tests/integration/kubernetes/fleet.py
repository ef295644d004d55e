"""A real Fleetcast that scrapes six GPU nodes: two are healthy, and one each half used, sickly, drained, throttled."""

import functools
import http.server
import os
import signal
import threading
from pathlib import Path
from typing import Any

from tests.integration.conftest import Quiet
from tests.integration.service_process import Service

GPUS, USED = 8, 6
HALF_USED, SICKLY, DRAINED, THROTTLED, *HEALTHY = NODES = ("g1", "g2", "g3", "g4", "g5", "g6")
TOPOLOGY = f'[[rack]]\nname = "r1"\nnodes = ["g[1-6]"]\ngpus = {GPUS}\ngpu_model = "H100"\n'


class WatchedFleet:
    """Starts on construction; `settle` makes the nodes what their names say."""

    def __init__(self, folder: Path) -> None:
        pages, state = folder / "www", folder / "service"
        pages.mkdir()
        state.mkdir()
        self._page = pages / "metrics"
        self._page.write_text(_pages())
        handler = functools.partial(Quiet, directory=str(pages))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        topology = folder / "topology.toml"
        topology.write_text(TOPOLOGY)
        self.service = Service(
            state,
            fleet={"topology": str(topology)},
            scrape={"targets": [f"http://127.0.0.1:{self._server.server_port}/metrics"]},
            api={"stale_after_s": 1800.0},  # two minutes of wall time: these tests are not about a slow machine
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.port}/v1/adapters/kube"

    def settle(self) -> None:
        service = self.service
        service.until("scores", lambda: len(self.known()) == len(NODES), 60)
        now_ms = service.get("/v1/fleet")["as_of_ms"]
        job = {"job": "resident", "time_ms": now_ms}
        ranks = [{"rank": 0, "node": HALF_USED, "gpus": [*range(USED)]}]
        events = [
            {**job, "type": "submitted", "sequence": 0, "gpus_per_node": USED},
            {**job, "type": "started", "sequence": 1, "ranks": ranks},
            {"node": DRAINED, "source": "nhc", "sequence": 1, "time_ms": now_ms, "type": "drain", "message": "fan"},
        ]
        status, answer, _ = service.request("POST", "/v1/events", events)
        assert (status, answer["accepted"]) == (202, 3), answer
        self._page.write_text(_pages(throttled=THROTTLED, sickly=SICKLY))
        service.until("the nodes as they are", self._is_settled, 60)

    def known(self) -> dict[str, dict[str, float]]:
        """Node → kind → probability within an hour, of nodes with scores."""
        found = {}
        for name in NODES:
            node = self.service.get(f"/v1/nodes/{name}")
            risk = {row["kind"]: row["p"] for row in node["risk"] if row["horizon_s"] == 3600} if node else {}
            if risk and all(p is not None for p in risk.values()):
                found[name] = risk
        return found

    def _is_settled(self) -> bool:
        risk = {name: max(kinds["fail"], kinds["slow"]) for name, kinds in self.known().items()}
        fleet = self.service.get("/v1/fleet")
        return (
            fleet["gpus"]["running"] == USED + 1
            and risk[THROTTLED] > 0.5 > risk[SICKLY] > 0.05
            and all(risk[name] < 0.05 for name in (HALF_USED, *HEALTHY))
            and self.service.get(f"/v1/nodes/{DRAINED}")["state"] == "drained"
        )

    def ask(self, verb: str, body: dict[str, Any]) -> Any:
        status, answer, _ = self.service.request("POST", f"/v1/adapters/kube/{verb}", body)
        assert status == 200, answer
        return answer

    def signal(self, role: str, number: signal.Signals) -> None:
        os.kill(self.service.pids()[role], number)

    def stop(self) -> None:
        self.service.stop()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _pages(throttled: str = "", sickly: str = "") -> str:
    """DCGM's page of all nodes."""
    return "".join(
        f'{name}{{gpu="{gpu}",UUID="GPU-{node}-{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="{node}"}} {value}\n'
        for node in NODES
        for gpu in range(GPUS)
        for name, value in _gpu(
            busy=node == HALF_USED and gpu < USED,
            throttled=node == throttled and gpu == 2,
            sickly=node == sickly and gpu == 1,
        ).items()
    )


def _gpu(*, busy: bool, throttled: bool, sickly: bool) -> dict[str, float]:
    """Idle, at the work of a job, or at work that no job event tells of, and too hot for it."""
    return {
        "DCGM_FI_DEV_SM_CLOCK": 990 if throttled else 1980,
        "DCGM_FI_DEV_GPU_TEMP": 88 if throttled else 60 if busy else 35,
        "DCGM_FI_DEV_POWER_USAGE": 420 if throttled else 610 if busy else 75,
        "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": 72 if throttled else 0,
        "DCGM_FI_DEV_XID_ERRORS": 63 if sickly else 0,
        "DCGM_FI_PROF_SM_ACTIVE": 0.8 if busy or throttled else 0.0,
    }
