"""Saving a snapshot: how long a save blocks the event loop, and how long it takes in all.

The fleet is that of the benchmark `tick`, after weeks of jobs. The save of a minute adds only changes to
earlier ones. Each sixtieth save writes every ring.
"""

import asyncio
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetcast.benchmarks.kit.case import fits_memory, make_record
from fleetcast.benchmarks.kit.collector import configure_garbage_collector
from fleetcast.benchmarks.ticks.tick import BYTES_PER_GPU, T0, BusyFleet
from fleetcast.fleet.events import Finished, Started, Step, Submitted
from fleetcast.fleet.job_table import encode_job
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import RankPlacement

ENDED_JOBS_PER_GPU = 20  # 35 days of 6,000 jobs a day at 10,000 GPUs
STEPS = 256  # that each running job keeps
WHOLE, MINUTES = 2, 3  # saves of everything, and saves of a minute after each
CHECK_INTERVAL_S = 0.001
DAYS_MS = 5 * 86_400_000


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """The times of one save in ms, and its CPU seconds.

    pause_ms: the longest time for which the save blocked the loop.
    """

    pause_ms: float
    took_ms: float
    cpu_s: float


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure a fleet of each size in GPUs. Sizes that do not fit the memory are left out."""
    for gpus in sizes:
        if not fits_memory(gpus, BYTES_PER_GPU):
            continue
        with tempfile.TemporaryDirectory() as folder:
            site = make_old_site(gpus, Path(folder))
            with configure_garbage_collector():
                yield from _measure_cases(site, gpus)


def _measure_cases(fleet: BusyFleet, gpus: int) -> Iterator[dict[str, Any]]:
    minutes, wholes = [], []
    for _ in range(WHOLE):
        shutil.rmtree(fleet.pipeline.snapshot.folder)  # nothing to add to
        fleet.pipeline.snapshot.folder.mkdir()
        wholes.append(asyncio.run(_measure_save(fleet)))
        for _ in range(MINUTES):
            for _ in range(4):
                fleet.ingest_scrape()
            minutes.append(asyncio.run(_measure_save(fleet)))
    for name, saves in (("a minute", minutes), ("everything", wholes)):
        shortest = min(saves, key=lambda save: save.took_ms)
        for what, values in (
            ("pause of the loop", [save.pause_ms for save in saves]),
            ("time", [save.took_ms for save in saves]),
        ):
            case = f"save {name}: {what}"
            yield make_record("snapshot", case, {"gpus": gpus}, values, "ms", cpu_s=shortest.cpu_s)


async def _measure_save(fleet: BusyFleet) -> SaveTimes:
    """Save a snapshot, while another task measures the longest pause of the loop."""
    pause_ms, done = 0.0, False

    async def measure_pauses() -> None:
        nonlocal pause_ms
        last = time.perf_counter()
        while not done:
            await asyncio.sleep(CHECK_INTERVAL_S)
            now = time.perf_counter()
            pause_ms, last = max(pause_ms, (now - last - CHECK_INTERVAL_S) * 1000), now

    looking = asyncio.create_task(measure_pauses())
    await asyncio.sleep(5 * CHECK_INTERVAL_S)
    before, cpu, began = fleet.pipeline.snapshot.list_numbers(), time.process_time(), time.perf_counter()
    await fleet.pipeline.save()
    took_ms, cpu_s = (time.perf_counter() - began) * 1000, time.process_time() - cpu
    done = True
    await looking
    assert fleet.pipeline.snapshot.list_numbers()[-1:] > before[-1:], "nothing was saved"
    return SaveTimes(pause_ms, took_ms, cpu_s)


def make_old_site(gpus: int, folder: Path) -> BusyFleet:
    """Make a busy fleet with steps of every running job, and weeks of ended jobs at rest."""
    fleet = BusyFleet(gpus, folder)
    jobs = fleet.pipeline.state.jobs
    for attempt in jobs.list_running():
        for number in range(STEPS):
            time_ms = T0 - 900_000 + number * 3000
            jobs.apply(Step(job=attempt.job, sequence=10 + number, time_ms=time_ms, step=number, duration_s=3.0))
    for number in range(gpus * ENDED_JOBS_PER_GPU):
        name = f"ended-{number}"
        jobs.resting[name] = zlib.compress(encode_job([_make_ended_job(name)]), 1)
    jobs.changed |= jobs.resting.keys()
    return fleet


def _make_ended_job(job: str) -> JobAttempt:
    """Make a job of two GPUs that ran for an hour, days ago."""
    ranks = (RankPlacement(0, "n00000", (0, 1)),)
    attempt = JobAttempt(job, 1)
    for event in (
        Submitted(job=job, sequence=0, time_ms=T0 - DAYS_MS, gpus_per_node=2, user="u", queue="train"),
        Started(job=job, sequence=1, time_ms=T0 - DAYS_MS, ranks=ranks),
        Finished(job=job, sequence=2, time_ms=T0 - DAYS_MS + 3_600_000),
    ):
        attempt.fold(event)
    return attempt
