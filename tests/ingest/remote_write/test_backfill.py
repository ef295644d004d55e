from pathlib import Path

import pytest

from fleetcast.clients.prometheus import MatrixRow, TooManySamples
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import SourceError
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.archive.archive import Archive
from fleetcast.ingest.archive.files import ArchiveFiles
from fleetcast.ingest.archive.read import ArchiveSpan, read_samples
from fleetcast.ingest.archive.rows import NameLookups
from fleetcast.ingest.remote_write.backfill import (
    BackfillRequest,
    Progress,
    PrometheusBackfill,
    find_known_names,
    make_write_request,
)

HOUR_MS = 3_600_000
T0 = 1_760_000_400_000 // HOUR_MS * HOUR_MS
POWER = "DCGM_FI_DEV_POWER_USAGE"


class Recorded:
    """A Prometheus that holds one sample a minute of one GPU, and answers with at most `most` at once."""

    def __init__(self, *, most: int = 10**9, breaks_at: int = 10**9) -> None:
        self.most = most
        self.asked = 0
        self._breaks_at = breaks_at

    def list_metric_names(self, match: str, first_ms: int, end_ms: int) -> list[str]:
        return ["go_goroutines", POWER, "node_uname_info"]

    def fetch_recorded_samples(self, selector: str, first_ms: int, end_ms: int) -> list[MatrixRow]:
        self.asked += 1
        if self.asked > self._breaks_at:
            raise SourceError("away")
        if POWER not in selector:
            return []
        times = [at / 1000 for at in range(first_ms, end_ms) if at % 60_000 == 0]
        if len(times) > self.most:
            raise TooManySamples("query processing would load too many samples into memory")
        labels = {"__name__": POWER, "gpu": "0", "Hostname": "n1"}
        return [MatrixRow(labels, [(at, 1 + at % 3600) for at in times])]

    def fetch_resampled_samples(self, selector: str, first_ms: int, end_ms: int, step_ms: int) -> list[MatrixRow]:
        return []


class World:
    """An archive, and a file of what is done, that outlive a run."""

    def __init__(self, folder: Path) -> None:
        self.files = ArchiveFiles(str(folder / "archive"))
        self._done = folder / "backfill.json"

    def run(self, client: Recorded, wish: BackfillRequest) -> PrometheusBackfill:
        entities = Entities()
        archive = Archive(self.files, entities, writer="backfill")
        work = PrometheusBackfill(client, archive, entities, Topology.build([]))
        try:
            for _ in work.run(wish, Progress(self._done, wish.key), T0 + 100 * HOUR_MS):
                pass
        finally:
            archive.close()
        return work

    def times(self) -> list[int]:
        words = NameLookups(lambda kind, entity: 0)
        return sorted(read_samples(self.files, ArchiveSpan(0, 2**50), words).time_ms.tolist())


def wish(hours: int) -> BackfillRequest:
    return BackfillRequest("http://p:9090", T0 + 600_000, T0 + hours * HOUR_MS)


def expected(hours: int) -> list[int]:
    return list(range(T0 + 600_000, T0 + hours * HOUR_MS, 60_000))


def test_windows_are_whole_hours_less_what_is_not_asked_for() -> None:
    assert wish(2).list_windows() == [(T0 + 600_000, T0 + HOUR_MS), (T0 + HOUR_MS, T0 + 2 * HOUR_MS)]


def test_a_run_that_breaks_off_goes_on_where_it_was(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(SourceError):
        world.run(Recorded(breaks_at=5), wish(4))  # in the third hour
    assert world.times() == expected(2)
    client = Recorded()
    assert world.run(client, wish(4)).taken.skipped == 2
    assert (world.times(), client.asked) == (expected(4), 4)


def test_what_is_done_is_not_asked_for_again_and_another_question_is_another(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(Recorded(), wish(3))
    client = Recorded()
    world.run(client, wish(2))
    assert client.asked == 0
    other = BackfillRequest("http://p:9090", T0 + 600_000, T0 + HOUR_MS, match='cluster="a"')
    assert world.run(client, other).taken.samples == 50
    assert world.times() == expected(3)


def test_too_much_for_one_answer_is_asked_for_in_pieces(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(Recorded(most=7), wish(1))
    assert world.times() == expected(1)


def test_no_answer_is_small_enough_for_one_that_takes_nothing(tmp_path: Path) -> None:
    with pytest.raises(TooManySamples):
        World(tmp_path).run(Recorded(most=0), wish(1))


def test_only_what_the_catalogue_knows_is_asked_for_hosts_first() -> None:
    names = ["ALERTS", POWER, "go_goroutines", "node_infiniband_port_data_received_bytes_total", "node_uname_info"]
    assert find_known_names(names) == ["node_uname_info", POWER, "node_infiniband_port_data_received_bytes_total"]


def test_an_answer_is_a_write() -> None:
    write = make_write_request([MatrixRow({"b": "1", "a": "2"}, [(1.5, 2.0), (2.0, 3.0)]), MatrixRow({}, [])])
    assert write.time_ms.tolist() == [1500, 2000]
    assert [write.symbols[ref] for ref in write.refs] == [b"a", b"2", b"b", b"1"]
    assert len(make_write_request([]).of) == 0
