"""A tiny data folder of our own: what the judge of fingerprints counts."""

from pathlib import Path

import msgspec
import numpy as np
import pandas as pd

from fleetcast.training.judges.fingerprint import evaluate


def made(folder: Path) -> Path:
    for name, period in (("slow", 8.0), ("fast", 1.7)):
        place = folder / "telemetry" / "rendered" / name
        place.mkdir(parents=True)
        time = np.arange(400.0)
        busy = ((time[:, None] + np.arange(20) / 20) % period / period < 0.7).mean(axis=1)
        table = pd.DataFrame({"time_s": time, "gpu": 0, "sm_active": busy, "ib_tx_bytes_s": 1e9 * (1 - busy)})
        table.to_parquet(place / "telemetry.parquet")
        (place / "truth.json").write_bytes(msgspec.json.encode({"interval_s": 1.0, "period_s": period}))
    runs = folder / "telemetry" / "h100-phases"
    runs.mkdir(parents=True)
    for name, level in (("t1", 0.6), ("t4", 0.9), ("i1", 0.2)):
        _recorded(level).to_csv(runs / f"{name}_telemetry.csv.gz", index=False)
    faults = folder / "faults" / "simulated" / "one"
    faults.mkdir(parents=True)
    lines = [
        {"type": "checkpoint", "job": "a", "sequence": n, "time_ms": n * 600_000, "edge": "begin"} for n in range(9)
    ]
    (faults / "events.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    return folder


def _recorded(level: float) -> pd.DataFrame:
    phase = np.repeat(["init", "loading", "warmup", "steady", "cooldown"], [4, 10, 30, 100, 6])
    busy = np.repeat([0.0, 0.0, level, level, 0.0], [4, 10, 30, 100, 6])
    memory = np.concatenate([np.zeros(4), np.linspace(1000, 20_000, 10), np.full(130, 20_000.0), np.full(6, 900.0)])
    return pd.DataFrame(
        {
            "timestamp": np.arange(150.0),
            "phase": phase,
            "gpu": 0,
            "power_w": 100 + 500 * busy,
            "mem_used_mib": memory,
            "sm_active": busy,
            "tensor_active": busy * level,
            "pcie_tx_bytes_s": 1e6,
            "pcie_rx_bytes_s": 1e6,
            "nvlink_tx_bytes_s": 1e9 * busy * (level > 0.3),
            "nvlink_rx_bytes_s": 1e9 * busy,
        }
    )


def test_periods_phases_and_checkpoints_are_judged_beside_baselines(tmp_path: Path) -> None:
    data = made(tmp_path)
    results = evaluate(data, data, 1, lambda _: None)
    value = {(row.metric, row.method): (row.value, row.n) for row in results.select(series="all")}
    assert value["period_within_2pct", "ours"] == (1.0, 1)
    assert value["aliased_unknown", "ours"] == (1.0, 1)
    assert value["aliased_unknown", "largest_line"] == (0.0, 1)
    assert value["checkpoint_hit", "ours"] == (1.0, 7)
    ours, most = value["phase_f1", "ours"][0], value["phase_f1", "most_frequent"][0]
    assert ours is not None
    assert most is not None
    assert ours > 0.9 > most
    assert value["class_accuracy", "ours"] == (1.0, 3)
    assert results.skipped == []


def test_what_a_folder_lacks_is_said(tmp_path: Path) -> None:
    results = evaluate(tmp_path, tmp_path, 1, lambda _: None)
    assert results.rows == []
    assert len(results.skipped) == 3


def test_odd_files_are_skipped_with_a_reason_and_the_others_are_judged(tmp_path: Path) -> None:
    data = made(tmp_path)
    rendered = data / "telemetry" / "rendered"
    for name, truth in (("torn", b'{"interval_s": 1.0, "per'), ("never", b'{"interval_s": 0, "period_s": 3}')):
        (rendered / name).mkdir()
        (rendered / name / "truth.json").write_bytes(truth)
    (rendered / "bare").mkdir()
    (rendered / "bare" / "truth.json").write_bytes(b'{"interval_s": 1.0, "period_s": 8.0}')
    runs = data / "telemetry" / "h100-phases"
    (runs / "t8_telemetry.csv.gz").write_bytes(b"\x1f\x8b no gzip at all")
    words = _recorded(0.5).astype({"timestamp": object})
    words.loc[:, "timestamp"] = "noon"
    words.to_csv(runs / "t9_telemetry.csv.gz", index=False)
    other = data / "faults" / "simulated" / "two"
    other.mkdir()
    (other / "events.jsonl").write_bytes(b'{"type": "checkpoint", "job": 7}\n')
    results = evaluate(tmp_path / "none", data, 1, lambda _: None)
    value = {(row.metric, row.method, row.series): row.value for row in results.rows}
    assert value["period_within_2pct", "ours", "all"] == value["checkpoint_hit", "ours", "all"] == 1.0
    assert [text.split(" cannot be used")[0] for text in results.skipped] == [
        "telemetry/rendered: 3 of 5",
        "faults/simulated: 1 of 2",
        "telemetry/h100-phases: 2 of 5",
    ]


def test_a_template_is_better_than_the_level_where_steps_repeat(tmp_path: Path) -> None:
    results = evaluate(tmp_path / "none", made(tmp_path), 1, lambda _: None)
    value = {(row.method, row.series): row.value for row in results.rows if row.metric == "expected_pinball"}
    ours, level, last = (value[method, "1.5_cycles"] for method in ("ours", "level", "last_value"))
    assert ours is not None
    assert level is not None
    assert last is not None
    assert ours < level / 2 < last / 2
