"""A fleet of four nodes with one GPU each: a real pipeline and api as processes, and a real placer in this process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from fleetcast.fleet.requests import RankPlacement
from fleetcast.placement.actions.action import ActionCost, ActionKind, ActionReason, JobAction
from fleetcast.service.config import Config, load_config
from fleetcast.service.placer.http import make_app
from fleetcast.service.placer.role import QueueWorker, open_service
from tests.dashboards.grafana import ROOT
from tests.integration.service_process import Service

T = TypeVar("T")
TOPOLOGY = '[[rack]]\nname = "r"\nblock = "b"\nnodes = ["n[1-4]"]\ngpus = 1\n'
QUEUE = "lender"
ACT = '[policy]\nreclaim = "act"\npreempt_after_s = 0\nmin_run_s = 0\n'
HOLDS_ALL = f"{ACT}[queue.{QUEUE}]\nguaranteed = {{gpu = 4}}\n"
LIMIT_S = 400.0  # agents are Python processes with PyTorch, and the machine may be busy
DONE = ["proposed", "sent", "accepted", "seen"]


class Roles(Service):
    """The api and the pipeline, each alone. The placer runs in this process."""

    def start(self) -> None:
        self.processes = [self._start_role(name) for name in ("pipeline", "api")]

    def _start_role(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "fleetcast.cli.main", "run", "--role", name]
        with open(self.folder / "service.log", "ab") as log:
            return subprocess.Popen(
                [*command, "--config", str(self.folder / "config.toml")], cwd=ROOT, stdout=log, stderr=log
            )

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(30)


class PlacerThread:
    """A placer that runs in a thread, so that a test opens actions by hand."""

    def __init__(self, config: Config) -> None:
        self.service = open_service(config)
        self._worker = QueueWorker(self.service)
        app = make_app(self.service, self._worker.wake)
        settings = uvicorn.Config(app, host="127.0.0.1", port=config.placer.port, log_config=None, lifespan="off")
        self._server = uvicorn.Server(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._worker.run())
            await self._server.serve()
            self._worker.stop()

    def call(self, work: Callable[[], T]) -> T:
        """Return what `work` returns in the placer's thread."""

        async def run() -> T:
            return work()

        coroutine: Coroutine[Any, Any, T] = run()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._loop.close()
        self.service.ledger.close()


@dataclass
class Launched:
    """The launcher of one attempt of the job, and the output of it and its agents."""

    process: subprocess.Popen[bytes]
    log: Path

    def lines(self, text: str) -> list[str]:
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]


class Scene:
    """The service, with a file of queues if `queues` has its text. `close` ends what this object started.

    The job is of the queue `QUEUE` if there is such a file. If its policy does not act, the placer withdraws growth
    that a test has sent.
    """

    def __init__(self, folder: Path, python: Path, queues: str = "") -> None:
        self.folder, self._python, self._queue = folder, python, QUEUE if queues else ""
        (folder / "topology.toml").write_text(TOPOLOGY)
        (folder / "queues.toml").write_text(queues)
        file = {"queues": str(folder / "queues.toml")} if queues else {}
        self.roles = Roles(
            folder,
            speed=1.0,
            fleet={"topology": str(folder / "topology.toml")},
            pipeline={"tick_s": 1.0},
            placer={"taken_queue_share": 1.0, "taken_fleet_share": 1.0, **file},
        )
        self.placer = PlacerThread(load_config(folder / "config.toml"))
        self._launched: list[Launched] = []

    def launch(
        self, job: str, launcher: Path, *options: str, attempt: int = 1, variables: Mapping[str, str] | None = None
    ) -> Launched:
        """Start a program that launches one attempt of the job. variables: further ones of its environment."""
        log = self.folder / f"{job}-{attempt}.log"
        own = {
            "PYTHONPATH": f"{ROOT / 'sdk'}:{ROOT}",
            "FLEETCAST_URL": f"http://127.0.0.1:{self.roles.port}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder),
        }
        command = [str(self._python), str(launcher), *options]
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command,
                env=os.environ | own | (variables or {}),
                cwd=ROOT,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._launched.append(Launched(process, log))
        return self._launched[-1]

    def send(
        self, kind: ActionKind, job: str, attempt: int, ranks: Sequence[Any] = (), places: Sequence[Any] = ()
    ) -> str:
        """Open an action on a job and send it to the job's own agent. Returns its id."""
        action = JobAction(
            kind=kind,
            job=job,
            attempt=attempt,
            queue=self._queue,
            gpus=float(max(len(ranks), len(places))),
            ranks=tuple(RankPlacement(number, node, (0,)) for number, node in enumerate(ranks)),
            places=tuple(RankPlacement(number, node, (0,)) for number, node in enumerate(places)),
            executor="agents",
            by_ms=time.time_ns() // 1_000_000 + 300_000,
            reason=ActionReason("idle"),
            cost=ActionCost(),
            grace_s=120.0,
        )

        def send() -> str:
            control, now_ms = self.placer.service.actions, time.time_ns() // 1_000_000
            (record,) = control.propose([action], now_ms).opened
            assert control.send([record.action_id], now_ms)
            return record.action_id

        return self.placer.call(send)

    def find_action(self, job: str) -> Any:
        """Return the last action on a job that was sent, or None."""
        rows = (self.roles.get(f"/v1/actions?job={job}&order=newest") or {}).get("rows", ())
        return next((row for row in reversed(rows) if row["state"] in DONE[1:]), None)

    def life(self, action_id: str) -> list[str]:
        answer = self.roles.get(f"/v1/actions/{action_id}")
        return [step["state"] for step in answer["life"]]

    def nodes(self, job: str) -> list[str]:
        """Return the nodes that the job holds, as the api shows them."""
        answer = self.roles.get(f"/v1/jobs/{job}") or {}
        return sorted(rank["node"] for rank in answer.get("placement", ()))

    def until(self, what: str, check: Callable[[], Any]) -> Any:
        """Return the first truthy answer of a check."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if answer := check():
                return answer
            time.sleep(0.2)
        logs = "".join(f"\n{row.log}\n{row.log.read_text(errors='replace')[-3000:]}" for row in self._launched)
        raise AssertionError(f"{what}: not within {LIMIT_S:.0f} s{logs}\n{self.roles.log()[-2000:]}")

    def close(self) -> None:
        for row in self._launched:
            if row.process.poll() is None:
                row.process.terminate()
                try:
                    row.process.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(row.process.pid, signal.SIGKILL)
                    row.process.wait()
        self.roles.stop()
        self.placer.close()


@contextlib.contextmanager
def open_scene(folder: Path, python: Path, queues: str = "") -> Iterator[Scene]:
    scene = Scene(folder, python, queues)
    try:
        scene.until("the service is ready", lambda: scene.roles.get("/readyz"))
        yield scene
    finally:
        scene.close()
