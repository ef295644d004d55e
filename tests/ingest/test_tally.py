"""The tally of all kinds of sources: read + refused + ignored + unread = all."""

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.source import Batch
from fleetcast.ingest.tally import MAX_UNREAD_NAMES, RecordTally, RunningTally, SkipRule


def test_a_batch_that_counts_nothing_else_is_its_good_and_bad_records() -> None:
    batch = Batch(bad=(RecordError("bad_line"),))
    assert batch.get_tally() == RecordTally(refused=1)
    counted = Batch(tally=RecordTally(read=3, ignored={SkipRule.REPEATED: 2}, unread=1, names=("a",)))
    merged = Batch.merge([batch, counted, Batch()])
    assert merged.tally == RecordTally(read=3, refused=1, ignored={SkipRule.REPEATED: 2}, unread=1, names=("a",))


def test_the_document_adds_up_and_holds_the_first_names() -> None:
    running = RunningTally()
    for number in range(3 * MAX_UNREAD_NAMES):
        running.add_tally(RecordTally(2, 1, {SkipRule.EXPORTER: 1}, 2, (f"name_{number}", "again"), 4))
    document = running.make_document()
    assert document["all"] == 6 * 3 * MAX_UNREAD_NAMES
    assert document["all"] == sum(document[key] for key in ("read", "refused", "ignored", "unread"))
    assert document["ignored_by"] == {"exporter": 3 * MAX_UNREAD_NAMES}
    later = [f"name_{number}" for number in range(1, MAX_UNREAD_NAMES - 1)]
    assert document["unread_names"] == ["name_0", "again", *later]
    assert document["unknown_fields"] == 12 * MAX_UNREAD_NAMES
