"""A Kafka cluster on loopback: brokers that are controllers, too, started, killed and started again.

Timeouts are short, so that what a production cluster does in half a minute is over in seconds.
"""

import base64
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from tests.integration.kafka.build import CLUSTER_ID, QUICK, Kafka
from tests.ports import free_port

READY_S = 400.0
QUIET = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true")
# The kernel ends a broker whose suite was killed (PR_SET_PDEATHSIG), which no JVM asks for itself.
ENDS_WITH_US = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
SETTINGS = {
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "auto.create.topics.enable": "false",
    "message.max.bytes": "4194304",
    "replica.fetch.max.bytes": "4194304",
    "num.network.threads": "2",
    "num.io.threads": "2",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "log.cleaner.dedupe.buffer.size": "2097152",
    "log.initial.task.delay.ms": "500",
    "log.retention.check.interval.ms": "500",
    "log.segment.delete.delay.ms": "500",
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",
    "replica.lag.time.max.ms": "3000",
}


class Cluster:
    """Starts on construction and is ready then; `stop` ends its brokers. The nodes are numbered from 1.

    extra: further settings of every broker, with {port} for its own port of the listener `SAFE`, where there is one.
    """

    def __init__(self, kafka: Kafka, folder: Path, brokers: int = 1, extra: Mapping[str, str] | None = None) -> None:
        self.kafka = kafka
        self.folder = folder
        self.ports = {node: free_port() for node in range(1, brokers + 1)}  # the next one is the controller's
        self.safe_ports = {node: free_port() for node in self.ports}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for node in self.ports:
            self._prepare(node, extra or {})
        for node in self.ports:
            self.start(node)
        self.until_ready()

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports.values()]

    def _prepare(self, node: int, extra: Mapping[str, str]) -> None:
        """A disk as the format tool leaves it, in a second less."""
        data = self.folder / f"broker{node}" / "data"
        data.mkdir(parents=True)
        port, copies = self.ports[node], str(min(3, len(self.ports)))
        safe = f",SAFE://127.0.0.1:{self.safe_ports[node]}" if extra else ""
        listeners = f"PLAINTEXT://127.0.0.1:{port}{safe}"
        protocols = "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT" + (",SAFE:SASL_SSL" if extra else "")
        own = {
            "node.id": str(node),
            "listeners": f"{listeners},CONTROLLER://127.0.0.1:{port + 1}",
            "advertised.listeners": listeners,
            "listener.security.protocol.map": protocols,
            "controller.quorum.voters": ",".join(f"{one}@127.0.0.1:{at + 1}" for one, at in self.ports.items()),
            "log.dirs": str(data),
            "default.replication.factor": copies,
            "min.insync.replicas": "2" if len(self.ports) > 2 else "1",
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.replication.factor": copies,
            "share.coordinator.state.topic.replication.factor": copies,
        }
        text = "".join(f"{key}={value}\n" for key, value in (SETTINGS | own | dict(extra)).items())
        (data.parent / "properties").write_text(text)
        (data / self.kafka.formatted.name).write_bytes(self.kafka.formatted.read_bytes())
        disk = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
        about = {"version": "1", "cluster.id": CLUSTER_ID, "node.id": str(node), "directory.id": disk}
        (data / "meta.properties").write_text("".join(f"{key}={value}\n" for key, value in about.items()))

    def start(self, node: int) -> None:
        """A broker that is not running; `until_ready` waits for it."""
        folder = self.folder / f"broker{node}"
        if self.kafka.classes.exists():
            archive = f"-XX:SharedArchiveFile={self.kafka.classes}"
        else:
            archive = f"-XX:ArchiveClassesAtExit={folder / 'classes.jsa'}"
        options = [*QUICK, *QUIET, "-Xmx256m", archive, "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]
        with open(folder / "log", "ab") as log:
            self._processes[node] = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    ENDS_WITH_US,
                    "java",
                    *options,
                    "-cp",
                    self.kafka.class_path,
                    "kafka.Kafka",
                    str(folder / "properties"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def until_ready(self) -> None:
        """Until every running broker knows of all that run. An open port alone says nothing."""
        running = sorted(node for node, process in self._processes.items() if process.poll() is None)
        deadline = time.monotonic() + READY_S
        while any(known_brokers(self.ports[node]) != running for node in running):
            ended = [node for node in running if self._processes[node].poll() is not None]
            assert not ended, self.log(ended[0])
            assert time.monotonic() < deadline, self.log(running[0])
            time.sleep(0.05)

    def log(self, node: int) -> str:
        return (self.folder / f"broker{node}" / "log").read_text(errors="replace")[-4000:]

    def kill(self, node: int) -> None:
        self._end(node, signal.SIGKILL)

    def terminate(self, node: int) -> None:
        self._end(node, signal.SIGTERM)

    def _end(self, node: int, number: signal.Signals) -> None:
        process = self._processes[node]
        process.send_signal(number)
        process.wait(60)

    def stop(self) -> None:
        """The first cluster ever ends in peace and leaves the class archive; the disks of others matter to nobody."""
        running = [process for process in self._processes.values() if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGKILL if self.kafka.classes.exists() else signal.SIGTERM)
        for process in running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for written in self.folder.glob("broker*/classes.jsa"):
            beside = self.kafka.classes.with_suffix(f".{os.getpid()}")
            beside.write_bytes(written.read_bytes())
            beside.replace(self.kafka.classes)


def known_brokers(port: int) -> list[int] | None:
    """The brokers that the one at `port` knows of (Metadata request, version 1); None while it does not answer."""
    request = struct.pack(">hhih", 3, 1, 1, 1) + b"t" + struct.pack(">i", 0)
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            stream = connection.makefile("rb")
            answer = stream.read(struct.unpack(">i", stream.read(4))[0])
        return _brokers(answer)
    except (OSError, struct.error):
        return None


def _brokers(answer: bytes) -> list[int]:
    """correlation id int32, brokers: int32 count × (id int32, host string16, port int32, rack string16 or -1), …"""
    (count,) = struct.unpack_from(">i", answer, 4)
    at, found = 8, []
    for _ in range(count):
        node, host = struct.unpack_from(">ih", answer, at)
        at += 6 + host + 4
        (rack,) = struct.unpack_from(">h", answer, at)
        at += 2 + max(rack, 0)
        found.append(node)
    return sorted(found)
