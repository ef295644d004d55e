"""Run elastic_training.py under torchrun where Fleetcast places it, and resize it as accepted actions say.

    python examples/elastic_launcher.py --job run-7 --folder /shared/run-7 --on "srun -N1 -n1 -w {node}"

After a preemption, start it again with the next --attempt. It goes on from its checkpoint.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from fleetcast_client import Client, Reporter
from fleetcast_client.elastic import ElasticJob

LOOP = Path(__file__).with_name("elastic_training.py")
# If an agent held the rendezvous, the job would end when that agent leaves.
RENDEZVOUS = """
import sys, threading, torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
threading.Event().wait()
"""


def main() -> int:
    """Place the job, run it, and return 0 unless it failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--folder", required=True, help="for the checkpoint, on a shared file system")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rendezvous", default="127.0.0.1:29400", help="address of this host, and a free port")
    parser.add_argument("--on", default="", help="the command that runs another one on {node}")
    parser.add_argument("--request", type=json.loads, default={}, help="further fields of the request, as JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # then the agents are stopped, too

    request = {"gang": {"min": 2, "desired": 3}, "gpus_per_node": 1, **options.request}
    gang, name = request["gang"], f"{options.job}-{options.attempt}"
    identity = {"request_id": name, "job": options.job, "attempt": options.attempt}
    decision = Client(os.environ["FLEETCAST_URL"]).place({**identity, **request})
    print(decision["sentence"], flush=True)
    if decision["outcome"] != "placed":
        return 1
    torchrun = ["torchrun", f"--nnodes={gang['min']}:{gang['desired']}", f"--nproc_per_node={request['gpus_per_node']}"]
    torchrun += [f"--rdzv_id={name}", "--rdzv_backend=c10d", f"--rdzv_endpoint={options.rendezvous}"]
    torchrun += ["--rdzv_conf=is_host=0,last_call_timeout=5", "--monitor_interval=1"]
    torchrun += ["-r1", "-t1"]  # without them torchrun 1.13 ends at once under Python 3.11
    torchrun += ["--max_restarts=1000"]  # each agent that leaves is a restart of the others
    loop = [str(LOOP), options.folder, str(options.steps)]

    def start(place, variables):
        on = shlex.split(options.on.format(node=place["node"]))
        return subprocess.Popen([*on, *torchrun, *loop], env={**os.environ, **variables})

    host, port = options.rendezvous.rsplit(":", 1)
    rendezvous = subprocess.Popen([sys.executable, "-c", RENDEZVOUS, host, port])
    try:
        with Reporter(job=options.job, attempt=options.attempt) as report:
            outcome = ElasticJob(report, decision["ranks"], start, request).run()
    finally:
        rendezvous.kill()
        rendezvous.wait()
    print(f"{options.job}, attempt {options.attempt}: {outcome}", flush=True)
    return int(outcome == "failed")


if __name__ == "__main__":
    sys.exit(main())
