"""Fingerprints beside a running pipeline: a few jobs a pass, the ones that were looked at longest ago first.

    loop   copies what the rings hold of these jobs      thread   periods, phases, use      loop   publish

A pass copies at most MOST_JOBS jobs and works on them for BUDGET_WALL_S at most; the rest is next. Load peaks are
summed over all jobs that were looked at. What was seen of evaluations is kept here and begins anew with the process.
A job whose readings or steps break the arithmetic is unknown, and says why; the others go on.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from features.job_window import window_of
from fleet.clock import Clock
from fleet.jobs import JobAttempt
from fleet.topology import Topology
from models.spikes import Domain, Load, spikes
from service.board import Section
from service.fingerprint_answers import Seen, evaluations_in, fingerprint_of, utilisation_of
from service.job_loads import load_of, rail_capacity, shares_of
from service.publish import encode
from service.state import FleetState
from service.thread_work import in_thread

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
SHORTEST_PAUSE_WALL_S = 0.5
MOST_JOBS = 10
MOST_GPUS = 4000  # readings of so many GPUs are copied a pass
BUDGET_WALL_S = 0.25
EVALUATIONS_KEPT = 17
ODD = "odd_fingerprint"
ODD_ERRORS = (ValueError, IndexError, ZeroDivisionError, FloatingPointError, OverflowError)

Attempt = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one job: its fingerprint, its use of GPUs, and the load that it is to others."""

    fingerprint: dict[str, Any]
    use: dict[str, Any]
    load: Load


class Fingerprints:
    """`sections`: for the board, of the jobs that were looked at so far."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answers: dict[Attempt, Answers] = {}  # the one that was looked at longest ago first
        self._evaluations: dict[Attempt, set[int]] = {}
        self._odd: dict[Attempt, str] = {}  # of what runs: why nothing could be made of it
        self.sections = self._encoded([], clock.now_ms())

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
        topology = state.topology
        before = set(self._odd)
        self.sections = await in_thread(lambda: self._answer(seen, topology, now_ms))
        for job, attempt in self._odd.keys() - before:
            why = self._odd[job, attempt]
            logger.warning("job %s, attempt %d has no fingerprint: %s", job, attempt, why)
            state.counts.bad[ODD] += 1

    def _forget(self, running: Mapping[Attempt, JobAttempt]) -> None:
        """What runs no more, and take in evaluations of what does."""
        self._answers = {key: row for key, row in self._answers.items() if key in running}
        self._odd = {key: why for key, why in self._odd.items() if key in running}
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

    def _answer(self, seen: Sequence[Seen], topology: Topology, now_ms: int) -> list[Section]:
        """Answers of the first of `seen`, as many as the budget allows, at least one; then what all of them come to."""
        began = time.monotonic()
        rows = {name: row for row, name in enumerate(topology.names)} if seen else {}
        for one in seen:
            key = one.attempt.job, one.attempt.attempt
            shares = shares_of(one.attempt, topology, rows)
            try:
                answers = _answers_of(one, shares)
            except ODD_ERRORS as error:
                self._odd[key] = f"its readings or steps cannot be used ({error})"
                answers = _unknown(one, shares, self._odd[key])
            self._answers.pop(key, None)
            self._answers[key] = answers
            if time.monotonic() - began > BUDGET_WALL_S:
                break
        loads = [answers.load for answers in self._answers.values()]
        rng = np.random.default_rng(now_ms)
        return self._encoded(spikes(loads, now_ms, rail_capacity(topology) if loads else {}, rng), now_ms)

    def _encoded(self, spikes: list[dict[str, Any]], now_ms: int) -> list[Section]:
        documents = {
            "doc.fingerprints": {job: answers.fingerprint for (job, _), answers in self._answers.items()},
            "doc.utilisation": [answers.use for answers in self._answers.values()],
            "doc.spikes": spikes,
        }
        return [Section(name, encode(body), now_ms) for name, body in documents.items()]


def _answers_of(seen: Seen, shares: Mapping[Domain, float]) -> Answers:
    """Raises ODD_ERRORS where the job's numbers break the arithmetic."""
    load = load_of(seen.attempt, seen.window, shares, seen.now_ms)
    return Answers(fingerprint_of(seen), utilisation_of(seen), load)


def _unknown(seen: Seen, shares: Mapping[Domain, float], why: str) -> Answers:
    """Of a job of which only its submission and its place are believed."""
    row = seen.attempt
    bare = JobAttempt(row.job, row.attempt, submission=row.submission, ranks=row.ranks, nodes=row.nodes)
    answers = _answers_of(replace(seen, attempt=bare, window=None, evaluations=()), shares)
    return replace(answers, fingerprint={**answers.fingerprint, "period_reason": why})
