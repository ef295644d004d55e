"""The outbox: a bounded queue of events that a thread sends in batches.

`put` neither waits nor raises. Events that do not fit are dropped and counted. A batch is sent again with the
same events until the service accepts it, so the identities of the events stay the same. Events that the service
refuses are dropped. A fork's child has no thread, and its outbox accepts no events.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fleetcast_client.errors import ApiError, FleetcastError

logger = logging.getLogger("fleetcast_client")

BATCH = 500
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})

Event = dict[str, Any]
Send = Callable[[bytes], Any]


@dataclass(frozen=True)
class Counts:
    """Counts of events, by what happened to them.

    The service accepted `sent` events and refused `refused` events. `waiting` events are in the queue, and
    `dropped` events did not fit into it. `failures`: the number of failed requests that were retried.
    """

    sent: int = 0
    waiting: int = 0
    dropped: int = 0
    refused: int = 0
    failures: int = 0


class Outbox:
    """A queue of events that a thread sends.

    `send` posts a JSON array and returns the service's answer. It may raise FleetcastError.
    """

    def __init__(self, send: Send, *, most: int = 10_000, every_s: float = 1.0, exit_s: float = 2.0) -> None:
        self._send = send
        self._most = most
        self._every_s = every_s
        self._exit_s = exit_s
        self._waiting: deque[Event] = deque()
        self._batch: list[Event] = []  # on its way
        self._counts = Counts()
        self._dropped = 0
        self._reported: set[str] = set()
        self._closing = False
        self._hurry = threading.Event()
        self._empty = threading.Event()
        self._thread: threading.Thread | None = None
        self._open = True
        _opened.add(self)

    def put(self, event: Event) -> None:
        """Queue one event, or drop it if the queue is full."""
        if not self._open:
            return
        if len(self._waiting) >= self._most:
            self._dropped += 1
            return
        self._waiting.append(event)
        if self._thread is None:
            self._start_thread()

    def counts(self) -> Counts:
        waiting = len(self._waiting) + len(self._batch)
        return replace(self._counts, waiting=waiting, dropped=self._dropped)

    def flush(self, limit_s: float) -> bool:
        """Wait until all events have been sent, at most `limit_s` seconds. Returns whether all were sent."""
        deadline = time.monotonic() + limit_s
        while self._open and self._thread is not None and (self._waiting or self._batch):
            self._empty.clear()
            self._hurry.set()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._thread.is_alive():
                return False
            self._empty.wait(min(left_s, 0.05))
        return not (self._waiting or self._batch)

    def close(self, limit_s: float | None = None) -> None:
        """Send the remaining events for at most `limit_s` seconds, then accept no more. May be called twice."""
        if not self._open:
            return
        self.flush(self._exit_s if limit_s is None else limit_s)
        self._open, self._closing = False, True
        self._hurry.set()
        counts = self.counts()
        if counts.dropped or counts.refused or counts.waiting:
            logger.warning(
                "events of this process: %d sent, %d did not fit into the queue, %d refused, %d given up",
                *(counts.sent, counts.dropped, counts.refused, counts.waiting),
            )

    def clear_in_child(self) -> None:
        """Clear the outbox in a fork's child, because the events belong to the parent."""
        self._open, self._thread = False, None
        self._waiting, self._batch = deque(), []

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._send_until_closed, name="fleetcast-client", daemon=True)
        self._thread.start()

    def _send_until_closed(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing:
            self._hurry.wait(self._every_s)
            self._hurry.clear()
            while (self._batch or self._waiting) and not self._closing:
                if self._send_batch():
                    pause_s = FIRST_PAUSE_S
                    continue
                self._hurry.wait(pause_s * random.uniform(0.7, 1.3))
                self._hurry.clear()
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            self._empty.set()

    def _send_batch(self) -> bool:
        """Send the next batch. Returns True if it was accepted or refused, and False if it must be sent again."""
        while self._waiting and len(self._batch) < BATCH:
            self._batch.append(self._waiting.popleft())
        try:
            answer = self._send(json.dumps(self._batch, separators=(",", ":")).encode())
        except ApiError as error:
            if error.status in AGAIN:
                return self._report_failure(str(error))
            self._count_refused(len(self._batch), str(error))
        except FleetcastError as error:
            return self._report_failure(str(error))
        except (TypeError, ValueError) as error:  # an event that JSON cannot hold
            self._count_refused(len(self._batch), str(error))
        else:
            self._count_answer(answer)
        self._batch = []
        return True

    def _count_answer(self, answer: Any) -> None:
        refusals = answer.get("rejected") if isinstance(answer, dict) else None
        rejected: list[Any] = refusals if isinstance(refusals, list) else []
        self._counts = replace(self._counts, sent=self._counts.sent + len(self._batch) - len(rejected))
        if rejected:
            self._count_refused(len(rejected), str(rejected[0]))

    def _count_refused(self, count: int, why: str) -> None:
        self._counts = replace(self._counts, refused=self._counts.refused + count)
        self._warn_once(
            f"refused: {why[:300]}", "Fleetcast refused %d events, which are given up: %s", count, why[:300]
        )

    def _report_failure(self, why: str) -> bool:
        self._counts = replace(self._counts, failures=self._counts.failures + 1)
        self._warn_once("failed", "events wait: %s; trying again, at most %d are stored", why[:300], self._most)
        return False

    def _warn_once(self, once: str, text: str, *values: object) -> None:
        """Log a warning once for each kind of failure."""
        if once not in self._reported and len(self._reported) < 20:
            self._reported.add(once)
            logger.warning(text, *values)


_opened: weakref.WeakSet[Outbox] = weakref.WeakSet()


def _clear_after_fork() -> None:
    for outbox in list(_opened):
        outbox.clear_in_child()


def _close_all_outboxes() -> None:
    """Close all outboxes at the same time, so that closing many is as quick as closing one."""
    threads = [threading.Thread(target=outbox.close, daemon=True) for outbox in list(_opened)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_clear_after_fork)
atexit.register(_close_all_outboxes)
