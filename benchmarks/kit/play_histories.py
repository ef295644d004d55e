"""Job histories for `fleetcast play`, with their file of queues: drawn ones, and spans of Venus.

    python -m fleetcast.benchmarks.kit.play_histories mixed FOLDER --seed 1
    python -m fleetcast.benchmarks.kit.play_histories venus FOLDER --from 2020-04-11

Both write `jobs.csv` and `queues.toml` into the folder, and print the nodes to play them on. Queues a, b and c have
weights of 40, 40 and 20 %, and demand 62, 18 and 20 % of the GPU time. The same arguments write the same bytes.
"""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
import pandas as pd

DATA = Path(os.environ.get("FLEETCAST_DATA", "../shared/data"))
EACH = 8  # GPUs of a node
LOAD = 0.9
WEIGHTS = {"a": 40, "b": 40, "c": 20}
DEMAND = {"a": 0.62, "b": 0.18, "c": 0.20}
VENUS_DAYS = 10

MIXED_JOBS, MIXED_NODES = 1200, 32
SIZES = np.array([1, 2, 4, 8, 16, 32, 64])
RUN_S, RUN_SIGMA = 3600.0, 1.0  # log-normal
LONGEST_LIMIT = 3.0  # times the run time
USERS = 12  # of each queue


def draw_mixed_history(seed: int, small: Sequence[str] = ()) -> pd.DataFrame:
    """Return a drawn history in the plain layout of `fleetcast play`.

    The probability of a size falls with its square root. Jobs arrive at any time alike, and state a limit of 1 to 3
    times their run time. The run times of each queue are scaled so that it demands its share of the GPU time. small:
    queues whose jobs have 8 GPUs at most.
    """
    rng = np.random.default_rng(seed)
    queue = rng.choice(list(DEMAND), MIXED_JOBS, p=list(DEMAND.values()))
    rarity = SIZES**-0.5
    gpus = rng.choice(SIZES, MIXED_JOBS, p=rarity / rarity.sum())
    for name in small:
        gpus[queue == name] = rng.choice(SIZES[SIZES <= EACH], int((queue == name).sum()))
    run_s = np.exp(rng.normal(np.log(RUN_S), RUN_SIGMA, MIXED_JOBS))
    total = float((gpus * run_s).sum())
    for name, share in DEMAND.items():
        mine = queue == name
        run_s[mine] *= share * total / float((gpus * run_s)[mine].sum())
    submit_s = np.sort(rng.uniform(0, total / (MIXED_NODES * EACH * LOAD), MIXED_JOBS))
    users = rng.integers(0, USERS, MIXED_JOBS)
    run_s = np.maximum(1, run_s.round())
    return pd.DataFrame(
        {
            "job": np.arange(MIXED_JOBS),
            "submit_s": submit_s.round(),
            "run_s": run_s,
            "gpus": gpus,
            "user": [f"{name}{number}" for name, number in zip(queue, users, strict=True)],
            "queue": queue,
            "limit_s": (run_s * rng.uniform(1, LONGEST_LIMIT, MIXED_JOBS)).round(),
        }
    )


def cut_venus_span(begin: str) -> tuple[pd.DataFrame, int]:
    """Return ten days of Venus, and how many nodes carry them at a load of `LOAD`. The CRC of its id draws a team."""
    rows = pd.read_parquet(DATA / "jobs" / "venus" / "venus_gpu_jobs.parquet")
    first = pd.Timestamp(begin)
    at = pd.to_datetime(rows["submit_time"])
    rows = rows[(at >= first) & (at < first + pd.Timedelta(days=VENUS_DAYS))]
    edges = np.cumsum(list(DEMAND.values()))[:-1]
    draw = [crc32(str(name).encode()) / 2**32 for name in rows["job_id"]]
    gpu_s = float((rows["service_sec"] * rows["gpu_count"]).sum())
    table = pd.DataFrame(
        {
            "job": rows["job_id"],
            "submit_s": (pd.to_datetime(rows["submit_time"]) - first).dt.total_seconds(),
            "run_s": rows["service_sec"],
            "gpus": rows["gpu_count"],
            "user": "",
            "queue": np.array(list(DEMAND))[np.searchsorted(edges, draw, side="right")],
            "limit_s": np.nan,
        }
    )
    return table, math.ceil(gpu_s / (VENUS_DAYS * 86_400 * EACH * LOAD))


def format_queues(gpus: int, guaranteed: bool) -> str:
    """Return the file of queues for a fleet. guaranteed: whether each queue is guaranteed its share of the GPUs."""
    lines = []
    for name, weight in WEIGHTS.items():
        lines += [f"[queue.{name}]", f"weight = {weight}"]
        if guaranteed:
            lines.append(f"guaranteed = {{gpu = {gpus * weight // 100}}}")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("mixed", "venus"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="of mixed")
    parser.add_argument("--small", action="append", default=[], metavar="QUEUE", help="of mixed: 8 GPUs at most")
    parser.add_argument("--order", default="shortest", help="of the queues")
    parser.add_argument("--from", dest="begin", default="2020-04-11", help="the first day of a span of Venus")
    given = parser.parse_args(words)
    if given.kind == "venus":
        table, nodes = cut_venus_span(given.begin)
    else:
        table, nodes = draw_mixed_history(given.seed, given.small), MIXED_NODES
    given.folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(given.folder / "jobs.csv", index=False)
    queues = f'[policy]\norder = "{given.order}"\n' + format_queues(nodes * EACH, guaranteed=given.kind == "venus")
    (given.folder / "queues.toml").write_text(queues, encoding="utf-8")
    print(f"fleetcast play {given.folder}/jobs.csv --nodes {nodes} --queues {given.folder}/queues.toml")


if __name__ == "__main__":
    main()
