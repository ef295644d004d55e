"""Whatever step a process ends at and whenever the power goes: what a flush said was written is there, once."""

import errno
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from types import SimpleNamespace

import pytest

from fleetcast.fleet import failpoints
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Submitted
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.archive.archive import Archive
from fleetcast.ingest.archive.compact import compact, find_compaction_runs
from fleetcast.ingest.archive.files import HOUR_MS, ArchiveFiles
from fleetcast.ingest.archive.read import ArchiveSpan, read_events, read_samples
from fleetcast.ingest.archive.rows import NameLookups, make_row_lookup
from tests.simulation.disk import Killed, MemoryDisk, Mount

T0_MS = 1_789_200_000_000  # a whole hour
POWER = find_metric_row(EntityKind.GPU, "power_w")
TOPOLOGY = Topology.build([NodeSpec("n1", 8)])
PARTS = 2


class Unlucky(random.Random):
    """Nothing survives that need not."""

    def random(self) -> float:
        return 0.0


class Life:
    """A process that archives into `/state/archive`, and is told what it is told again."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.disk = disk
        self.process = SimpleNamespace(alive=True)
        self.files = ArchiveFiles(Mount(disk, self.process).path("/state/archive"))
        self.entities = Entities()
        self.archive = Archive(self.files, self.entities)

    def tell(self, number: int) -> None:
        gpu = self.entities.add_to_node(EntityKind.GPU, "n1", 0)
        time_ms = T0_MS + 1000 * number
        batch = SampleBatch.from_rows(EntityKind.GPU, [(POWER, gpu, time_ms, 1.0)])
        self.archive.add(batch, batch.time_ms > 0)
        self.archive.add_event(Submitted(job=f"j{number}", sequence=1, time_ms=time_ms))

    def flush(self) -> None:
        self.archive.prepare_flush(TOPOLOGY, T0_MS + HOUR_MS)()

    def compact(self) -> None:
        for run in find_compaction_runs(self.files, "0", T0_MS + HOUR_MS, most_rows=100):
            compact(self.files, run)

    def end(self) -> None:
        self.process.alive = False
        self.disk.end_process(self.process)


def disk_of(coins: random.Random) -> MemoryDisk:
    disk = MemoryDisk(coins, lambda: 0)
    disk.make_state()
    return disk


def told(disk: MemoryDisk) -> tuple[list[str], list[int]]:
    """Jobs and times of samples (seconds) of the live files."""
    files, span = Life(disk).files, ArchiveSpan(T0_MS, T0_MS + HOUR_MS)
    events, bad = read_events(files, span)
    assert not bad
    times = read_samples(files, span, NameLookups(make_row_lookup(Entities()))).time_ms
    return [event.job for event in events if isinstance(event, Submitted)], sorted(((times - T0_MS) // 1000).tolist())


@contextmanager
def ending_at(step: int, how: Callable[[], None]) -> Iterator[list[str]]:
    """At the failpoint of that number `how` happens; yields the points that were reached."""
    reached: list[str] = []

    def hook(point: str) -> float:
        reached.append(point)
        if len(reached) == step + 1:
            how()
        return failpoints.KEEP_ALL

    failpoints.set_hook(hook)
    try:
        yield reached
    finally:
        failpoints.set_hook(None)


def fails() -> None:
    raise OSError(errno.EIO, "the disk")


def killing(life: Life) -> Callable[[], None]:
    def kill() -> None:
        life.end()
        raise Killed

    return kill


@pytest.mark.parametrize("end", ["killed", "failed"])
def test_what_a_flush_returned_upon_outlives_a_power_cut(end: str) -> None:
    step, points = 0, [""]
    while len(points) >= step:  # until it ended before that step
        disk = disk_of(Unlucky())
        life = Life(disk)
        life.tell(0)
        with ending_at(step, killing(life) if end == "killed" else fails) as points, suppress(Killed, OSError):
            life.flush()
        if end == "killed":
            life.end()
            life = Life(disk)
            life.tell(0)
        life.flush()
        life.end()
        disk.power_loss()
        assert told(disk) == (["j0"], [0]), f"{end} at {points[step:][:1]}, step {step}"
        step += 1
    assert {"archive.before_sync_folder", "archive.after_rename"} <= set(points)


@pytest.mark.parametrize("coins", [None, 1])
def test_a_compaction_that_is_killed_and_then_cut_short_loses_no_row_and_doubles_none(coins: int | None) -> None:
    def killed(killed_at: int) -> tuple[MemoryDisk, list[str]]:
        """Return the disk after a compaction that was killed at this step, and the steps that it reached."""
        disk = disk_of(Unlucky())
        life = Life(disk)
        for number in range(PARTS):
            life.tell(number)
            life.flush()
        with ending_at(killed_at, killing(life)) as reached, suppress(Killed):
            life.compact()
        life.end()
        return disk, reached

    def cut(disk: MemoryDisk, cut_at: int, where: str) -> list[str]:
        """Check that a flush that is killed at this step and cut short loses nothing. Returns the steps it reached."""
        life = Life(disk)
        with ending_at(cut_at, killing(life)) as reached, suppress(Killed):
            life.flush()
        life.end()
        disk.power_loss()
        everything = [f"j{number}" for number in range(PARTS)], list(range(PARTS))
        where += f"; cut at {reached[cut_at:][:1]}, step {cut_at}"
        assert told(disk) == everything, where
        Life(disk).flush()
        assert told(disk) == everything, where
        return reached

    first, killed_at = [""], 0
    while len(first) >= killed_at:
        left, first = killed(killed_at)
        second, cut_at = [""], 0
        while len(second) >= cut_at:
            disk = deepcopy(left)
            disk.rng = Unlucky() if coins is None else random.Random(f"{coins} {killed_at} {cut_at}")
            second = cut(disk, cut_at, f"killed at {first[killed_at:][:1]}, step {killed_at}")
            cut_at += 1
        killed_at += 1
    assert "archive.before_remove" in first
