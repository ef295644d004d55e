"""A real Apache Kafka: the broker's jars out of Maven Central, once a version, into the user's cache folder.

    python -m tests.integration.kafka.build

Beside the jars lie two files that make a start short: what a formatted disk of a new cluster holds (the same for every
broker), and an archive of the classes that a broker loads.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.integration.built import BuildError, Say, alone_in, cache_folder, main, step, told

KAFKA, SLF4J = "4.3.1", "1.7.36"
CLUSTER_ID = "ZmxlZXRjYXN0LXRlc3RzLQ"
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


def kafka(say: Say) -> Kafka:
    """The one in the cache, fetched first where it is not there. One process works, others wait. Raises BuildError."""
    found = Kafka(cache_folder(f"kafka-{KAFKA}"))
    if shutil.which("java") is None:
        raise BuildError("Apache Kafka needs java, and there is none on the path")
    with alone_in(found.folder):
        if not (found.jars.is_dir() and found.formatted.exists()):
            say(f"fetching Apache Kafka {KAFKA} into {found.folder}, once: 44 MB, about half a minute")
            with told(say, f"fetching Apache Kafka {KAFKA}"):
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
    step(["mvn", "-B", "-q", "-ntp", "-f", str(pom), *goal])
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
    step(["java", *QUICK, "-Xmx64m", "-cp", kafka.class_path, *tool])
    (scratch / "data" / kafka.formatted.name).replace(kafka.formatted)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main(kafka)
