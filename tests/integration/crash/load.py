"""What a site sends while its service is killed: jobs, placements, node events, and readers; all with retries.

Every client asks again, with the same identity, until it has an answer. What was answered is in the diary, in order.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetcast.fleet.clock import ScaledClock

AGAIN_S = 0.05
PATIENCE_S = 300.0  # a client that gets no answer for so long fails the test
AWAY = frozenset({0, 503})


@dataclass(frozen=True, slots=True)
class Entry:
    """One acknowledged request: kind place, queue, cancel or events; `body` as it was sent."""

    at_ms: int
    kind: str
    body: Any


@dataclass(slots=True)
class Diary:
    """What was acknowledged, and what clients saw. `released_ms`: when GPUs could be free at the soonest."""

    entries: list[Entry] = field(default_factory=list)
    replies: dict[str, bytes] = field(default_factory=dict)  # request_id -> the final decision's bytes
    released_ms: dict[str, int] = field(default_factory=dict)  # request_id -> fleet time
    troubles: list[str] = field(default_factory=list)

    def in_order(self) -> list[Entry]:
        """By time, and each client's as it sent them."""
        return sorted(self.entries, key=lambda entry: entry.at_ms)


class Door:
    """The API as a client sees it: a connection a request."""

    def __init__(self, port: int, diary: Diary) -> None:
        self.port = port
        self.diary = diary

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes, Mapping[str, str]]:
        """Status, body, headers; status 0 when nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, response.read(), headers
        except (OSError, http.client.HTTPException):
            return 0, b"", {}
        finally:
            connection.close()

    def until(self, method: str, path: str, body: Any = None, *, done: Callable[[int, bytes], bool]) -> bytes:
        """Ask until `done`; what is neither that, nor away, nor not there yet, is trouble."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            status, answer, _ = self.ask(method, path, body)
            if done(status, answer):
                return answer
            if status not in AWAY and not (method == "GET" and status in (200, 404)):
                break
            time.sleep(AGAIN_S)
        trouble = f"{method} {path} {json.dumps(body)[:300]}: {status} {answer[:300]!r}"
        self.diary.troubles.append(trouble)
        raise AssertionError(trouble)


def answered(*statuses: int) -> Callable[[int, bytes], bool]:
    return lambda status, _: status in statuses


def says(key: str, *values: str) -> Callable[[int, bytes], bool]:
    return lambda status, answer: status == 200 and json.loads(answer)[key] in values


class Client(threading.Thread):
    """A thread that does something until it is told to stop; what it dies of is trouble."""

    def __init__(self, name: str, door: Door, clock: ScaledClock, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self.door = door
        self.diary = door.diary
        self.clock = clock
        self.rng = random.Random(f"{seed} {name}")
        self.ending = threading.Event()
        self.rounds = 0

    def run(self) -> None:
        try:
            while not self.ending.is_set():
                self.once(self.rounds)
                self.rounds += 1
        except Exception as error:
            self.diary.troubles.append(f"{self.name}: {error!r}")

    def once(self, number: int) -> None:
        raise NotImplementedError

    def note(self, kind: str, body: Any) -> None:
        self.diary.entries.append(Entry(self.clock.now_ms(), kind, body))

    def post(self, events: list[dict[str, Any]]) -> None:
        """Events, all of them taken in or known, before this returns."""
        answer = json.loads(self.door.until("POST", "/v1/events", events, done=answered(202)))
        if answer["accepted"] + answer["duplicates"] != len(events) or answer["rejected"]:
            self.diary.troubles.append(f"{len(events)} events: {answer}")
        self.note("events", events)
        if self.rng.random() < 0.1:  # as a client does whose answer got lost
            self.door.until("POST", "/v1/events", events, done=answered(202))


class User(Client):
    """One job after the other: placed or queued, started where it was told, finished; some are cancelled."""

    def once(self, number: int) -> None:
        request_id = f"{self.name}-{number}"
        request = {
            "request_id": request_id,
            "job": f"job-{request_id}",
            "user": self.name,
            "gang": self.rng.choice((1, 2)),
            "gpus_per_node": self.rng.choice((1, 2, 4, 8)),
            "gpu_model": "H100",
        }
        decision = self._queue(request) if self.rng.random() < 0.4 else self._place(request)
        if self.rng.random() < 0.15:
            self.diary.released_ms[request_id] = self.clock.now_ms()
            self.door.until("DELETE", f"/v1/placements/{request_id}", done=answered(200))
            self.note("cancel", request_id)
        else:
            self._live(request, decision)

    def _place(self, request: dict[str, Any]) -> dict[str, Any]:
        reply = self.door.until("POST", "/v1/placements", request, done=answered(200))
        return self._decided("place", request, reply)

    def _queue(self, request: dict[str, Any]) -> dict[str, Any]:
        self.door.until("POST", "/v1/queue", request, done=answered(202))
        path = f"/v1/placements/{request['request_id']}"
        return self._decided("queue", request, self.door.until("GET", path, done=says("outcome", "placed")))

    def _decided(self, kind: str, request: dict[str, Any], reply: bytes) -> dict[str, Any]:
        """Note the reply, and see that a retry gets the same bytes."""
        self.note(kind, request)
        self.diary.replies[request["request_id"]] = reply
        if self.rng.random() < 0.3:
            again = self.door.until("POST", "/v1/placements", request, done=answered(200))
            if again != reply:
                self.diary.troubles.append(f"a retry got {again!r}, at first it was {reply!r}")
        decision: dict[str, Any] = json.loads(reply)
        if decision["outcome"] != "placed":
            self.diary.troubles.append(f"there was room, and yet: {decision['sentence']}")
        return decision

    def _live(self, request: dict[str, Any], decision: dict[str, Any]) -> None:
        job, now_ms = request["job"], self.clock.now_ms()
        event = {"job": job, "time_ms": now_ms}
        shape = {"gang": request["gang"], "gpus_per_node": request["gpus_per_node"], "queue": self.name}
        self.post([{**event, "sequence": 0, "type": "submitted", **shape}])
        self.post([{**event, "sequence": 1, "type": "started", "ranks": decision["ranks"]}])
        steps = [{**event, "sequence": 2 + n, "type": "step", "step": n, "duration_s": 1.5} for n in range(5)]
        self.post(steps)
        if self.rng.random() < 0.5:
            self.door.until("GET", f"/v1/jobs/{job}", done=says("state", "running"))
        self.diary.released_ms[request["request_id"]] = self.clock.now_ms()
        self.post([{**event, "sequence": 7, "time_ms": self.clock.now_ms(), "type": "finished"}])
        self.door.until("GET", f"/v1/jobs/{job}", done=says("state", "finished", "ended"))


class Reporter(Client):
    """A stream of step events of one long job, and node events, in batches out of order."""

    BATCH = 20

    def once(self, number: int) -> None:
        now_ms = self.clock.now_ms()
        first = number * self.BATCH
        event = {"job": self.name, "time_ms": now_ms}
        batch = [
            {**event, "sequence": first + n, "type": "step", "step": first + n, "duration_s": 2.0 + n / 100}
            for n in range(self.BATCH)
        ]
        if number == 0:
            batch[0] = {**event, "sequence": 0, "type": "submitted", "gang": 2, "gpus_per_node": 2}
            batch[1] = {**event, "sequence": 1, "type": "started", "nodes": ["p1", "p2"]}
        self.rng.shuffle(batch)
        kind = self.rng.choice(("drain", "undrain", "xid", "health"))
        node = {"node": self.rng.choice(("p1", "p2")), "source": self.name, "sequence": number, "time_ms": now_ms}
        self.post([*batch, {**node, "type": kind, "code": 31 if kind == "xid" else None, "message": f"{number}"}])
        self.ending.wait(self.rng.uniform(0.0, 0.1))

    def finish(self) -> None:
        """The last event, and its sight on the board: all before it are folded then."""
        now_ms = self.clock.now_ms()
        last = {"job": self.name, "sequence": self.rounds * self.BATCH, "time_ms": now_ms, "type": "finished"}
        self.post([last])
        self.door.until("GET", f"/v1/jobs/{self.name}", done=says("state", "finished", "ended"))


class Reader(Client):
    """Looks at a node all the time: an answer is a whole board's, never an older one, and its age is true."""

    def __init__(self, name: str, door: Door, clock: ScaledClock, seed: int) -> None:
        super().__init__(name, door, clock, seed)
        self.answers = 0
        self.oldest_s = 0
        self._as_of_ms = 0

    def once(self, number: int) -> None:
        before_ms = self.clock.now_ms()
        status, answer, headers = self.door.ask("GET", "/v1/nodes/r1n1")
        if status == 200:
            self._judge(json.loads(answer)["as_of_ms"], int(headers["age"]), before_ms)
        elif status != 0:
            self.diary.troubles.append(f"GET /v1/nodes/r1n1: {status} {answer[:300]!r}")
        self.ending.wait(0.03)

    def _judge(self, as_of_ms: int, age_s: int, before_ms: int) -> None:
        self.answers += 1
        self.oldest_s = max(self.oldest_s, age_s)
        if as_of_ms < self._as_of_ms:
            self.diary.troubles.append(f"a board of {as_of_ms} after one of {self._as_of_ms}")
        self._as_of_ms = as_of_ms
        least_s, most_s = (before_ms - as_of_ms) / 1000 - 1, (self.clock.now_ms() - as_of_ms) / 1000 + 1
        if not least_s <= age_s <= most_s:
            self.diary.troubles.append(f"age {age_s} s, expected {least_s:.0f} to {most_s:.0f} s")
