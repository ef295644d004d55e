"""For data scientists: fit run times on a history, and judge them out of sample.

    python examples/retrain.py                                # a history that is made here, in seconds
    python examples/retrain.py --data ~/data --set jobs/ricc  # yours: a folder of job tables (submit_s, run_s, user, …)

It does what `fleetcast train duration` does, and prints what the gate decided. A version that is better serves.
Versions are stored in `--models`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

COMMAND = shutil.which("fleetcast") or str(Path(sys.executable).with_name("fleetcast"))


def write_history(folder: Path, jobs: int = 600) -> None:
    """Write a table of jobs of eight users, each with a typical run time."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, 8, jobs)
    table = pd.DataFrame(
        {
            "job_id": np.arange(jobs),
            "submit_s": np.sort(rng.uniform(0, 30 * 86_400, jobs)).round(),
            "wait_s": 5.0,
            "run_s": np.exp(rng.normal(5.5 + 0.5 * user, 0.6)).round(),
            "procs_alloc": rng.choice([1, 8], jobs),
            "user": user,
            "group": user % 2,
            "status": 1,
        }
    )
    (folder / "jobs/made").mkdir(parents=True)
    table.to_parquet(folder / "jobs/made/made.parquet")


def run_fleetcast(*words: str) -> str:
    done = subprocess.run([COMMAND, *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path)
    options.add_argument("--set", default="jobs/made")
    options.add_argument("--models", type=Path, default=Path("var/models"))
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if chosen.data is None:
            write_history(Path(scratch))
        data = chosen.data or Path(scratch)
        run_fleetcast("train", "duration", "--data", str(data), "--set", chosen.set, "--models", str(chosen.models))
    listed = json.loads(run_fleetcast("models", "list", "duration", "--folder", str(chosen.models), "--json", "-"))
    for row in listed["rows"]:
        print(f"version {row['version']} {'serves' if row['serves'] else 'does not serve'}: {row['sentence']}")


if __name__ == "__main__":
    main()
