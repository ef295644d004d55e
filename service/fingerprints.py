"""Fingerprints beside a running pipeline: a few jobs a pass, the ones that were looked at longest ago first.

    loop   copies what the rings hold of these jobs      thread   periods, phases, use      loop   publish

A pass copies at most MOST_JOBS jobs and works on them for BUDGET_WALL_S at most; the rest is next. What was seen of
evaluations is kept here and begins anew with the process.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from features.job_window import window_of
from fleet.clock import Clock
from fleet.jobs import JobAttempt
from service.board import Section
from service.fingerprint_answers import Seen, evaluations_in, fingerprint_of, utilisation_of
from service.publish import encode
from service.state import FleetState
from service.thread_work import in_thread

PERIOD_S = 15.0
SHORTEST_PAUSE_WALL_S = 0.5
MOST_JOBS = 40
MOST_GPUS = 20_000  # readings of so many GPUs are copied a pass
BUDGET_WALL_S = 0.25
EVALUATIONS_KEPT = 17

Attempt = tuple[str, int]
Answers = tuple[dict[str, Any], dict[str, Any]]


class Fingerprints:
    """`sections`: for the board, of the jobs that were looked at so far."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answers: dict[Attempt, Answers] = {}  # the one that was looked at longest ago first
        self._evaluations: dict[Attempt, set[int]] = {}
        self.sections: list[Section] = []
        self._publish(clock.now_ms())

    async def look_forever(self, state: FleetState) -> None:
        while True:
            await self.look(state)
            await asyncio.sleep(max(SHORTEST_PAUSE_WALL_S, self._clock.wall_s(PERIOD_S)))

    async def look(self, state: FleetState) -> None:
        """One pass."""
        now_ms = self._clock.now_ms()
        running = {(row.job, row.attempt): row for row in state.jobs.running()}
        self._forget(running)
        models = {node.name: node.gpu_model for node in state.topology.nodes} if running else {}
        seen = [self._see(state, row, models, now_ms) for row in self._due(running)]
        made = await in_thread(lambda: _answered(seen))
        for one, answers in zip(seen, made, strict=False):
            key = (one.attempt.job, one.attempt.attempt)
            self._answers.pop(key, None)
            self._answers[key] = answers
        self._publish(now_ms)

    def _forget(self, running: Mapping[Attempt, JobAttempt]) -> None:
        """What runs no more, and take in evaluations of what does."""
        self._answers = {key: row for key, row in self._answers.items() if key in running}
        kept = {}
        for key, row in running.items():
            told = self._evaluations.get(key, set()) | evaluations_in(row)
            if told:
                kept[key] = set(sorted(told)[-EVALUATIONS_KEPT:])
        self._evaluations = kept

    def _due(self, running: Mapping[Attempt, JobAttempt]) -> list[JobAttempt]:
        """New ones first."""
        keys = [key for key in running if key not in self._answers] + list(self._answers)
        due: list[JobAttempt] = []
        gpus = 0
        for key in keys[:MOST_JOBS]:
            gpus += running[key].gpus
            if due and gpus > MOST_GPUS:
                break
            due.append(running[key])
        return due

    def _see(self, state: FleetState, row: JobAttempt, models: Mapping[str, str], now_ms: int) -> Seen:
        evaluations = tuple(sorted(self._evaluations.get((row.job, row.attempt), ())))
        model = models.get(row.hosts[0], "") if row.hosts else ""
        return Seen(row.copy(), window_of(state.store, row), evaluations, model, now_ms)

    def _publish(self, now_ms: int) -> None:
        fingerprints = {job: answers[0] for (job, _), answers in self._answers.items()}
        use = [answers[1] for answers in self._answers.values()]
        documents = {"doc.fingerprints": fingerprints, "doc.utilisation": use}
        self.sections = [Section(name, encode(body), now_ms) for name, body in documents.items()]


def _answered(seen: Sequence[Seen]) -> list[Answers]:
    """The answers of the first ones, as many as the budget allows; at least one."""
    began, made = time.monotonic(), []
    for one in seen:
        made.append((fingerprint_of(one), utilisation_of(one)))
        if time.monotonic() - began > BUDGET_WALL_S:
            break
    return made
