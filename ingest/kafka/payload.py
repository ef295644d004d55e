"""Decoders of the values of Kafka records.

    telemetry topic   columnar records in JSON or compact form (`ingest/kafka/columnar.py`), exposition text
    events topic      JSON events: one, an array, lines, or CloudEvents in three modes (`ingest/inbox/event_body.py`)

The header `content-type` decides the form. Without it, the first bytes do. The node of exposition text comes
from the header `node`, else from the text, else from the record's key. Its time comes from the header
`time_ms`, else from the record. Lines may carry their own times.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from fleetcast.clients.kafka_records import Message
from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import NodeEvent
from fleetcast.ingest.inbox.event_body import decode_body
from fleetcast.ingest.kafka.columnar import BINARY_TYPE, JSON_TYPE, MAGIC, RecordDecoder
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.exposition import parse_timestamp
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.source import Batch
from fleetcast.ingest.tally import RecordTally, SkipRule

MAX_PAGES = 50_000  # pages whose shape is kept, the latest used
FUTURE_LIMIT_MS = 60_000
OPEN_METRICS = "application/openmetrics-text"
TEXT_TYPES = frozenset({"text/plain", OPEN_METRICS})
_TOMBSTONE = Batch(tally=RecordTally(ignored={SkipRule.NO_DATA: 1}))
COLUMNAR_TYPES = frozenset({JSON_TYPE, BINARY_TYPE})
_BLANKS = b" \t\r\n\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class DecodedPayload:
    """The batch decoded from a Kafka record.

    `poison`: the error for which the record must become a dead letter, or None. The batch's bad records contain
    the error as well.
    """

    batch: Batch
    poison: RecordError | None = None


class PayloadDecoder:
    """A decoder of the records of one source.

    `noted`: counts, by reason, of records and values that were skipped without an error.
    """

    def __init__(self, entities: Entities, clock: Clock) -> None:
        self.noted: Counter[str] = Counter()
        self._clock = clock
        self._columnar = RecordDecoder(entities, self.noted)
        self._resolver = ExporterResolver(entities)
        self._pages: OrderedDict[tuple[str, str, bytes], PageDecoder] = OrderedDict()

    def get_gpu_models(self) -> dict[str, str]:
        """Return node → GPU model, from the records and pages decoded so far."""
        return {**self._resolver.inventory.get_gpu_models(), **self._columnar.models}

    def decode_telemetry(self, message: Message) -> DecodedPayload:
        """Decode a record of the telemetry topic. Bad content becomes poison and never an exception."""
        try:
            if message.value is None:
                self.noted["tombstone"] += 1
                return DecodedPayload(_TOMBSTONE)
            headers = _parse_headers(message)
            kind = _parse_media_type(headers)
            if kind in TEXT_TYPES:
                return self._decode_page(message, headers)
            columnar = kind in COLUMNAR_TYPES or message.value.startswith(MAGIC)
            if columnar or message.value.lstrip(_BLANKS)[:1] in (b"{", b"["):
                return DecodedPayload(self._columnar.decode(message.value, self._clock.now_ms()))
            return self._decode_page(message, headers)
        except RecordError as error:
            return _make_poison(error)

    def decode_events(self, message: Message) -> DecodedPayload:
        """Decode a record of the events topic into its good events.

        The record is poison if any of its events was refused, or if it has none.
        """
        if message.value is None:
            self.noted["tombstone"] += 1
            return DecodedPayload(_TOMBSTONE)
        body = decode_body(message.value, self._clock.now_ms(), _parse_headers(message))
        events = [record.event for record in body.records]
        bad = tuple(error for _, error in body.rejected)
        if not events and not bad:
            return _make_poison(RecordError("empty", "a record without an event"))
        batch = Batch(
            events=tuple(event for event in events if not isinstance(event, NodeEvent)),
            node_events=tuple(event for event in events if isinstance(event, NodeEvent)),
            bad=bad,
        )
        if not bad:
            return DecodedPayload(batch)
        index, first = body.rejected[0]
        where = f"record {index} of {len(body)}: {first.detail}" if len(body) > 1 else first.detail
        return DecodedPayload(batch, RecordError(first.reason, where))

    def _decode_page(self, message: Message, headers: Mapping[str, str]) -> DecodedPayload:
        """Decode a page of exposition text.

        The record is poison if all lines are bad. Bad lines among good ones are counted.
        """
        assert message.value is not None
        now_ms = self._clock.now_ms()
        time_ms = parse_timestamp(headers["time_ms"].encode()) if "time_ms" in headers else message.time_ms
        if time_ms > now_ms + FUTURE_LIMIT_MS:
            raise RecordError("future", f"{(time_ms - now_ms) / 1000:.0f} s ahead")
        page = message.value if message.value.endswith(b"\n") else message.value + b"\n"
        decoder = self._find_page_decoder(message, headers, page)
        batch = decoder.decode(page, time_ms, open_metrics=_parse_media_type(headers) == OPEN_METRICS)
        if batch.bad and not batch.samples:
            return DecodedPayload(batch, batch.bad[0])
        return DecodedPayload(batch)

    def _find_page_decoder(self, message: Message, headers: Mapping[str, str], page: bytes) -> PageDecoder:
        """Return the decoder of earlier pages from the same node and exporter, or a new one.

        The first comment of a page identifies its exporter.
        """
        named = headers.get("node", "")
        node = named or (message.key or b"").decode("utf-8", "replace")
        first = page[: page.find(b"\n")][:200] if page.startswith(b"#") else b""
        place = message.place[0], f"{bool(named)} {node[:300]}", first
        found = self._pages.get(place)
        if found is None:
            target = Target(node, fixed=bool(named))
            found = self._pages[place] = PageDecoder(self._resolver, target, noted=self.noted)
            if len(self._pages) > MAX_PAGES:
                self._pages.popitem(last=False)
        self._pages.move_to_end(place)
        return found


def _make_poison(error: RecordError) -> DecodedPayload:
    error = error.with_traceback(None)  # a traceback would keep the record alive
    return DecodedPayload(Batch(bad=(error,)), error)


def _parse_headers(message: Message) -> dict[str, str]:
    """Return a record's headers as text, with names in lower case.

    Kafka's binding of CloudEvents writes `ce_id`. The result has HTTP's name `ce-id` instead.
    """
    found = {}
    for name, value in message.headers:
        low = name.lower()
        found["ce-" + low[3:] if low.startswith("ce_") else low] = value.decode("utf-8", "replace")
    return found


def _parse_media_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()
