"""Place a job of replica groups, hold TorchFT's lighthouse, and let ElasticJob start and stop the groups."""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.integration.outside.torchft.build import load

from fleetcast_client import Client, Reporter  # isort: skip
from fleetcast_client.elastic import ElasticJob  # isort: skip

GROUP = Path(__file__).with_name("replica_group.py")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    job = parser.parse_args().job
    lighthouse = load().LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=500, quorum_tick_ms=100, heartbeat_timeout_ms=2000
    )
    request = {"queue": "lender", "gang": {"min": 2, "desired": 3}, "gpus_per_node": 1}
    decision = Client(os.environ["FLEETCAST_URL"]).place({"request_id": job, **request})

    def start(place: Any, variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, str(GROUP), lighthouse.address(), place["node"]]
        return subprocess.Popen(command, env=os.environ | variables)

    with Reporter(job=job, attempt=1) as report:
        outcome = ElasticJob(report, decision["ranks"], start, request).run()
    lighthouse.shutdown()
    print(f"{job}: {outcome}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
