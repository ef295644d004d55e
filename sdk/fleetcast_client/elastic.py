"""ElasticJob: the agents of an elastic job, such as torchrun's, one for each gang member.

For a job that no scheduler runs. Its training loop writes a checkpoint and accepts an action. Only then does the
`ElasticJob` stop and start agents, so no rank loses work that the action has not announced.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetcast_client.answers import ActionRow, Rank
from fleetcast_client.reporter import Reporter

logger = logging.getLogger("fleetcast_client")

FLUSH_S = 60.0  # for the last event: without it, the service waits for half an hour
EVERY_S = 1.0  # between two polls of the agents and of the accepted actions
END_S = 15.0  # for agents to end by themselves after an accepted stop
STOP_S = 45.0  # an agent of torchrun gives its workers 30 s
SUBMITTED, STARTED, RESIZED, ENDED = 1, 3, 16, 1 << 20  # sequence numbers of a scheduler's events
RESIZING = frozenset({"shrink", "grow", "replace", "move"})

Start = Callable[[Rank, Mapping[str, str]], "subprocess.Popen[Any]"]


@dataclass
class Member:
    """A gang member, and the process of its agent."""

    place: Rank
    process: subprocess.Popen[Any]

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Stop the agent by SIGTERM, and after `STOP_S` by SIGKILL."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ElasticJob:
    """One attempt of an elastic job whose agents this process starts and stops.

    report: the reporter of the job and attempt. places: the members' places, such as the `ranks` of a decision.
    start: starts a member's agent with these environment variables, and returns its process. SIGTERM to the
    process must end the agent. request: the fields of the job's `submitted` event, such as queue, gang and class.
    """

    def __init__(self, report: Reporter, places: Sequence[Rank], start: Start, request: Mapping[str, Any]) -> None:
        if report.identity is None:
            raise ValueError("the Reporter knows no job: state one, as in Reporter(job=…)")
        self._job, self._attempt = report.identity.job, report.identity.attempt
        self._report, self._start, self._request = report, start, request
        self._places = list(places)
        self._members: list[Member] = []
        self._done: set[str] = set()  # ids of the actions that were carried out
        self._resized = 0
        self._payer: str | None = None  # the request that an accepted stop is for
        self._end_s = float("inf")  # monotonic: when all agents are stopped

    def run(self) -> str:
        """Run the job to its end. Returns "finished", "preempted" or "failed", which it also reports.

        It failed if any of the agents that were not stopped ended with an error. No agent runs after
        this method returns or raises.
        """
        self._queue_event("submitted", SUBMITTED, dict(self._request))
        self._queue_event("started", STARTED, {"ranks": self._places})
        try:
            self._members = [self._start_member(place) for place in self._places]
            while time.monotonic() < self._end_s and any(member.is_running for member in self._members):
                self._accept_for_lost_members()
                for action in self._report.accepted_actions():
                    self._carry_out(action)
                time.sleep(EVERY_S)
            for action in self._report.accepted_actions():
                self._carry_out(action)
        finally:
            for member in self._members:
                if member.is_running:
                    member.stop()
        outcome = self._report_end()
        self._report.flush(FLUSH_S)
        return outcome

    def _report_end(self) -> str:
        failed = [member for member in self._members if member.process.returncode]
        if self._payer is not None:
            self._queue_event("preempted", ENDED, {"by": self._payer})
            return "preempted"
        if failed:
            codes = ", ".join(f"{member.place['node']}: {member.process.returncode}" for member in failed)
            self._queue_event("failed", ENDED, {"category": "unknown", "message": f"exit status by node: {codes}"})
            return "failed"
        self._queue_event("finished", ENDED, {})
        return "finished"

    def _accept_for_lost_members(self) -> None:
        """Accept a replacement if no member that leaves has an agent: it cannot write a checkpoint."""
        for action in self._report.pending_actions():
            leaving = self._find_members(action["ranks"])
            if action["kind"] == "replace" and leaving and not any(member.is_running for member in leaving):
                self._report.accept(action)

    def _carry_out(self, action: ActionRow) -> None:
        if action["action_id"] in self._done:
            return
        self._done.add(action["action_id"])
        if action["kind"] == "preempt":
            self._payer, self._end_s = action["payer"], time.monotonic() + END_S
        elif action["kind"] in RESIZING:
            self._resize(action)

    def _resize(self, action: ActionRow) -> None:
        """Stop the agents that leave, then start those that join: torchrun admits no more than its maximum."""
        logger.info("action %s: %s", action["action_id"], action["sentence"])
        for member in self._find_members(action["ranks"]):
            self._members.remove(member)
            member.stop()
        try:
            for place in action["places"]:
                self._members.append(self._start_member(place))
        except OSError as error:
            self._report.refuse(action, f"an agent cannot start: {error}"[:1000])
        for rank, member in enumerate(self._members):
            member.place["rank"] = rank
        self._queue_event("resized", RESIZED + self._resized, {"ranks": [member.place for member in self._members]})
        self._resized += 1

    def _find_members(self, ranks: Iterable[Rank]) -> list[Member]:
        """Return the members that hold a GPU of these ranks. A rank's number may change, its GPUs do not."""
        gpus = {(rank["node"], gpu) for rank in ranks for gpu in rank["gpus"]}
        return [row for row in self._members if any((row.place["node"], gpu) in gpus for gpu in row.place["gpus"])]

    def _start_member(self, place: Rank) -> Member:
        variables = {
            "FLEETCAST_JOB": self._job,
            "FLEETCAST_ATTEMPT": str(self._attempt),
            "FLEETCAST_NODE": place["node"],
        }
        own = place.copy()
        return Member(own, self._start(own, variables))

    def _queue_event(self, type: str, sequence: int, fields: dict[str, Any]) -> None:
        self._report.tell(type, {"sequence": sequence, **fields})
