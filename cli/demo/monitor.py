"""The monitor of a demo, which polls the service as any client would."""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import typer

from fleetcast.cli.demo.evidence import parse_flag_reasons
from fleetcast.cli.demo.processes import START_LIMIT_S, DemoOptions, report_process_end
from fleetcast.cli.demo.report import (
    FlagHistory,
    IngestionTotals,
    are_stories_done,
    find_false_nodes,
    is_flagged,
    judge_faults,
    list_problems,
)
from fleetcast.cli.demo.screen import DemoScreen
from fleetcast.cli.kit.screen import echo
from fleetcast.fleet.process import make_token_headers

POLL_S = 0.5
WARM_UP_S = 3.0
SETTLED_BY_S = 30.0  # a busy machine scrapes later
WHOLE_S = 45.0  # a bounded run of this length shows the stories to their end
LATE_S = 60.0  # on a busy machine they end later
ASKED = "demo-1"


class DemoRun:
    """The monitor of a demo, which polls the API as any client would.

    It reports how the service's answers compare with the simulator's own file of true faults.
    """

    def __init__(self, options: DemoOptions, folder: Path, screen: DemoScreen, stop: asyncio.Event) -> None:
        self.options = options
        self.folder = folder
        self.screen = screen
        self.stop = stop
        self.watch = FlagHistory()
        self.totals = IngestionTotals()
        self.placements = {"placed": 0, "refused": 0, "queued": 0}
        self._cursor = 0
        self._looks: dict[str, tuple[Any, Any]] = {}  # flagged node → (reason, parts) when its reasons were last read
        self._story: list[dict[str, Any]] = []  # the turns so far
        self._ingestion: dict[str, Any] = {}
        self._fleet: dict[str, Any] = {}
        self._starts: dict[str, Any] = {}
        self._worth: dict[str, Any] | None = None

    async def run_until_done(
        self, simulation: asyncio.subprocess.Process, service: asyncio.subprocess.Process
    ) -> tuple[dict[str, Any], list[str]]:
        import aiohttp

        base = f"http://127.0.0.1:{self.options.port}"
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(base, timeout=timeout, headers=make_token_headers()) as session:
            await self._wait_until_ready(session, simulation, service)
            self.screen.print_sentence(self._read_simulation_status()["note"])
            self.screen.print_ready()
            began = time.monotonic()
            while not self.stop.is_set():
                elapsed_s = time.monotonic() - began
                if self._is_over(elapsed_s):
                    break
                await self._poll_api(session)
                if self.options.input == "h100" and not self.placements["placed"]:
                    await self._place_on_idle_node(session)
                self.screen.show_status(self._fleet, self._ingestion, self.placements, elapsed_s, self.options.seconds)
                await asyncio.sleep(POLL_S)
                for process, name in ((simulation, "simulation"), (service, "service")):
                    if process.returncode is not None:
                        raise typer.Exit(report_process_end(name, process.returncode, self.folder))
            elapsed_s = time.monotonic() - began
            self.screen.print_sentence("letting the last scrapes arrive")
            simulation.send_signal(signal.SIGUSR1)  # no further bad lines, so that both sides can count the same ones
            await self._wait_for_totals(session)
            self._starts = (await _get_json(session, "/v1/queue") or {}).get("record") or {}
        if self.options.worth and self.options.input == "trace":
            self.stop.clear()
            self.screen.print_sentence("simulating a day with a risk-blind engine and with ours (Ctrl-C skips it)")
            self._worth = await self._simulate_day()
        return self._make_report(elapsed_s)

    def _is_over(self, elapsed_s: float) -> bool:
        """Return whether a bounded run ends now. A run of `WHOLE_S` waits for its stories, at most `LATE_S` longer."""
        seconds = self.options.seconds
        if seconds is None or elapsed_s < seconds:
            return False
        if seconds < WHOLE_S or elapsed_s >= seconds + LATE_S:
            return True
        return are_stories_done(self._story, int(self._fleet.get("as_of_ms", 0)))

    async def _wait_for_totals(self, session: Any) -> None:
        """Poll the totals until every injected bad record is counted, for at most SETTLED_BY_S."""
        until = time.monotonic() + SETTLED_BY_S
        while True:
            await asyncio.sleep(WARM_UP_S)
            await self._poll_api(session)
            if (
                self.totals["bad_telemetry"] >= self._read_simulation_status()["bad_records_injected"]
                or time.monotonic() > until
            ):
                return

    async def _wait_until_ready(
        self, session: Any, simulation: asyncio.subprocess.Process, service: asyncio.subprocess.Process
    ) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not self.stop.is_set():
            for process, name in ((simulation, "simulation"), (service, "service")):
                if process.returncode is not None:
                    raise typer.Exit(report_process_end(name, process.returncode, self.folder))
            fleet = await _get_json(session, "/v1/fleet")
            if fleet and fleet.get("samples_per_s") and fleet["gpus"]["running"] and self._is_past_received():
                return
            if time.monotonic() > deadline:
                echo(f"not ready within {START_LIMIT_S:.0f} s; see {self.folder}/*.log", err=True)
                raise typer.Exit(1)
            await asyncio.sleep(POLL_S)

    async def _poll_api(self, session: Any) -> None:
        if ingestion := await _get_json(session, "/v1/ingestion"):
            if self.totals.record_answer(ingestion):
                self.watch.record_restart(int(ingestion["as_of_ms"]))
                self.screen.print_sentence("the pipeline started again")
            self._ingestion = ingestion
        risk = await _get_json(session, "/v1/risk/nodes?limit=1000")
        self._fleet = await _get_json(session, "/v1/fleet") or self._fleet
        if risk:
            for node, reason in self.watch.record_answer(risk["rows"], risk["as_of_ms"]):
                self.screen.print_sentence(f"{node} flagged: {reason}")
            await self._record_flag_reasons(session, risk["rows"])
        answer = await _get_json(session, f"/v1/placements?after={self._cursor}")
        for row in (answer or {}).get("rows", ()):
            self._cursor = max(self._cursor, int(row["cursor"]))
            self.placements[row["outcome"]] += 1
            if row["request_id"] == ASKED:
                self.screen.print_sentence(row["sentence"])
        self._print_story()

    async def _record_flag_reasons(self, session: Any, rows: list[dict[str, Any]]) -> None:
        """Record all reasons of the flagged nodes, because the ranking names only the first."""
        for row in rows:
            name, looks = row["node"], (row["reason"], row["parts"])
            if not is_flagged(row) or self._looks.get(name) == looks:
                continue
            if node := await _get_json(session, f"/v1/nodes/{name}"):
                self._looks[name] = looks
                self.watch.record_evidence(name, parse_flag_reasons(node["reasons"]), node["as_of_ms"])

    def _print_story(self) -> None:
        path = self.folder / "story.jsonl"
        if path.exists():
            turns = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for turn in turns[len(self._story) :]:
                if turn["event"] != "flagged":  # `_poll` said so
                    self.screen.print_sentence(turn["sentence"])
            self._story = turns

    async def _place_on_idle_node(self, session: Any) -> None:
        """Queue a request for one GPU once all recorded jobs run, because one node then has room for it.

        Another call changes nothing.
        """
        jobs = (await _get_json(session, "/v1/jobs") or {"rows": []})["rows"]
        if sum(row["state"] == "running" for row in jobs) < self._read_simulation_status()["jobs"]["running"]:
            return
        async with session.post("/v1/queue", json={"request_id": ASKED, "gpus_per_node": 1}) as response:
            if response.status >= 400:
                self.screen.print_sentence((await response.json()).get("detail", f"status {response.status}"))

    async def _simulate_day(self) -> dict[str, Any] | None:
        """Simulate a day with and without risk in a separate process, and return the result.

        Returns None if the simulation was interrupted.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fleetcast.cli.main", "simulate", "day", "--seed", str(self.options.seed)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        work = asyncio.ensure_future(process.communicate())
        stopped = asyncio.ensure_future(self.stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            process.terminate()
        output, errors = await work
        if self.stop.is_set():
            return None
        if process.returncode == 0:
            return dict(json.loads(output))
        tail = errors.decode(errors="replace").strip().splitlines()[-3:]
        return {"error": f"ended with {process.returncode}: {' / '.join(tail) or 'it printed nothing'}"}

    def _is_past_received(self) -> bool:
        """Return whether the service has received the fleet's history, its running jobs and its queue.

        The demo waits for this, so that the console shows all of them when it opens.
        """
        path = self.folder / "sim.json"
        return path.exists() and bool(self._read_simulation_status()["live"])

    def _read_simulation_status(self) -> dict[str, Any]:
        """Return the contents of the simulation's status file."""
        return dict(json.loads((self.folder / "sim.json").read_text(encoding="utf-8")))

    def _make_report(self, elapsed_s: float) -> tuple[dict[str, Any], list[str]]:
        import msgspec

        from fleetcast.simulator.faults.truth import read_truth

        truth: list[dict[str, Any]] = msgspec.to_builtins(read_truth(self.folder / "truth.jsonl"))
        simulated = self._read_simulation_status()
        now_ms = int(self._fleet["as_of_ms"])
        ingestion = self._ingestion
        worth = self._worth or {}
        report = {
            "seconds": round(elapsed_s, 1),
            "speed": self.options.speed,
            "nodes": len(self._fleet["nodes"]),
            "gpus": self._fleet["gpus"]["total"],
            "samples": self.totals["samples_total"],
            "bad_records": self.totals[
                "bad_telemetry"
            ],  # at least: what a pipeline counted just before its end is lost
            "bad_records_injected": simulated["bad_records_injected"],
            "pipeline_restarts": self.totals.restarts,
            "ticks": self.totals["ticks"],
            "tick_ms": ingestion["tick_ms"],
            "lag_ms": ingestion["lag_ms"],
            "placements": dict(self.placements),
            "start_times": self._starts or None,
            "faults": judge_faults(truth, self.watch, now_ms),
            "story": self._story,
            "false_nodes": find_false_nodes(truth, self.watch),
            "lost_gpu_hours": {"risk_blind": worth.get("risk_blind"), "ours": worth.get("ours")},
            "worth": worth or None,
        }
        problems = list_problems(report, now_ms)
        self.screen.print_report(report, problems)
        return report, problems


async def _get_json(session: Any, path: str) -> dict[str, Any] | None:
    """Return the JSON of a GET request, or None unless the service answers with status 200."""
    import aiohttp

    try:
        async with session.get(path) as response:
            return dict(await response.json()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None
