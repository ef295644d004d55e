"""One replica group of a job: it joins each quorum of TorchFT's lighthouse. The first of a quorum answers actions.

TorchFT copies the weights from a group that runs to one that joins, so a resize needs no checkpoint.
"""

import sys
import threading
import time
from datetime import timedelta

from tests.integration.outside.torchft.build import load

from fleetcast_client import Reporter  # isort: skip

STEP_S, HEARTBEAT_S = 0.3, 0.3
LIMIT = timedelta(seconds=30)


def main(lighthouse: str, name: str) -> None:
    module = load()
    client = module.LighthouseClient(lighthouse, LIMIT)

    def send_heartbeats() -> None:
        while True:
            client.heartbeat(name)
            time.sleep(HEARTBEAT_S)

    threading.Thread(target=send_heartbeats, daemon=True).start()
    report, step = Reporter(), 0
    while True:
        quorum = client.quorum(name, LIMIT, address=name, store_address="", step=step, world_size=1, shrink_only=False)
        groups = sorted(member.replica_id for member in quorum.participants)
        step = 1 + max(member.step for member in quorum.participants)  # as a group that has caught up
        print(f"{name} step {step} with {','.join(groups)}", flush=True)
        with report.step(step):
            time.sleep(STEP_S)
        actions = report.pending_actions() if name == groups[0] else []
        for action in actions:
            report.accept(action)
        if any(action["kind"] == "preempt" for action in actions):
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
