"""Witnesses: evidence that separates a GPU that failed from one that an exporter no longer lists.

Absence is not failure: exporters drop idle GPUs, restart and answer in part. A vanished GPU is a
hard failure only if other evidence, a witness, confirms it:

    an XID that asks for a reset or a part, from its gauge or from a kernel log
    a failed health check of the GPU
    a job that held it and ended by a hardware failure, or that has stopped: its steps are overdue or its
    GPUs wait

Without a witness, the node has the signal `exporter_partial`, whose only action is `watch`. A confirmed
GPU stays confirmed until it is listed again, although the evidence of a witness expires earlier.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.risk.detectors import register_reporter
from fleetcast.models.risk.rules import GPU, ROW, RULES
from fleetcast.models.risk.signals import Signal, Signals
from fleetcast.models.stragglers.gang import GangColumns, GangMembers
from fleetcast.models.stragglers.steps import PAUSES

VANISHED = ROW["gpu_vanished"]
XIDS = np.isin(np.arange(len(RULES)), [ROW[name] for name in ("xid_hard", "xid_part", "xid_reported")])
HEALTH = ROW["health_failed"]
SOFT_OF_GPU = np.array([rule.kind is GPU and not rule.hard for rule in RULES])
BEFORE_MS = 600_000  # a job may end so long before the first page without its GPU
WAITING_SHARE, WAITING_W = 0.35, 200.0  # of the power limit, or W where that is unknown: a GPU that only waits
STEPS, OVERDUE_STEPS, OVERDUE_S = 4, 5, 60.0
_ABOUT_GPUS = re.compile(r"gpu|nvidia|nvlink|dcgm|xid|driver", re.IGNORECASE)


class Witnesses:
    """The vanished GPUs whose failure other evidence has confirmed."""

    def __init__(self) -> None:
        self._confirmed: set[str] = set()

    @register_reporter("exporter_partial")
    def confirm_vanished_gpus(
        self,
        signals: Signals,
        names: Sequence[str],
        gangs: GangMembers,
        gpu: GangColumns,
        ended: Sequence[JobAttempt],
        now_ms: int,
    ) -> Signals:
        """Return the signals. A vanished GPU keeps its signal only if other evidence confirms its failure.

        The signals of the unconfirmed GPUs of a node become one signal of its exporter. All other signals stay, except
        soft signals of confirmed GPUs.
        """
        gone = np.flatnonzero(signals.rule == VANISHED)
        if not len(gone):
            self._confirmed.clear()
            return signals
        said = self._find_reported_failures(signals) | _find_stopped_gpus(gangs, gpu, now_ms)
        failed = _find_failure_times(ended)
        unseen: dict[int, list[int]] = {}
        confirmed = set()
        for at in gone.tolist():
            entity, node = signals.entity[at], int(signals.node[at])
            since_ms = int(signals.since_ms[at])
            by_job = failed.get(entity, failed.get(names[node], -1)) >= since_ms - BEFORE_MS
            if entity in self._confirmed or entity in said or names[node] in said or by_job:
                confirmed.add(entity)
            else:
                unseen.setdefault(node, []).append(at)
        self._confirmed = confirmed
        keep = ~np.isin(np.arange(len(signals)), [at for rows in unseen.values() for at in rows])
        of_confirmed = np.array([entity in confirmed for entity in signals.entity], bool)
        remaining = signals.select_rows(keep & ~(SOFT_OF_GPU[signals.rule] & of_confirmed))
        totals = np.bincount(gpu.node[gpu.node >= 0], minlength=len(names)).tolist()
        partial = [
            _make_exporter_signal(signals, names[node], node, rows, totals[node]) for node, rows in unseen.items()
        ]
        return Signals.concat([remaining, Signals.from_signals(partial)]) if partial else remaining

    def _find_reported_failures(self, signals: Signals) -> set[str]:
        """Return the GPUs that an XID or a health check reports as failed.

        A report that names no GPU adds the name of its node.
        """
        found = {signals.entity[at] for at in np.flatnonzero(XIDS[signals.rule]).tolist()}
        for at in np.flatnonzero(signals.rule == HEALTH).tolist():
            words = signals.words[at] if signals.words else ""
            if "/" in signals.entity[at] or _ABOUT_GPUS.search(words):
                found.add(signals.entity[at])
        return found

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy of the state for a snapshot."""
        return {"confirmed": sorted(self._confirmed)}, {}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Fill an empty object with the state that `dump` returned."""
        self._confirmed = set(about["confirmed"])

    def shift_times(self, by_ms: int) -> None:
        """Do nothing, because this state has no times."""


def _make_exporter_signal(signals: Signals, name: str, node: int, rows: list[int], total: int) -> Signal:
    since_ms = min(int(signals.since_ms[at]) for at in rows)
    seen_ms = max(int(signals.seen_ms[at]) for at in rows)
    firm = bool(signals.firm[rows].any())
    return Signal("exporter_partial", node, name, len(rows), total, 0.5, since_ms, seen_ms, firm)


def _find_failure_times(ended: Sequence[JobAttempt]) -> dict[str, int]:
    """Return GPU → when a job on it ended by a hardware failure, in Unix ms.

    If a job names no GPUs, the keys are its nodes.
    """
    found: dict[str, int] = {}
    for attempt in ended:
        failure = attempt.failure
        if failure is None or failure.category != "hardware" or attempt.over_ms is None:
            continue
        entities = [f"{rank.node}/{gpu}" for rank in attempt.ranks for gpu in rank.gpus] or list(attempt.nodes)
        for entity in entities:
            if not failure.node or entity.partition("/")[0] == failure.node:
                found[entity] = max(found.get(entity, 0), attempt.over_ms)
    return found


def _find_stopped_gpus(gangs: GangMembers, gpu: GangColumns, now_ms: int) -> set[str]:
    """Return the GPUs of running jobs that have stopped.

    A job has stopped if its steps are overdue, or if at least half of its loaded GPUs only wait.
    """
    if not len(gangs.attempts):
        return set()
    power, limit = gpu.last["power_w"], gpu.last["power_limit_w"]
    loaded = np.isfinite(gpu.last["sm_clock_mhz"]) & (gangs.of_gpu >= 0)
    waits = loaded & (power < np.where(np.isfinite(limit), WAITING_SHARE * limit, WAITING_W))
    of = np.where(gangs.of_gpu >= 0, gangs.of_gpu, 0)
    waiting = np.bincount(of[waits], minlength=len(gangs.attempts))
    working = np.bincount(of[loaded], minlength=len(gangs.attempts))
    overdue = np.array([_is_overdue(attempt, now_ms) for attempt in gangs.attempts], bool)
    stopped = overdue | ((waiting > 0) & (2 * waiting >= working))
    return {gpu.names[row] for row in np.flatnonzero((gangs.of_gpu >= 0) & stopped[of]).tolist()}


def _is_overdue(attempt: JobAttempt, now_ms: int) -> bool:
    """Return whether no step has arrived for several times the usual step time."""
    steps = attempt.steps[-STEPS:]
    if len(steps) < STEPS or attempt.phase in PAUSES:
        return False
    usual_s = float(np.median([step.duration_s for step in steps]))
    return now_ms - steps[-1].time_ms > 1000 * max(OVERDUE_S, OVERDUE_STEPS * usual_s)
