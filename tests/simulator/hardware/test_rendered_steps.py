"""Rendered step times: exact means, the true steps beside, and patterns that repeat with the step."""

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.simulator.hardware.rendered_steps import (
    BYTEDANCE,
    LEVELS,
    MEGATRON,
    RenderedTruth,
    Stretches,
    make_pattern_stretches,
    read_bytedance_run,
    render_steps,
)


def test_a_mean_is_exact_whatever_the_interval() -> None:
    # level 1 for 2 s, then 0 for 1 s, then 4 for 1 s
    stretches = Stretches(np.array([2.0, 3.0, 4.0]), np.array([[1.0], [0.0], [4.0]]))
    assert stretches.compute_means(np.array([0.0, 1.0, 2.5, 4.0]))[:, 0].tolist() == pytest.approx(
        [1.0, 1 / 1.5, 4 / 1.5]
    )


def test_what_a_step_takes_beyond_the_usual_is_a_stall() -> None:
    stretches = make_pattern_stretches(np.array([1.0, 1.0, 10.0]), "data_parallel")
    means = stretches.compute_means(np.array([0.0, 1.0, 2.0, 3.5, 12.0]))
    assert means[0] == pytest.approx(means[1])
    assert means[3] == pytest.approx(np.array(LEVELS["stall"]))


def write_megatron(data: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        ("suite", case, "p", step, usual * rng.normal(1.0, 0.01))
        for case, usual in (("fast", 0.2), ("slow", 3.0))
        for step in range(1, 41)
    ]
    names = ["suite", "test_case", "platform", "step", "iteration_time_s"]
    (data / MEGATRON).parent.mkdir(parents=True)
    pq.write_table(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), data / MEGATRON)


def autocorrelation(values: np.ndarray, lag: int) -> float:
    centred = values - values.mean()
    return float((centred[lag:] * centred[:-lag]).mean() / centred.var())


def test_a_rendered_run_repeats_with_its_period_and_says_when_it_cannot_be_seen(tmp_path: Path) -> None:
    write_megatron(tmp_path)
    folders = render_steps(tmp_path, tmp_path / "out", intervals_s=(0.5, 15.0))
    assert len(folders) == 2 * 2
    truths = {
        folder.name: msgspec.json.decode((folder / "truth.json").read_bytes(), type=RenderedTruth) for folder in folders
    }
    slow = truths["megatron-001-0.5s"]
    assert slow.period_s == pytest.approx(3.0, rel=0.02)
    assert not slow.aliased
    assert truths["megatron-000-0.5s"].aliased
    assert truths["megatron-001-15s"].aliased
    assert slow.steps[1].start_s == pytest.approx(slow.steps[0].duration_s)
    table = pq.read_table(tmp_path / "out/telemetry/rendered/megatron-001-0.5s/telemetry.parquet").to_pandas()
    first = table[table.gpu == 0].sm_active.to_numpy()
    assert autocorrelation(first, 6) > 0.5
    assert autocorrelation(first, 3) < 0
    assert table.power_w.between(60, 700).all()


def test_a_worker_is_busy_when_its_operations_run(tmp_path: Path) -> None:
    # two workers, two steps of 4 s: worker 0 computes for 3 s, worker 1 for 1 s; both communicate in the last one
    rows = [
        (dp, 0, step, operation, start, lasts)
        for step in (5, 6)
        for dp, busy_s in ((0, 3.0), (1, 1.0))
        for operation, start, lasts in (("forward-compute", 0.0, busy_s), ("grads-reduce-scatter", 3.0, 1.0))
    ]
    names = ["dp_rank", "stage", "step", "optype", "start_ts", "duration"]
    (tmp_path / BYTEDANCE).parent.mkdir(parents=True)
    pq.write_table(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), tmp_path / BYTEDANCE)
    run = read_bytedance_run(tmp_path / BYTEDANCE)
    assert run.durations_s.tolist() == [4.0, 4.0]
    activity = [stretches.compute_means(np.arange(0.0, 9.0))[:, 0].tolist() for stretches in run.stretches]
    forward, exchange, wait = (LEVELS[name][0] for name in ("forward", "exchange", "wait"))
    assert activity[0] == pytest.approx([forward, forward, forward, exchange] * 2)
    assert activity[1] == pytest.approx([forward, wait, wait, exchange] * 2)


def test_without_data_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FLEETCAST_DATA"):
        render_steps(tmp_path, tmp_path / "out")


def test_a_torn_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / MEGATRON
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"step_times\.parquet: no table of suite"):
        render_steps(tmp_path, tmp_path / "out")
