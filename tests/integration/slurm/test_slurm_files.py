"""What a real Slurm does with the files of ours: job_submit.lua, its durations, and the health check."""

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from fleetcast.schedulers.adapter import Write, WriteOutcome
from fleetcast.schedulers.slurm_durations import FILE, MINUTES, UNTIL
from fleetcast.service.ports.slurm_durations import DurationsPort, compute_bucket_name
from tests.integration.slurm.cluster import NODES, SlurmCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SHIPPED = Path(__file__).parents[3] / "deploy" / "slurm"
NAMES, TIMES = 20_000, 40
HEALTH_S = 2
WRAPPED = """#!/bin/sh
# Several slurmd on one host: the node is named by the command of the one that asks.
SLURMD_NODENAME=$(tr '\\0' ' ' < /proc/$PPID/cmdline | sed -n 's/.*-N \\([^ ]*\\).*/\\1/p')
export SLURMD_NODENAME SLURM_CONF={conf} FLEETCAST_BANDS={bands}
PATH=$PATH:/usr/bin:/bin exec {program}
"""
LIMITED = ("local LIMIT_TIMES = nil", "local LIMIT_TIMES = 2")


class Site:
    """A cluster with our script and our health check; `submit` tells limit and comment of a job that is held."""

    def __init__(self, folder: Path) -> None:
        self.durations, self.bands, self.script = folder / "durations", folder / "bands", folder / "job_submit.lua"
        self.port = DurationsPort(self.durations)
        self.advise("")
        health = folder / "health"
        conf = folder / "cluster" / "slurm.conf"
        health.write_text(WRAPPED.format(conf=conf, bands=self.bands, program=SHIPPED / "fleetcast-health"))
        health.chmod(0o755)
        settings = ("JobSubmitPlugins=lua", f"HealthCheckProgram={health}", f"HealthCheckInterval={HEALTH_S}")
        (folder / "cluster").mkdir()
        shutil.copy(self.script, folder / "cluster")
        self.script = folder / "cluster" / "job_submit.lua"
        self.slurm = SlurmCluster(
            folder / "cluster", accounting=False, settings=(*settings, "HealthCheckNodeState=ANY")
        )

    def advise(self, text: str, *changes: tuple[str, str]) -> None:
        """Put the shipped script there, or another text."""
        shipped = (SHIPPED / "job_submit.lua").read_text(encoding="utf-8")
        for old, new in (("/var/cache/fleetcast/durations", str(self.durations)), *changes):
            assert old in shipped
            shipped = shipped.replace(old, new)
        beside = self.script.with_suffix(".new")
        beside.write_text(text or shipped)
        stamp = max(time.time(), self.script.stat().st_mtime + 2 if self.script.exists() else 0)
        os.utime(beside, (stamp, stamp))  # slurmctld reads a script again when its time is another second
        beside.replace(self.script)

    def tell(self, *rows: tuple[str, str], valid_s: int = 3600) -> None:
        until = Write(FILE, UNTIL, str(int(time.time()) + valid_s), self._held(FILE, UNTIL), "")
        writes = [until, *(Write(key, MINUTES, value, self._held(key, MINUTES), "") for key, value in rows)]
        assert set(asyncio.run(self.port.write(writes))) == {WriteOutcome.DONE}

    def _held(self, key: str, field: str) -> str | None:
        known = key in (FILE, "root train") or not key.startswith("user")
        return asyncio.run(self.port.read()).get(key, {}).get(field) if known else None

    def submit(self, *options: str) -> tuple[str, str]:
        number = self.slurm.submit("true", "--hold", "--job-name=train", *options)
        line = self.slurm.run("scontrol", "show", "job", "-o", number)
        limit, said = re.search(r" TimeLimit=(\S+)", line), re.search(r" AdminComment=(.*?)  ?(?:\w+=|$)", line)
        assert limit
        return limit[1], said[1].strip() if said else ""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("files"))
    try:
        yield made
    finally:
        made.slurm.stop()


SAID = "[fleetcast] runs for 60 min (p90 90 min)"
WITHOUT = ("UNLIMITED", "")  # as without us


def test_a_job_is_told_how_long_its_like_run_and_keeps_its_own_limit(site: Site) -> None:
    assert site.submit() == WITHOUT
    site.tell(("root train", "60 90 20000"), ("root other", "1 2 20000"))
    assert site.submit() == ("UNLIMITED", SAID)
    site.advise("", LIMITED)
    assert site.submit() == ("03:00:00", f"{SAID}, limit 180 min")
    assert site.submit("--time=10") == ("00:10:00", SAID)
    assert site.submit("--job-name=strange") == WITHOUT


@pytest.mark.parametrize("name", ["a b  c", "%d+(.-)[x]", "'\"`$(x)\\", "時" * 253, "train -- 1 2 3 root train", "-x"])
def test_each_name_that_the_port_writes_is_found_by_the_script(site: Site, name: str) -> None:
    site.advise("")
    site.tell((f"root {name}", "60 90 20000"))
    assert site.submit(f"--job-name={name}") == ("UNLIMITED", SAID)
    assert site.submit(f"--job-name={name[:-1]}") == WITHOUT


def test_advice_that_is_old_broken_or_gone_changes_nothing(site: Site) -> None:
    site.advise("", LIMITED)
    site.tell(("root train", "60 90 20000"))
    assert site.submit()[0] == "03:00:00"
    site.tell(valid_s=-1)
    assert site.submit() == WITHOUT
    site.tell(valid_s=10**9)
    assert site.submit() == WITHOUT
    site.tell()
    row = site.durations / compute_bucket_name("root train")
    for content in (b"\xff\x00\n60 root train\n", b"60 90 20000 root tr", b"", b"9" * 500_000):
        row.write_bytes(content)
        assert site.submit() == WITHOUT
    row.unlink()
    row.mkdir()  # a read of it fails
    assert site.submit() == WITHOUT
    row.rmdir()
    shutil.rmtree(site.durations)
    assert site.submit() == WITHOUT


def test_a_script_that_fails_or_cannot_be_read_lets_jobs_in(site: Site) -> None:
    site.tell(("root train", "60 90 20000"))
    site.advise("", ("local function advise(job, parts)", "local function advise(job, parts) error('no')"))
    assert site.submit() == WITHOUT
    site.advise("this is no Lua (")
    assert site.submit() == WITHOUT  # by the script before
    site.advise("")
    assert site.submit() == ("UNLIMITED", SAID)


def told_bands(site: Site, node: str, bands: bytes | None, age_s: float = 0.0) -> str:
    """State and reason of a node after one health check with this band file; None: with a folder in its place."""
    file = site.durations.parent / "told"
    if file.is_dir():
        file.rmdir()
    if bands is None:
        file.unlink(missing_ok=True)
        file.mkdir()
    else:
        file.write_bytes(bands)
        os.utime(file, (time.time() - age_s,) * 2)
    environment = {**site.slurm.environment, "SLURMD_NODENAME": node, "FLEETCAST_BANDS": str(file)}
    subprocess.run([SHIPPED / "fleetcast-health"], env=environment, timeout=60, check=True)
    line = site.slurm.run("scontrol", "show", "node", "-o", node)
    reason = re.search(r" Reason=(.*?) \[", line)
    return f"{'DRAIN' in line.partition(' State=')[2].partition(' ')[0]} {reason[1] if reason else ''}"


def test_the_health_check_believes_an_old_band_file_and_no_garbage(site: Site) -> None:
    """Age says nothing: the file is written when a band changes, and is removed when there is no forecast."""
    drained, free = "True [fleetcast] band=high", "False "
    assert told_bands(site, "n1", b"n1 high\nn2 low\n", age_s=3600) == drained
    names = (
        b"",
        b"\xff\x00\xfe\n",
        b"<html>",
        b"NODE\n",
        b"NODE HIGH\n",
        b"NODE0 high\n",
        b"NODEhigh\n",
        b"9" * 500_000,
    )
    for garbage in (*names, b"high NODE\n", b"NODE high;reboot\n", b"NODE low\r\n", b"NODE $(reboot) high\n", None):
        for node, state in (("n1", drained), ("n2", free)):
            assert told_bands(site, node, garbage and garbage.replace(b"NODE", node.encode())) == state, garbage
    assert told_bands(site, "n1", b"n1 low\n", age_s=3600) == free


def test_twenty_thousand_names_hardly_cost_a_submission_time(site: Site) -> None:
    def submitted_ms() -> tuple[float, float]:
        """Medians: of the command, and of slurmctld's part in it, where the script runs."""
        log = site.slurm.folder / "slurmctld.log"
        size, took = log.stat().st_size, []
        for _ in range(TIMES):
            began = time.perf_counter()
            site.slurm.run("sbatch", "--hold", "--output=/dev/null", "--job-name=train", "--wrap=true")
            took.append(1000 * (time.perf_counter() - began))
        inside = re.findall(r"_slurm_rpc_submit_batch_job: .* usec=(\d+)", log.read_bytes()[size:].decode())
        assert len(inside) == TIMES
        return median(took), median(map(int, inside)) / 1000

    site.advise("function slurm_job_submit() return slurm.SUCCESS end function slurm_job_modify() return 0 end")
    assert site.submit() == WITHOUT
    before = submitted_ms()
    began = time.perf_counter()
    site.tell(("root train", "60 90 20000"), *((f"user{n % 97} job-{n}", f"{n} {2 * n} 20000") for n in range(NAMES)))
    print(f"{NAMES:,} names written in {time.perf_counter() - began:.2f} s; ", end="")
    site.advise("")
    assert site.submit() == ("UNLIMITED", SAID)
    after = submitted_ms()
    print(f"sbatch {before[0]:.1f} ms without, {after[0]:.1f} ms with, ", end="")
    print(f"of that in slurmctld {before[1]:.2f} and {after[1]:.2f} ms; ", end="")
    assert max(file.stat().st_size for file in site.durations.glob("??")) < 10_000


def test_the_health_check_drains_by_the_band_file_and_touches_nothing_of_an_operator(site: Site) -> None:
    def state(name: str) -> tuple[bool, str]:
        line = site.slurm.run("scontrol", "show", "node", "-o", name)
        reason = re.search(r" Reason=(.*?)(?: \[\S+@\S+\])?\s*$", line)
        return "DRAIN" in line.partition(" State=")[2].partition(" ")[0], reason[1] if reason else ""

    def bands(**band: str) -> None:
        names = (f"n{number}" for number in range(1, NODES + 1))
        beside = site.bands.with_suffix(".new")
        beside.write_text("".join(f"{name} {band.get(name, 'low')}\n" for name in names))
        beside.replace(site.bands)

    ours = (True, "[fleetcast] band=high")
    site.slurm.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=fan 3 is slow")
    bands(n2="high", n3="high")
    site.slurm.until("n2 is drained", lambda: state("n2") == ours)
    bands(n2="elevated")
    site.bands.unlink()
    bands(n1="high", n2="elevated")
    site.slurm.until("n1 is drained", lambda: state("n1") == ours)
    assert (state("n2"), state("n3"), state("n4")) == (ours, (True, "fan 3 is slow"), (False, ""))
    bands()
    site.slurm.until("both are back", lambda: (state("n1"), state("n2")) == ((False, ""), (False, "")))
    assert state("n3") == (True, "fan 3 is slow")
    site.slurm.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=ticket 7:[fleetcast] said so")
    site.slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=psu swap:")
    bands(n2="high", n4="high")
    site.slurm.until("n4 is drained", lambda: state("n4") == ours)
    bands(n2="high", n3="high")
    site.slurm.until("n4 is back", lambda: state("n4") == (False, ""))
    time.sleep(3 * HEALTH_S)  # they have been looked at since
    theirs = [(True, "ticket 7:[fleetcast] said so"), (False, "psu swap:"), (True, "fan 3 is slow")]
    assert [state(name) for name in ("n1", "n2", "n3")] == theirs
