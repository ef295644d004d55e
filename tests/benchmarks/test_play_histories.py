from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fleetcast.benchmarks.kit.play_histories import DEMAND, SIZES, draw_mixed_history, main
from fleetcast.placement.queues.queues_file import read_queues


def test_the_queues_of_a_drawn_history_demand_their_shares_of_the_gpu_time() -> None:
    table = draw_mixed_history(1)
    gpu_s = table["gpus"] * table["run_s"]
    shares = gpu_s.groupby(table["queue"]).sum() / gpu_s.sum()
    assert shares.to_dict() == pytest.approx(DEMAND, abs=1e-3)
    assert set(table["gpus"]) == set(SIZES)
    assert (table["limit_s"] >= table["run_s"]).all()


def test_a_queue_of_small_jobs_has_no_gang() -> None:
    table = draw_mixed_history(1, ["c"])
    assert table["gpus"][table["queue"] == "c"].max() == 8
    assert table["gpus"][table["queue"] == "a"].max() == 64


def test_the_same_arguments_write_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        main(["mixed", str(tmp_path / name), "--seed", "3", "--order", "fifo"])
    for file in ("jobs.csv", "queues.toml"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    assert np.diff(pd.read_csv(tmp_path / "first" / "jobs.csv")["submit_s"]).min() >= 0
    tree = read_queues((tmp_path / "first" / "queues.toml").read_text(encoding="utf-8"))
    assert {node.order for node in tree.list_leaves()} == {"fifo"}
