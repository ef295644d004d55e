"""The Reporter for a training loop. A call takes microseconds and never raises into the loop."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
from types import TracebackType
from typing import Any
from urllib.request import OpenerDirector

from fleetcast_client.actions import ActionPoller
from fleetcast_client.answers import ActionRow
from fleetcast_client.identity import Identity, identity_of
from fleetcast_client.outbox import Counts, Outbox
from fleetcast_client.transport import check_url, make_opener, send_request

logger = logging.getLogger("fleetcast_client")

PHASES = ("init", "loading", "warmup", "steady", "evaluation", "checkpoint", "cooldown")
PLACED = frozenset({"phase", "step"})  # events that may name the node and GPUs of this rank
PLACE_EVERY = 64  # one in so many of these events names them
POLL_S = 5.0  # between two polls of actions
PARTS = ("compute", "communication", "data", "other")


class Reporter:
    """A reporter of this rank's phases, steps and checkpoints. Use it only from the training thread.

    url: FLEETCAST_URL by default. Without a URL, without a job, or in a fork's child, it sends nothing
    and raises nothing. job, attempt, rank: by default those that `identity_of` finds in the
    environment. token: FLEETCAST_TOKEN by default. ca, verify: as in `Client`. If the file `ca` cannot be
    used, nothing is sent. most_waiting: how many events are stored while the service does not answer.
    Further events are dropped and counted.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        job: str | None = None,
        attempt: int | None = None,
        rank: int | None = None,
        token: str | None = None,
        most_waiting: int = 10_000,
        every_s: float = 1.0,
        ca: str | os.PathLike[str] | None = None,
        verify: bool = True,
    ) -> None:
        self.identity: Identity | None = identity_of(os.environ, job, attempt, rank)
        through = _make_connection(url, token, ca, verify)
        self._outbox = None if through is None else _make_outbox(through, most_waiting, every_s)
        self.enabled = self.identity is not None and self._outbox is not None
        if not self.enabled:
            why = "no job is known (FLEETCAST_JOB)" if self.identity is None else "no URL is known (FLEETCAST_URL)"
            logger.warning("nothing is reported to Fleetcast: %s", why)
        about = self.identity or Identity("", 1, 0, "", 0)
        self._place: dict[str, Any] = {"node": about.node} if about.node else {}
        if about.gpus:
            self._place["gpus"] = about.gpus
        self._actions = None if through is None else ActionPoller(*through, about.job, about.attempt, POLL_S)
        self._placed = 0
        self._job: dict[str, Any] = {"job": about.job, "attempt": about.attempt}
        self.rank = about.rank
        self._sequence = itertools.count(about.first)
        self._step = 0
        self._phase = ""

    def step(
        self,
        step: int | None = None,
        *,
        tokens: int | None = None,
        sequence_length: float | None = None,
        stage: int | None = None,
    ) -> Step:
        """Time a step from the beginning to the end of a block `with report.step(tokens=65536) as step:`.

        A step without a number gets the next one. A step that ends in an exception is not reported.
        """
        if step is not None:
            self._step = step
        self._step += 1
        return Step(self, self._step - 1, tokens, sequence_length, stage)

    def step_took(
        self,
        duration_s: float,
        *,
        step: int | None = None,
        tokens: int | None = None,
        sequence_length: float | None = None,
        stage: int | None = None,
        parts: dict[str, float] | None = None,
    ) -> None:
        """Report a step that you timed yourself.

        parts: seconds of compute, communication, data, other.
        """
        timed = self.step(step, tokens=tokens, sequence_length=sequence_length, stage=stage)
        timed.parts = parts
        timed.took(duration_s)

    def phase(self, name: str) -> Phase:
        """Report the beginning of a phase.

        The phases are init, loading, warmup, steady, evaluation, checkpoint and cooldown. At the end of a block `with
        report.phase("evaluation"):`, the previous phase is reported again.
        """
        before, self._phase = self._phase, name
        self._report_phase(name)
        return Phase(self, before)

    def checkpoint(self, target: str = "", bytes: int | None = None) -> Checkpoint:
        """Report a checkpoint that is written in the context: `with report.checkpoint("s3://…"):`.

        Rank 0 reports it for all ranks.
        """
        return Checkpoint(self, target, bytes)

    def finished(self) -> None:
        """Report that the job has finished successfully, for jobs that no scheduler reports.

        Rank 0 reports it for all ranks.
        """
        if self.rank == 0:
            self.tell("finished", {})

    def preempted(self, action: ActionRow) -> None:
        """Report that the job has ended for an action, for jobs that no scheduler reports. It may start again.

        Rank 0 reports it for all ranks.
        """
        if self.rank == 0:
            self.tell("preempted", {"by": action["payer"]})

    def pending_actions(self) -> list[ActionRow]:
        """Return the actions on this job that wait for a reply, such as a stop at the next checkpoint.

        The first call starts a thread that polls them every five seconds, so no call waits. Call it from rank 0,
        and broadcast the result. The token needs the scope `read` in addition to `events`.
        """
        return self._actions.list_pending() if self.enabled and self._actions is not None else []

    def accept(self, action: ActionRow) -> bool:
        """Reply that the job carries an action out. Returns whether the reply counts.

        It does not if the action has ended or the service does not answer. Waits for the service.
        """
        return self._actions is not None and self._actions.reply(action, "accept", "")

    def refuse(self, action: ActionRow, why: str) -> bool:
        """Reply that the job does not carry an action out. Returns whether the reply counts, as `accept` does."""
        return self._actions is not None and self._actions.reply(action, "refuse", why)

    def accepted_actions(self) -> list[ActionRow]:
        """Return the accepted actions that are not seen yet, for a process that carries them out, as `ElasticJob` does.

        Waits for the service, so do not call it in a training loop. Empty if the service does not answer.
        """
        return self._actions.list_accepted() if self.enabled and self._actions is not None else []

    def counts(self) -> Counts:
        """Return how many events were sent, are waiting, were dropped and were refused."""
        return self._outbox.counts() if self._outbox is not None else Counts()

    def flush(self, limit_s: float = 5.0) -> bool:
        """Wait until all events have been sent, at most `limit_s` seconds. Returns whether all were sent.

        Do not call it in a training loop.
        """
        return self._outbox.flush(limit_s) if self._outbox is not None else True

    def close(self, limit_s: float | None = None) -> None:
        """Send the remaining events, for at most two seconds by default, and then accept no more.

        A process that exits calls this method by itself.
        """
        if self._outbox is not None:
            self._outbox.close(limit_s)
        if self._actions is not None:
            self._actions.close()
        self.enabled = False

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tell(self, type: str, fields: dict[str, Any]) -> None:
        """Queue an event of this job without validating it. The service validates it."""
        if self.enabled and self._outbox is not None:
            now_ms = time.time_ns() // 1_000_000
            event = {"type": type, "sequence": next(self._sequence), "time_ms": now_ms, **self._job, **fields}
            if type in PLACED:
                if self._placed % PLACE_EVERY == 0:
                    event.update(self._place)
                self._placed += 1
            self._outbox.put(event)

    def _report_phase(self, name: str) -> None:
        if name in PHASES:
            self.tell("phase", {"name": name, "rank": self.rank})
        elif name:
            logger.warning("phase %r is not sent: expected one of %s", name, ", ".join(PHASES))


class Step:
    """A step of the training loop that is being timed."""

    __slots__ = ("_began", "_reporter", "parts", "sequence_length", "stage", "step", "tokens")

    def __init__(
        self, reporter: Reporter, step: int, tokens: int | None, sequence_length: float | None, stage: int | None
    ) -> None:
        self._reporter = reporter
        self.step = step
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.stage = stage
        self.parts: dict[str, float] | None = None
        self._began = time.perf_counter()

    def part(self, name: str) -> Part:
        """Time a part of the step: `with step.part("data"):` (compute, communication, data or other)."""
        return Part(self, name)

    def __enter__(self) -> Step:
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.took(time.perf_counter() - self._began)

    def took(self, duration_s: float) -> None:
        """Report the step with its duration in seconds."""
        fields: dict[str, Any] = {"step": self.step, "duration_s": duration_s, "rank": self._reporter.rank}
        if self.tokens is not None:
            fields["tokens"] = self.tokens
        if self.sequence_length is not None:
            fields["sequence_length"] = self.sequence_length
        if self.stage is not None:
            fields["stage"] = self.stage
        if self.parts:
            fields["parts"] = self.parts
        self._reporter.tell("step", fields)


class Part:
    """A part of a step that is being timed. A part with an unknown name counts as other."""

    __slots__ = ("_began", "_name", "_step")

    def __init__(self, step: Step, name: str) -> None:
        self._step = step
        self._name = name if name in PARTS else "other"
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        parts = self._step.parts
        if parts is None:
            parts = self._step.parts = {}
        parts[self._name] = parts.get(self._name, 0.0) + time.perf_counter() - self._began


class Phase:
    """A phase that ends with its context. The previous phase is then reported again."""

    __slots__ = ("_before", "_reporter")

    def __init__(self, reporter: Reporter, before: str) -> None:
        self._reporter = reporter
        self._before = before

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reporter.phase(self._before)


class Checkpoint:
    """A checkpoint that is being written. If it fails, its end is not reported."""

    __slots__ = ("_bytes", "_reporter", "_target")

    def __init__(self, reporter: Reporter, target: str, bytes: int | None) -> None:
        self._reporter = reporter
        self._target = target
        self._bytes = bytes

    def __enter__(self) -> None:
        self._report_edge("begin")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._report_edge("end")

    def _report_edge(self, edge: str) -> None:
        if self._reporter.rank != 0:
            return
        fields: dict[str, Any] = {"edge": edge}
        if self._target:
            fields["target"] = self._target
        if self._bytes is not None:
            fields["bytes"] = self._bytes
        self._reporter.tell("checkpoint", fields)


_Connection = tuple[OpenerDirector, str, str]  # the opener of requests, the service's URL, and the token


def _make_connection(
    url: str | None, token: str | None, ca: str | os.PathLike[str] | None, verify: bool
) -> _Connection | None:
    """Return the connection to the service, or None without a valid URL and authorities."""
    stated = url or os.environ.get("FLEETCAST_URL", "")
    if not stated:
        return None
    try:
        base, through = check_url(stated), make_opener(ca, verify)
    except ValueError as error:
        logger.warning("%s", error)
        return None
    return through, base, os.environ.get("FLEETCAST_TOKEN", "") if token is None else token


def _make_outbox(connection: _Connection, most: int, every_s: float) -> Outbox:
    """Make the outbox for events."""
    through, base, secret = connection
    send = functools.partial(_post_report, through, f"{base}/v1/events", secret)
    return Outbox(send, most=max(1, most), every_s=max(0.01, every_s))


def _post_report(through: OpenerDirector, url: str, token: str, body: bytes) -> Any:
    return send_request(through, "POST", url, body, token, 10.0)
