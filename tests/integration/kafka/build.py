"""A real Apache Kafka: the broker's jars out of Maven Central, once a version, into the user's cache folder.

    python -m tests.integration.kafka.build

Beside the jars lie two files that make a start short: what a formatted disk of a new cluster holds (the same for every
broker), and an archive of the classes that a broker loads.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KAFKA, SLF4J = "4.3.1", "1.7.36"
CLUSTER_ID = "ZmxlZXRjYXN0LXRlc3RzLQ"
SAY_EVERY_S = 20.0
STEP_S = 600.0
QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
POM = f"""<?xml version="1.0" encoding="UTF-8"?>
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>local.fleetcast</groupId>
  <artifactId>broker</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{KAFKA}</version>
    </dependency>
    <dependency>
      <groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>{SLF4J}</version>
    </dependency>
  </dependencies>
</project>
"""

Say = Callable[[str], None]


class BuildError(Exception):
    """Java or Maven is missing, or a step failed; says which, with the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Kafka:
    """A folder with everything that a broker is started from."""

    folder: Path

    @property
    def jars(self) -> Path:
        return self.folder / "jars"

    @property
    def formatted(self) -> Path:
        """The first records of a new cluster's own log."""
        return self.folder / "bootstrap.checkpoint"

    @property
    def classes(self) -> Path:
        """The class archive; the first broker that ends in peace leaves it here."""
        return self.folder / "classes.jsa"

    @property
    def class_path(self) -> str:
        return f"{self.jars}/*"


def cache_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fleetcast" / f"kafka-{KAFKA}"


def kafka(say: Say) -> Kafka:
    """The one in the cache, fetched first where it is not there. One process works, others wait. Raises BuildError."""
    found = Kafka(cache_folder())
    found.folder.mkdir(parents=True, exist_ok=True)
    for program in ("java", "mvn"):
        if shutil.which(program) is None and not (program == "mvn" and found.jars.is_dir()):
            raise BuildError(f"Apache Kafka needs {program}, and there is none on the path")
    with open(found.folder / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (found.jars.is_dir() and found.formatted.exists()):
            say(f"fetching Apache Kafka {KAFKA} into {found.folder}, once: 44 MB, about half a minute")
            with _progress(say):
                _fetch(found)
                _format(found)
    return found


def _fetch(kafka: Kafka) -> None:
    if kafka.jars.is_dir():
        return
    pom, beside = kafka.folder / "pom.xml", kafka.folder / "jars.part"
    shutil.rmtree(beside, ignore_errors=True)
    pom.write_text(POM, encoding="utf-8")
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={beside}"]
    _step(["mvn", "-B", "-q", "-ntp", "-f", str(pom), *goal])
    beside.rename(kafka.jars)


def _format(kafka: Kafka) -> None:
    """Format a disk that nobody will use, and keep what all brokers' disks have in common."""
    if kafka.formatted.exists():
        return
    scratch = kafka.folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    properties = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "listeners": "PLAINTEXT://127.0.0.1:19092,CONTROLLER://127.0.0.1:19093",
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.voters": "1@127.0.0.1:19093",
        "log.dirs": str(scratch / "data"),
    }
    (scratch / "properties").write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    tool = ["kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(scratch / "properties")]
    _step(["java", *QUICK, "-Xmx64m", "-cp", kafka.class_path, *tool])
    (scratch / "data" / kafka.formatted.name).replace(kafka.formatted)
    shutil.rmtree(scratch)


def _step(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=STEP_S)
    if ended.returncode:
        raise BuildError(f"{' '.join(command)[:200]} failed: {(ended.stdout + ended.stderr)[-2000:]}")


@contextmanager
def _progress(say: Say) -> Iterator[None]:
    """A line now and then, so that nobody takes a slow network for a hang."""
    began, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(SAY_EVERY_S):
            say(f"still fetching Apache Kafka {KAFKA}: {time.monotonic() - began:.0f} s")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


if __name__ == "__main__":
    try:
        print(kafka(lambda line: print(line, file=sys.stderr, flush=True)).folder)
    except BuildError as error:
        sys.exit(str(error))
