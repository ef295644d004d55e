"""The source "ufm": link failures that NVIDIA UFM Cyber-AI predicts. They raise the risk of the port.

FLEETCAST_UFM_TOKEN holds an access token, or FLEETCAST_UFM_PASSWORD the password of `user`. A prediction
is delivered when it first appears, changes by five percentage points, or is withdrawn. Ports of switches
and of unknown hosts are ignored.
"""

import base64
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import msgspec

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.health.polling import Poller, PollOptions, check_polling_options
from fleetcast.ingest.inbox.job_events import FUTURE_LIMIT_MS, check_event, make_malformed_error
from fleetcast.ingest.node_names import find_known_name
from fleetcast.ingest.source import Batch, Source, read_options
from fleetcast.ingest.tally import RecordTally, SkipRule, count_unknown_fields

SOURCE: Final = "ufm"
CHECK: Final = "link failure prediction"
PATH: Final = "/cyber-ai/prediction/link-failure"
TOKEN, PASSWORD = "FLEETCAST_UFM_TOKEN", "FLEETCAST_UFM_PASSWORD"
CHANGE: Final = 0.05
MOST_ALERTS: Final = 20_000
MESSAGE_CHARACTERS: Final = 1_000
_HASH_BITS: Final = 20
_device = re.compile(r"(mlx\w{1,20})(?:/(\d{1,3}))?")


class UfmOptions(PollOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of the source `ufm`. `since_h`: the greatest age of a prediction in hours."""

    url: str
    name: str = "ufm"
    user: str = ""
    path: str = PATH
    since_h: int = 6
    severities: tuple[str, ...] = ("Critical", "Major")
    poll_s: float = 60.0
    timeout_s: float = 20.0


class Alert(msgspec.Struct):
    """One predicted link failure. `probability` is in percent."""

    node_name: str
    probability: float
    alert_id: int | str = ""
    port: int | str = ""
    port_name: str = ""
    severity: str = ""
    description: str = ""


_alerts = msgspec.json.Decoder(list[msgspec.Raw] | None).decode
_alert = msgspec.json.Decoder(Alert).decode

# The last reports: "node|device" -> probability.
Known = dict[str, float]


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


class UfmSource(Source):
    """The source `ufm`. Its position is the set of current predictions."""

    def __init__(self, entities: Entities, clock: Clock, options: Mapping[str, Any]) -> None:
        chosen = read_options("ufm", options, UfmOptions)
        if not _is_http_url(chosen.url):
            raise ConfigError(f"pipeline.sources ufm: url = {chosen.url!r}: expected something like https://ufm:8443")
        if chosen.since_h < 1:
            raise ConfigError(f"pipeline.sources ufm: since_h = {chosen.since_h}: expected at least 1")
        self.name = chosen.name
        self.unknown = 0  # alerts of ports that are not ours, in the last answer
        self._entities = entities
        self._clock = clock
        query = urlencode({"from": f"-{chosen.since_h}h", "severities": ",".join(chosen.severities)}, safe=",")
        self._url = f"{chosen.url.rstrip('/')}{chosen.path}?{query}"
        self._known: Known = {}
        self._taken: Known = {}  # the same, as far as `next` has returned it
        self._poller = Poller(
            self.name,
            {self._url: self._fetch_predictions},
            chosen,
            check_polling_options("ufm", chosen),
            _make_auth_headers(chosen.user),
        )

    @property
    def pending(self) -> RecordTally:  # type: ignore[override]
        return self._poller.pending

    async def next(self) -> Batch:
        batch = await self._poller.next()
        for event in batch.node_events:
            _update_known(self._taken, event)
        return batch

    def position(self) -> dict[str, Any]:
        return dict(self._taken)

    def seek(self, position: Mapping[str, Any]) -> None:
        self._known = {key: float(p) for key, p in position.items()}
        self._taken = dict(self._known)

    def health(self) -> dict[str, Any]:
        """Return the source's row of the ingestion document.

        `unknown`: predictions for ports of switches, and of hosts that the fleet does not know. `standing`: the
        number of current predictions.
        """
        return {**self._poller.health("ufm"), "standing": len(self._known), "unknown": self.unknown}

    async def close(self) -> None:
        await self._poller.close()

    async def _fetch_predictions(self, poller: Poller, target: str) -> Batch:
        body = await poller.get(target)
        alerts, bad = decode_alerts(body)
        now_ms = self._clock.now_ms()
        predicted: dict[str, tuple[float, Alert]] = {}
        self.unknown = 0
        repeated = 0
        for alert in alerts:
            key = self._find_port_key(alert)
            if key is None:
                self.unknown += 1
                continue
            repeated += key in predicted
            if key not in predicted or predicted[key][0] < alert.probability:
                predicted[key] = (alert.probability, alert)
        ignored = {SkipRule.OTHER_PART: self.unknown, SkipRule.REPEATED: repeated}
        counts = {rule: count for rule, count in ignored.items() if count}
        fields = sum(count_unknown_fields(bytes(row), Alert) for row in (_alerts(body) or [])[:MOST_ALERTS])
        tally = RecordTally(len(predicted), len(bad), counts, unknown_fields=fields)
        return replace(self._make_change_events(predicted, bad, now_ms), tally=tally)

    def _find_port_key(self, alert: Alert) -> str | None:
        """Return "node|device" for the port of a host that the fleet knows, otherwise None.

        UFM may write the adapter's name after the host's name.
        """
        nodes = self._entities[EntityKind.NODE]
        name = find_known_name(alert.node_name.split(" ")[0], nodes)
        found = _device.search(alert.port_name) or _device.search(alert.node_name)
        device = f"{found[1]}/{found[2] or 1}" if found is not None else f"port {alert.port or alert.port_name}"
        return f"{name}|{device}" if name in nodes else None

    def _make_change_events(
        self, predicted: Mapping[str, tuple[float, Alert]], bad: list[RecordError], now_ms: int
    ) -> Batch:
        """Return events for the predictions that are new, changed or gone since the last answer.

        Errors of invalid events are added to `bad`, which the batch also contains.
        """
        events = []
        for key, (percent, alert) in predicted.items():
            p = percent / 100
            if abs(p - self._known.get(key, -1.0)) >= CHANGE:
                events.append(_make_event(key, p, alert, now_ms))
        events += [_make_event(key, None, None, now_ms) for key in self._known.keys() - predicted.keys()]
        good = []
        for event in events:
            try:
                check_event(event, now_ms, FUTURE_LIMIT_MS)
            except RecordError as error:
                bad.append(error.with_traceback(None))
                continue
            good.append(event)
            _update_known(self._known, event)
        return Batch(node_events=tuple(good), bad=tuple(bad))


def _update_known(known: Known, event: NodeEvent) -> None:
    key = f"{event.node}|{event.device}"
    if event.probability is None:
        known.pop(key, None)
    else:
        known[key] = event.probability


def decode_alerts(body: bytes) -> tuple[list[Alert], list[RecordError]]:
    """Return the good alerts of an answer, and the errors of the others.

    Raises RecordError if the answer is not a list.
    """
    try:
        rows = _alerts(body) or []
    except (ValueError, RecursionError) as error:
        raise make_malformed_error(error, body, _alerts) from None
    alerts, bad = [], []
    beyond = len(rows) - MOST_ALERTS
    bad += [RecordError("too_many", f"{len(rows):,} alerts, at most {MOST_ALERTS:,} are read")] * max(0, beyond)
    for row in rows[:MOST_ALERTS]:
        try:
            alert = _alert(row)
        except (ValueError, RecursionError) as error:
            bad.append(make_malformed_error(error, bytes(row), _alert))
            continue
        if 0 <= alert.probability <= 100:
            alerts.append(alert)
        else:
            bad.append(RecordError("out_of_range", f"probability {alert.probability}, expected 0 to 100"))
    return alerts, bad


def _make_event(key: str, p: float | None, alert: Alert | None, now_ms: int) -> NodeEvent:
    """Return the node event of a prediction, or of its withdrawal if `p` is None."""
    node, _, device = key.partition("|")
    id = "" if alert is None else str(alert.alert_id)
    what = zlib.crc32(f"{device}|{id}|{p}".encode("utf-8", "replace")) & ((1 << _HASH_BITS) - 1)
    return NodeEvent(
        node=node,
        source=SOURCE,
        sequence=(now_ms // 1000 << _HASH_BITS) | what,
        time_ms=now_ms,
        type="health",
        check=CHECK,
        severity="ok" if alert is None else "warning",
        device=device,
        probability=p,
        message="" if alert is None else alert.description[:MESSAGE_CHARACTERS],
    )


def _make_auth_headers(user: str) -> dict[str, str]:
    token, password = os.environ.get(TOKEN, ""), os.environ.get(PASSWORD, "")
    if token:
        return {"Authorization": f"Basic {token}"}
    if user and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
    return {}
