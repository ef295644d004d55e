"""A decoder of inbox records: events as they were sent, samples of remote writes, and refusal counts."""

from collections.abc import Sequence

import msgspec

from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import JobEvent, NodeEvent, Submitted
from fleetcast.fleet.samples import SampleBatch
from fleetcast.ingest.gpu_labels import ObservedJobLabels
from fleetcast.ingest.inbox.job_events import NO_FUTURE_LIMIT_MS, decode_event
from fleetcast.ingest.inbox.segments import Record, RecordKind
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.remote_write.request import Version
from fleetcast.ingest.source import Batch
from fleetcast.ingest.tally import RecordTally

MAX_REJECTS_A_RECORD = 200_000
_ONE = RecordTally(read=1)
VERSIONS = {RecordKind.WRITE: Version.V1, RecordKind.WRITE_V2: Version.V2}


def decode_records(
    records: Sequence[Record], bad: Sequence[RecordError] = (), writes: WriteDecoder | None = None
) -> Batch:
    """Decode inbox records into one batch. Their times were checked on arrival.

    Without `writes`, samples count as unknown records.
    """
    events: list[JobEvent] = []
    node_events: list[NodeEvent] = []
    samples: list[SampleBatch] = []
    labels: list[ObservedJobLabels] = []
    errors = list(bad)
    tallies = [RecordTally(refused=len(errors))]
    for record in records:
        try:
            if record.kind == RecordKind.EVENT:
                event = decode_event(record.payload, record.received_ms, NO_FUTURE_LIMIT_MS)
                if isinstance(event, NodeEvent):
                    node_events.append(event)
                else:
                    events.append(event if record.revision else drop_default_preemptible(event))
                tallies.append(_ONE)
            elif record.kind == RecordKind.REFUSED:
                refused = _make_refusal_errors(record.payload)
                errors += refused
                tallies.append(RecordTally(refused=len(refused)))
            elif record.kind in VERSIONS and writes is not None:
                written = writes.decode(record.payload, VERSIONS[RecordKind(record.kind)], record.received_ms)
                samples += written.samples
                errors += written.bad
                labels += written.labels
                tallies.append(written.get_tally())
            else:
                raise RecordError("unknown_kind", f"inbox record of kind {record.kind}")
        except RecordError as error:
            errors.append(error)
            tallies.append(RecordTally(refused=1))
    few = Batch.merge([Batch(samples=tuple(samples)), Batch()]).samples if len(samples) > 1 else tuple(samples)
    tally = RecordTally.sum(tallies)
    return Batch(few, tuple(events), tuple(node_events), tuple(errors), tuple(labels), tally, is_acknowledged=True)


def drop_default_preemptible(event: JobEvent) -> JobEvent:
    """Return an event of revision 0, in which `preemptible = false` was a default, as not said."""
    if isinstance(event, Submitted) and event.preemptible is False:
        return msgspec.structs.replace(event, preemptible=None)
    return event


class _Refusals(msgspec.Struct):
    reasons: dict[str, int]
    examples: dict[str, str] = {}


_decode_refusals = msgspec.json.Decoder(_Refusals).decode


def encode_refusals(errors: Sequence[RecordError]) -> bytes:
    """Return the payload of a REFUSED record: counts by reason, with one example each."""
    reasons: dict[str, int] = {}
    examples: dict[str, str] = {}
    for error in errors:
        reasons[error.reason] = reasons.get(error.reason, 0) + 1
        examples.setdefault(error.reason, error.detail[:200])
    return msgspec.json.encode(_Refusals(reasons, examples))


def _make_refusal_errors(payload: bytes) -> list[RecordError]:
    """Return one error for each refused record, at most MAX_REJECTS_A_RECORD. Raises RecordError.

    Refusals with the same reason share one error object.
    """
    try:
        refusals = _decode_refusals(payload)
    except (ValueError, RecursionError) as error:
        raise RecordError("not_json", f"refusals: {explain_json_error(error)}") from None
    errors: list[RecordError] = []
    for reason, count in refusals.reasons.items():
        room = MAX_REJECTS_A_RECORD - len(errors)
        errors += [RecordError(reason, refusals.examples.get(reason, ""))] * max(0, min(count, room))
    return errors
