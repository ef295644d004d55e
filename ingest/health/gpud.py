"""The source "gpud": polls the gpud daemon of each node for its components' health.

See docs/sources/health.md. `NODE=` before a target names its node. Without it, the URL's host is
the node. The source delivers a state when it changes, and repeats a bad state once a day. The state
Healthy withdraws the earlier reports about a component. Degraded is a warning. Unhealthy is fatal
if gpud suggests REBOOT_SYSTEM or HARDWARE_INSPECTION, and a warning otherwise. XID events become
XIDs.
"""

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.devices import normalise_device_name
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.fleet.events import NodeEvent
from fleetcast.ingest.health.polling import Poller, PollOptions, check_polling_options
from fleetcast.ingest.inbox.job_events import FUTURE_LIMIT_MS, check_event, make_malformed_error
from fleetcast.ingest.node_names import check_name
from fleetcast.ingest.source import Batch, Source, read_options
from fleetcast.ingest.tally import RecordTally, SkipRule

SOURCE: Final = "gpud"
TOKEN: Final = "FLEETCAST_GPUD_TOKEN"
AGAIN_MS: Final = 86_400_000
LOOKBACK_MS: Final = 86_400_000  # for XIDs, at the start
MOST_STATES: Final = 1_000  # of one node
MESSAGE_CHARACTERS: Final = 1_000
HARDWARE: Final = frozenset({"REBOOT_SYSTEM", "HARDWARE_INSPECTION"})
ADVICE: Final = {
    "REBOOT_SYSTEM": "restart the node",
    "HARDWARE_INSPECTION": "have the hardware inspected",
    "CHECK_USER_APP_AND_GPU": "check the application and the GPU",
    "IGNORE_NO_ACTION_REQUIRED": "nothing to do",
}
_HASH_BITS: Final = 20
_named = re.compile(r"([^/=\s:]{1,253})=(.+)")
_xid = re.compile(r"\bXID\D{0,3}(\d{1,5})\b", re.IGNORECASE)
_address = re.compile(r"(?:PCI:)?[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?")

Severity = Literal["ok", "warning", "fatal"]


class GpudOptions(PollOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    targets: list[str]
    name: str = "gpud"


class SuggestedActions(msgspec.Struct):
    description: str = ""
    repair_actions: list[str] | None = None


class ComponentHealth(msgspec.Struct):
    health: str = ""
    name: str = ""
    reason: str = ""
    error: str = ""
    time: str = ""
    suggested_actions: SuggestedActions | None = None


class ComponentStates(msgspec.Struct):
    component: str
    states: list[ComponentHealth] | None = None


class Event(msgspec.Struct):
    time: str = ""
    name: str = ""
    type: str = ""
    message: str = ""


class ComponentEvents(msgspec.Struct):
    component: str
    events: list[Event] | None = None


NOT_YET = ("", "Initializing")  # of a check that has not run
_states = msgspec.json.Decoder(list[ComponentStates] | None).decode
_events = msgspec.json.Decoder(list[ComponentEvents] | None).decode

# A node's last reports: check -> [severity, reason's hash, when].
Known = dict[str, list[Any]]


def parse_gpud_target(entry: str) -> tuple[str, str]:
    """Split a target such as NODE=URL into (node, URL). Raises ConfigError."""
    found = _named.fullmatch(entry)
    node, url = (found[1], found[2]) if found is not None else ("", entry)
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"pipeline.sources gpud: targets {entry!r}: expected a URL such as https://n001:15132")
    return check_name(node or str(parts.hostname)), url.rstrip("/")


class GpudSource(Source):
    """The source `gpud`. Its position is the last report of each check of each node."""

    def __init__(self, entities: Entities, clock: Clock, options: Mapping[str, Any]) -> None:
        chosen = read_options("gpud", options, GpudOptions)
        if not chosen.targets:
            raise ConfigError("pipeline.sources gpud: targets: expected at least one URL such as https://n001:15132")
        self._urls = dict(map(parse_gpud_target, chosen.targets))
        self.name = chosen.name
        self._clock = clock
        self._known: dict[str, Known] = {}
        self._taken: dict[str, Known] = {}  # the same, as far as `next` has returned it
        self._seen_s: dict[str, int] = {}
        token = os.environ.get(TOKEN, "")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        asks = dict.fromkeys(self._urls, self._fetch_node)
        self._poller = Poller(self.name, asks, chosen, check_polling_options("gpud", chosen), headers)

    @property
    def pending(self) -> RecordTally:  # type: ignore[override]
        return self._poller.pending

    async def next(self) -> Batch:
        batch = await self._poller.next()
        for event in batch.node_events:
            if event.type == "health":
                self._taken.setdefault(event.node, {})[event.check] = _summarise_event(event)
        return batch

    def position(self) -> dict[str, Any]:
        return {node: dict(checks) for node, checks in self._taken.items()}

    def seek(self, position: Mapping[str, Any]) -> None:
        self._known = {node: dict(checks) for node, checks in position.items()}
        self._taken = {node: dict(checks) for node, checks in position.items()}

    def health(self) -> dict[str, Any]:
        return self._poller.health("gpud")

    async def close(self) -> None:
        await self._poller.close()

    async def _fetch_node(self, poller: Poller, node: str) -> Batch:
        """Fetch the states and the newest XIDs of one node, and return them as events."""
        url, now_ms = self._urls[node], self._clock.now_ms()
        states = decode_states(await poller.get(f"{url}/v1/states"))
        since_s = self._seen_s.get(node, (now_ms - LOOKBACK_MS) // 1000)
        events = decode_events(await poller.get(f"{url}/v1/events?startTime={since_s}"))
        known = self._known.setdefault(node, {})
        events_found = [*make_state_events(node, states, known, now_ms)]
        xids = [*make_xid_events(node, events, now_ms)]
        self._seen_s[node] = now_ms // 1000 - 60  # gpud's clock may be behind; what comes twice counts once
        batch = _make_checked_batch([*events_found, *xids], now_ms)
        return replace(
            batch, tally=count_states_and_events(states, events, len(events_found), len(xids), len(batch.bad))
        )


def count_states_and_events(
    states: list[ComponentStates], events: list[ComponentEvents], events_found: int, xids: int, refused: int
) -> RecordTally:
    """Count the states and events in one node's answers, for the source's tally.

    events_found: number of states that changed. xids: number of XIDs. refused: number of invalid node events.
    """
    rows = [state for component in states for state in component.states or ()]
    unread = [state.health[:80] for state in rows if _parse_severity(state) is None and state.health not in NOT_YET]
    waiting = sum(_parse_severity(state) is None for state in rows) - len(unread)
    others = sum(len(component.events or ()) for component in events) - xids
    repeated = len(rows) - events_found - len(unread) - waiting
    ignored = {SkipRule.REPEATED: repeated, SkipRule.NO_DATA: waiting, SkipRule.NOT_HARDWARE: others}
    counts = {rule: count for rule, count in ignored.items() if count}
    return RecordTally(events_found + xids - refused, refused, counts, len(unread), tuple(dict.fromkeys(unread)))


def decode_states(body: bytes) -> list[ComponentStates]:
    """Decode an answer of /v1/states. Raises RecordError."""
    try:
        return _states(body) or []
    except (ValueError, RecursionError) as error:
        raise make_malformed_error(error, body, _states) from None


def decode_events(body: bytes) -> list[ComponentEvents]:
    """Decode an answer of /v1/events. Raises RecordError."""
    try:
        return _events(body) or []
    except (ValueError, RecursionError) as error:
        raise make_malformed_error(error, body, _events) from None


def make_state_events(node: str, components: list[ComponentStates], known: Known, now_ms: int) -> Iterator[NodeEvent]:
    """Yield a node event for each state that differs from `known`, and update `known`.

    A bad state that did not change is repeated after AGAIN_MS.
    """
    for component in components:
        for state in component.states or ():
            severity = _parse_severity(state)
            check = (
                component.component
                if state.name in ("", component.component)
                else f"{component.component}/{state.name}"
            )
            if severity is None or (check not in known and len(known) >= MOST_STATES):
                continue
            event = _make_state_event(node, check, severity, state, now_ms)
            reported, last = _summarise_event(event), known.get(check, ["ok", 0, now_ms])
            same = last[0] == severity if severity == "ok" else last[:2] == reported[:2]
            if not same or (severity != "ok" and now_ms - int(last[2]) >= AGAIN_MS):
                known[check] = reported
                yield event


def _make_state_event(node: str, check: str, severity: Severity, state: ComponentHealth, now_ms: int) -> NodeEvent:
    message = (state.reason or state.error)[:MESSAGE_CHARACTERS]
    return NodeEvent(
        node=node,
        source=SOURCE,
        sequence=_make_sequence(now_ms, f"{check}|{severity}|{message}"),
        time_ms=now_ms,
        type="health",
        check=check,
        severity=severity,
        message=message,
        advice="" if severity == "ok" else _format_advice(state.suggested_actions),
    )


def _summarise_event(event: NodeEvent) -> list[Any]:
    """Return [severity, CRC-32 of the message, time in Unix ms] of an event, to compare reports."""
    return [event.severity, zlib.crc32(event.message.encode("utf-8", "replace")), event.time_ms]


def make_xid_events(node: str, components: list[ComponentEvents], now_ms: int) -> Iterator[NodeEvent]:
    """Yield a node event for each XID among a daemon's events, with the daemon's time."""
    for component in components:
        for event in component.events or ():
            found = _xid.search(f"{event.name} {event.message}") if "xid" in component.component.lower() else None
            if found is None:
                continue
            time_ms = _parse_time_ms(event.time, now_ms)
            address = _address.search(event.message)
            device = normalise_device_name(address[0]) if address else ""
            yield NodeEvent(
                node=node,
                source=SOURCE,
                sequence=_make_sequence(time_ms, f"{found[1]}|{device}"),
                time_ms=time_ms,
                type="xid",
                code=int(found[1]),
                device=device,
                message=event.message[:MESSAGE_CHARACTERS],
            )


def _make_checked_batch(events: list[NodeEvent], now_ms: int) -> Batch:
    good, bad = [], []
    for event in events:
        try:
            check_event(event, now_ms, FUTURE_LIMIT_MS)
            good.append(event)
        except RecordError as error:
            bad.append(error.with_traceback(None))
    return Batch(node_events=tuple(good), bad=tuple(bad))


def _parse_severity(state: ComponentHealth) -> Severity | None:
    """Return the severity of a state, or None if gpud states no known health."""
    match state.health:
        case "Healthy":
            return "ok"
        case "Degraded":
            return "warning"
        case "Unhealthy":
            suggested = state.suggested_actions
            return "fatal" if suggested and HARDWARE & set(suggested.repair_actions or ()) else "warning"
    return None


def _format_advice(suggested: SuggestedActions | None) -> str:
    if suggested is None:
        return ""
    words = [ADVICE.get(action, action.replace("_", " ").lower()) for action in suggested.repair_actions or ()]
    return ", ".join(words)[:MESSAGE_CHARACTERS]


def _make_sequence(time_ms: int, what: str) -> int:
    return (time_ms // 1000 << _HASH_BITS) | (zlib.crc32(what.encode("utf-8", "replace")) & ((1 << _HASH_BITS) - 1))


def _parse_time_ms(stated: str, now_ms: int) -> int:
    """Return the time that the daemon states in Unix ms, or `now_ms` if it states no plausible time."""
    try:
        time = datetime.fromisoformat(stated)
    except ValueError:
        return now_ms
    time_ms = round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
    return time_ms if 0 < time_ms <= now_ms + FUTURE_LIMIT_MS else now_ms
