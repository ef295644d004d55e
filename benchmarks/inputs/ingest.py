"""The whole CPU cost of ingesting samples, in Fleetcast with its archive and in a real Prometheus.

    scraped    both scrape the same exporters every INTERVAL_S at the same time, for FLEETCAST_BENCH_MINUTES (10);
               the first two rounds, in which labels are new, do not count
    written    both receive the same remote-write requests of 1.0 and 2.0, one after the other

The value is CPU seconds of the processes per million samples. Ours are pipeline and api (in `all
roles` placer and supervisor, too), with ticks and forecasts. A run fails if it made no forecast or
archived nothing. Sizes are numbers of targets with 8 GPUs each. At one page every INTERVAL_S, they send 3,
27 and 100 pages a second.
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tomli_w

from fleetcast.benchmarks.inputs.decode import FIELDS, GPUS
from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.child import ChildProcess
from fleetcast.benchmarks.kit.exporters import ExporterFarm
from fleetcast.benchmarks.kit.peer_prometheus import PrometheusPeer, find_prometheus
from fleetcast.benchmarks.kit.service import find_free_port, read_cpu_s
from fleetcast.benchmarks.kit.written import WriteConnection, WriteRequests, make_series_labels
from fleetcast.ingest.remote_write.request import Version

SIZES = (45, 400, 1500)
INTERVAL_S = 15.0
MINUTES = float(os.environ.get("FLEETCAST_BENCH_MINUTES", "10"))
WARM_ROUNDS = 2
WRITTEN_NODES, WRITTEN_ROUNDS = 125, 40
PERIODS: dict[str, float] = {}  # of [pipeline], where they are not the defaults
WRITTEN_PERIODS = {"snapshot_s": 10.0}  # so that what was written is archived soon
START_S, WARM_UP_S = 60.0, 120.0
UNIT = "s/million samples"
ROLES = ("pipeline", "api")


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    for targets in sizes:
        with tempfile.TemporaryDirectory() as folder:
            yield from _measure_scraping(Path(folder), targets)
    for version in Version:
        with tempfile.TemporaryDirectory() as folder:
            yield _measure_remote_write(Path(folder), version)


class FleetProcess:
    """A whole Fleetcast under its supervisor. Its periods are the defaults unless `sections` changes them."""

    def __init__(self, folder: Path, **sections: dict[str, Any]) -> None:
        self.state = folder / "state"
        self.port = find_free_port()
        config: dict[str, Any] = {"state": str(self.state), "api": {"port": self.port}}
        config["placer"] = {"port": find_free_port()}
        path = folder / "config.toml"
        path.write_text(tomli_w.dumps(config | sections), encoding="utf-8")
        command = [sys.executable, "-m", "fleetcast.cli.main", "run", "--config", str(path)]
        self.process = ChildProcess("fleetcast", command)

    def wait_for_board(self) -> None:
        deadline = time.monotonic() + START_S
        while self.fetch_ingestion() is None:
            self.process.check_running(unless=f"no board within {START_S:.0f} s" if time.monotonic() > deadline else "")
            time.sleep(0.2)

    def fetch_ingestion(self) -> dict[str, Any] | None:
        """Return the ingestion document of the last tick, or None before the first board."""
        return self._fetch_json("/v1/ingestion")

    def _fetch_json(self, path: str) -> dict[str, Any] | None:
        import urllib.request

        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                document: dict[str, Any] = msgspec.json.decode(answer.read())
                return document
        except OSError:
            return None

    def check_work(self) -> None:
        """Raise AssertionError unless the pipeline ticked, forecast node faults and archived samples."""
        ingestion, risk = self.fetch_ingestion() or {}, self._fetch_json("/v1/risk/nodes") or {}
        assert ingestion.get("ticks"), "the pipeline did not tick"
        assert (ingestion.get("archive") or {}).get("rows"), "nothing was archived"
        assert risk.get("rows"), "no node has a forecast"

    def count_samples(self) -> int:
        counters = self.fetch_ingestion()
        return 0 if counters is None else int(counters["samples_total"]) + int(counters["late_total"])

    def wait_for_next_tick(self) -> None:
        """Wait until the pipeline has published new counts."""
        seen = (self.fetch_ingestion() or {}).get("ticks")
        deadline = time.monotonic() + START_S
        while (self.fetch_ingestion() or {}).get("ticks") == seen:
            self.process.check_running(unless="the pipeline does not tick" if time.monotonic() > deadline else "")
            time.sleep(0.1)

    def sum_cpu_s(self, *, everything: bool = False) -> float:
        """Return the CPU seconds of the roles that ingest samples. With `everything`, return those of all processes."""
        rows = (line.split() for line in (self.state / "pids").read_text(encoding="utf-8").splitlines())
        return sum(read_cpu_s(int(pid)) for role, pid in rows if everything or role.partition("-")[0] in ROLES)

    def close(self) -> None:
        self.process.stop()


def _measure_scraping(folder: Path, targets: int) -> Iterator[dict[str, Any]]:
    size = {"targets": targets, "series": targets * GPUS * len(FIELDS), "minutes": max(1, round(MINUTES))}
    groups = folder / "groups.json"
    with contextlib.ExitStack() as running:
        farm = ExporterFarm(targets)
        running.callback(farm.close)
        farm.write_groups(groups)
        scrape = {"targets": [f"file_sd:{groups}"], "interval_s": INTERVAL_S}
        fleet = FleetProcess(folder, scrape=scrape, pipeline=PERIODS)
        running.callback(fleet.close)
        peer = _start_scraping_peer(folder, groups)
        if peer is not None:
            running.callback(peer.close)
        fleet.wait_for_board()
        time.sleep(WARM_ROUNDS * INTERVAL_S)
        before = _read_counts(fleet)
        began = time.monotonic()
        theirs = (0.0, 0) if peer is None else (read_cpu_s(peer.process.pid), peer.count_samples())
        time.sleep(MINUTES * 60)
        spent_s, all_s, samples = (now - then for now, then in zip(_read_counts(fleet), before, strict=True))
        fleet.check_work()
        expected = targets * GPUS * len(FIELDS) * (time.monotonic() - began) / INTERVAL_S
        assert samples > 0.8 * expected, f"{samples:,} samples of about {expected:,.0f}"
        beside = None
        if peer is not None:
            peer_s, taken = read_cpu_s(peer.process.pid) - theirs[0], peer.count_samples() - theirs[1]
            beside = peer.name, peer_s / taken * 1e6
    for case, seconds in (("scraped, pipeline and api", spent_s), ("scraped, all roles", all_s)):
        yield make_record("ingest", case, size, [seconds / samples * 1e6], UNIT, cpu_s=seconds, peer=beside)


def _read_counts(fleet: FleetProcess) -> tuple[float, float, int]:
    fleet.wait_for_next_tick()
    return fleet.sum_cpu_s(), fleet.sum_cpu_s(everything=True), fleet.count_samples()


def _start_scraping_peer(folder: Path, groups: Path) -> PrometheusPeer | None:
    program = find_prometheus()
    if program is None:
        return None
    every = f"{round(INTERVAL_S * 1000)}ms"
    jobs = [{"job_name": "dcgm", "file_sd_configs": [{"files": [str(groups)]}]}]
    config = {"global": {"scrape_interval": every, "scrape_timeout": every}, "scrape_configs": jobs}
    return PrometheusPeer(program, folder / "peer", config)


def _measure_remote_write(folder: Path, version: Version) -> dict[str, Any]:
    requests = WriteRequests(make_series_labels(WRITTEN_NODES), version, np.random.default_rng(1))
    first_ms = time.time_ns() // 1_000_000 - (WRITTEN_ROUNDS + 1) * 1000
    with contextlib.ExitStack() as running:
        fleet = FleetProcess(folder, pipeline=WRITTEN_PERIODS)
        running.callback(fleet.close)
        program = find_prometheus()
        peer = None if program is None else PrometheusPeer(program, folder / "peer", {})
        if peer is not None:
            running.callback(peer.close)
        fleet.wait_for_board()
        senders = [WriteConnection(port, version) for port in (fleet.port, *([peer.port] if peer else []))]
        _send_rounds(senders, requests, first_ms, 1)
        _wait_for_samples(fleet, requests.samples)
        before = fleet.sum_cpu_s()
        theirs_s = read_cpu_s(peer.process.pid) if peer else 0.0
        _send_rounds(senders, requests, first_ms + 1000, WRITTEN_ROUNDS)
        samples = requests.samples * WRITTEN_ROUNDS
        _wait_for_samples(fleet, samples + requests.samples)
        spent_s = fleet.sum_cpu_s() - before
        beside = None if peer is None else (peer.name, (read_cpu_s(peer.process.pid) - theirs_s) / samples * 1e6)
    size = {"series": requests.samples, "rounds": WRITTEN_ROUNDS}
    value = spent_s / samples * 1e6
    return make_record("ingest", f"written in {version}.0", size, [value], UNIT, cpu_s=spent_s, peer=beside)


def _send_rounds(senders: Sequence[WriteConnection], requests: WriteRequests, first_ms: int, rounds: int) -> None:
    for number in range(rounds):
        for body in requests.make_round(first_ms + number * 1000):
            for sender in senders:
                sender.send(body)
    for sender in senders:
        sender.close()  # nobody keeps a line open until the next ones


def _wait_for_samples(fleet: FleetProcess, samples: int) -> None:
    """Wait until the pipeline has counted this many samples, and has archived all its samples."""
    deadline = time.monotonic() + WARM_UP_S
    while time.monotonic() < deadline:
        counters = fleet.fetch_ingestion() or {}
        if fleet.count_samples() >= samples and not counters.get("archive", {}).get("waiting_bytes", 0):
            return
        time.sleep(0.5)
    raise AssertionError(f"{fleet.count_samples():,} samples of {samples:,} arrived and were archived in time")
