"""A real Slurm on loopback: slurmctld, some slurmd with made-up GPUs, and slurmdbd over MariaDB. Debian's packages.

No systemd, no cgroups, no munge; as root. Every daemon has its own port and runs in the foreground in a folder of its
own, so several clusters do not meet. The GPUs are plain files: Slurm hands out their indices all the same.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_ports
from tests.programs import needed

NODES, GPUS, CPUS = 4, 4, 16
START_S = 200.0
REQUEUE_DELAY_S = 20  # that a requeued job waits before it starts again; by default two minutes
SYSTEM_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")  # of mariadb-server-core
SBIN = "/usr/sbin:/sbin"


class SlurmCluster:
    """Starts on construction, nodes n1, n2, …; `stop` ends what this object started, by pid.

    accounting: with slurmdbd, so that sacct works. jobcomp: where completions are posted to. hook: the shell that
    slurmctld runs before and after each job, and for its completion. `zone`: the local time of its daemons.
    settings: more lines of slurm.conf. billing: what of a job counts as its use. more_nodes: a list of nodes that are
    down and of no partition. features: of the others. preempt: by what Slurm preempts, or "none".
    """

    def __init__(
        self,
        folder: Path,
        *,
        accounting: bool = True,
        jobcomp: str = "",
        hook: str = "",
        zone: str = "UTC",
        settings: tuple[str, ...] = (),
        billing: str = "",
        more_nodes: str = "",
        features: str = "",
        preempt: str = "partition_prio",
    ) -> None:
        if SBIN not in os.environ["PATH"]:
            os.environ["PATH"] += f":{SBIN}"
        if os.geteuid() != 0:
            pytest.skip("slurmd starts jobs as their users: only root can")
        for program in ("slurmctld", "slurmd", "sbatch", *(["slurmdbd", "mariadbd"] if accounting else [])):
            needed(program)
        self.folder = folder
        self.accounting = accounting
        self.jobcomp = jobcomp
        self.hook = hook
        self.settings = settings
        self.preempt = preempt
        self.more_nodes = more_nodes
        self.features = f"Feature={features} " if features else ""
        self.billing = f"TRESBillingWeights={billing}" if billing else ""
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "TZ": zone}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._database, self._dbd, self._ctld, *self._nodes = free_ports(3 + NODES)
        (folder / "state").mkdir(parents=True)
        self._configure()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _configure(self) -> None:
        host = socket.gethostname()
        devices = []
        for gpu in range(GPUS):
            (self.folder / f"gpu{gpu}").touch()
            devices.append(str(self.folder / f"gpu{gpu}"))
        self._write("gres.conf", [f"NodeName=n[1-{NODES}] Name=gpu Type=h100 File={self.folder}/gpu[0-{GPUS - 1}]"])
        self._write("cgroup.conf", ["CgroupAutomount=no"])
        lines = [
            *("ClusterName=made", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={self._ctld}"),
            *("AuthType=auth/none", "CredType=cred/none", "SlurmUser=root", "SlurmdUser=root", "MpiDefault=none"),
            f"AuthInfo=cred_expire={REQUEUE_DELAY_S}",
            *("ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SwitchType=switch/none"),
            *(f"StateSaveLocation={self.folder}/state", f"SlurmdSpoolDir={self.folder}/%n"),
            *(f"SlurmctldPidFile={self.folder}/ctld.pid", f"SlurmdPidFile={self.folder}/%n.pid"),
            *("SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "GresTypes=gpu", "ReturnToService=1"),
            *("CommunicationParameters=NoCtldInAddrAny,NoInAddrAny", "SlurmdParameters=config_overrides"),
            *("SchedulerType=sched/backfill", "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0"),
            f"PreemptType=preempt/{self.preempt}",
            f"PreemptMode={'OFF' if self.preempt == 'none' else 'REQUEUE'}",
            *("KillWait=1", "MinJobAge=60"),
            *("JobRequeue=1", "SlurmdTimeout=15", "SlurmctldTimeout=10", "InactiveLimit=0", "UnkillableStepTimeout=10"),
            *("OverTimeLimit=0", "JobAcctGatherType=jobacct_gather/none", "MailProg=/bin/true"),
            *self._addons(),
            *self.settings,
        ]
        for number, port in enumerate(self._nodes, start=1):
            lines.append(
                f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} "
                f"RealMemory=4000 Gres=gpu:h100:{GPUS} {self.features}State=UNKNOWN"
            )
        if self.more_nodes:
            lines.append(f"NodeName={self.more_nodes} NodeAddr=127.0.0.1 CPUs=1 RealMemory=100 State=DOWN")
        lines += [
            f"PartitionName=train Nodes=n[1-{NODES}] Default=YES MaxTime=INFINITE State=UP PriorityTier=10 "
            + self.billing,
            f"PartitionName=urgent Nodes=n[1-{NODES}] MaxTime=INFINITE State=UP PriorityTier=20 " + self.billing,
        ]
        self._write("slurm.conf", lines)

    def _addons(self) -> list[str]:
        lines = []
        if self.jobcomp:
            lines += ["JobCompType=jobcomp/elasticsearch", f"JobCompLoc={self.jobcomp}"]
        if self.hook:
            self._write("hook.sh", ["#!/bin/sh", self.hook], mode=0o755)
            lines += [f"PrologSlurmctld={self.folder}/hook.sh", f"EpilogSlurmctld={self.folder}/hook.sh"]
            lines += ["JobCompType=jobcomp/script", f"JobCompLoc={self.folder}/hook.sh"]
        if self.accounting:
            lines += [
                *("AccountingStorageType=accounting_storage/slurmdbd", "AccountingStorageHost=127.0.0.1"),
                "AccountingStorageTRES=gres/gpu",
                f"AccountingStoragePort={self._dbd}",
            ]
            self._write(
                "slurmdbd.conf",
                [
                    *("AuthType=auth/none", "DbdHost=localhost", "DbdAddr=127.0.0.1", f"DbdPort={self._dbd}"),
                    *("SlurmUser=root", f"PidFile={self.folder}/dbd.pid", "StorageType=accounting_storage/mysql"),
                    *("StorageHost=127.0.0.1", f"StoragePort={self._database}", "StorageUser=root", "StorageLoc=made"),
                ],
                mode=0o600,
            )
        return lines

    def _write(self, name: str, lines: list[str], mode: int = 0o644) -> None:
        (self.folder / name).write_text("\n".join(lines) + "\n")
        (self.folder / name).chmod(mode)

    def _start(self) -> None:
        if self.accounting:
            self._start_accounting()
        self.start_controller()
        for number in range(1, NODES + 1):
            self.start_node(f"n{number}")
        self.until("all nodes idle", self._all_idle, START_S)

    def _all_idle(self) -> bool:
        states = self.states()
        return all(states.get(f"n{number}") == "idle" for number in range(1, NODES + 1))

    def _start_accounting(self) -> None:
        data = self.folder / "mariadb"
        settings = ["--no-defaults", f"--datadir={data}", "--user=root", "--innodb-buffer-pool-size=32M"]
        settings += ["--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0", "--skip-grant-tables"]
        data.mkdir()
        (data / "mysql").mkdir()
        begin = self.folder / "begin.sql"
        begin.write_text(_with_procedures(SYSTEM_TABLES.read_text(encoding="utf-8")), encoding="utf-8")
        self.spawn(
            "mariadbd",
            *("mariadbd", *settings, f"--port={self._database}", "--bind-address=127.0.0.1"),
            *(f"--socket={self.folder}/mariadb.sock", f"--init-file={begin}"),
        )
        self.until("the database answers", lambda: _answers(self._database), START_S)
        self.spawn("slurmdbd", "slurmdbd", "-D")
        self.until("slurmdbd answers", lambda: _answers(self._dbd), START_S)
        self.run("sacctmgr", "-i", "add", "cluster", "made")
        self.run("sacctmgr", "-i", "add", "account", "research", "cluster=made")
        self.run("sacctmgr", "-i", "add", "user", "root", "account=research")

    def spawn(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                list(command), stdout=log, stderr=log, env=self.environment, start_new_session=True, cwd=self.folder
            )

    def start_controller(self) -> None:
        self.spawn("slurmctld", "slurmctld", "-D")

    def start_node(self, node: str) -> None:
        (self.folder / node).mkdir(exist_ok=True)
        self.spawn(node, "slurmd", "-D", "-N", node)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def saved(self) -> float:
        """When slurmctld last wrote down which jobs there are, in seconds since 1970; 0 before the first time."""
        state = self.folder / "state" / "job_state"
        return state.stat().st_mtime if state.exists() else 0.0

    def run(self, *command: str) -> str:
        """Run a command and return what it prints. Raises AssertionError with its message if the command fails."""
        done = subprocess.run(
            command, capture_output=True, env=self.environment, cwd=self.folder, timeout=60, check=False
        )
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr.decode(errors='replace')}"
        return done.stdout.decode(errors="replace")

    def submit(self, script: str, *options: str) -> str:
        """The id of a batch job that runs `script` in a shell."""
        given = ["--output=/dev/null", "--account=research"] if self.accounting else ["--output=/dev/null"]
        return self.run("sbatch", "--parsable", *given, *options, f"--wrap={script}").strip()

    def states(self) -> dict[str, str]:
        """Node → state as sinfo names it; empty while nobody answers."""
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %T"], capture_output=True, env=self.environment, timeout=60, check=False
        )
        return dict(line.split() for line in done.stdout.decode().splitlines())

    def job(self, number: str) -> dict[str, Any]:
        """A job as squeue's JSON has it."""
        rows = json.loads(self.run("squeue", "--json"))["jobs"]
        return next((row for row in rows if str(row["job_id"]) == number), {})

    def until(self, what: str, check: Callable[[], Any], limit_s: float = 100.0) -> Any:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if answer := check():
                return answer
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {limit_s:.0f} s\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in self._log_files())

    def _log_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.log"))

    def stop(self) -> None:
        """Jobs first, else their steps outlive the daemons."""
        if "slurmctld" in self.processes:
            subprocess.run(
                ["scancel", "--user=root"], env=self.environment, timeout=20, check=False, capture_output=True
            )
        for name in reversed(list(self.processes)):
            process = self.processes.pop(name)
            process.terminate()
            try:
                process.wait(3)  # slurmctld first ends the rest of its plugin, for up to half a minute
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _with_procedures(system_tables: str) -> str:
    """The statement that makes the table of procedures: without them slurmdbd loses associations below the first."""
    found = re.search(r"CREATE TABLE IF NOT EXISTS proc \(.*?;", system_tables, re.DOTALL)
    assert found, f"{SYSTEM_TABLES}: no table of procedures"
    return "USE mysql;\n" + " ".join(found[0].split()) + "\n"


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
