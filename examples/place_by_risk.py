"""For schedulers: which nodes to avoid, how long the job would run, and where it should go.

    pip install ./sdk
    python examples/place_by_risk.py --url http://127.0.0.1:8080 --job train-42 --gang 2 --gpus 8
    python examples/place_by_risk.py --url http://127.0.0.1:8080 --job train-42 --gang 2 --gpus 8 --place

Without `--place` nothing is stored. FLEETCAST_TOKEN names a token with the scopes `read` and `place`.
"""

import argparse
import sys

from fleetcast_client import ApiError, Client, Unreachable


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", default="http://127.0.0.1:8080")
    options.add_argument("--job", required=True)
    options.add_argument("--gang", type=int, default=1)
    options.add_argument("--gpus", type=int, default=8, help="GPUs of each member")
    options.add_argument("--place", action="store_true", help="promise the GPUs to this job")
    chosen = options.parse_args()
    fleet = Client(chosen.url)

    for row in fleet.risk(horizon_s=86_400, least=0.2)["rows"]:
        print(f"avoid {row['node']}: {row['p']:.0%} within a day. {row['reason']}")
    request = {"request_id": chosen.job, "job": chosen.job, "gang": chosen.gang, "gpus_per_node": chosen.gpus}
    if not chosen.place:
        request["dry_run"] = True
    decision = fleet.place(request)  # the same request_id gets the same decision, so a retry is safe
    print(decision["sentence"])
    for rank in decision["ranks"]:
        print(f"rank {rank['rank']}: {rank['node']} GPUs {rank['gpus']}")
    if decision["outcome"] != "placed":
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except (ApiError, Unreachable) as error:
        sys.exit(str(error))
