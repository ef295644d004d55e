"""`fleetcast evaluate` on nonsense: a clear line and the exit code of the contract, never a traceback."""

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError, FleetcastError

DAYS = pd.to_datetime("2020-01-01") + pd.to_timedelta(np.arange(3), "D")
DEMAND = {"time": DAYS, "active": [1.0, 2.0, 3.0]}
JOBS = {"submit_s": [0.0, 5.0, 9.0], "run_s": [1.0, 2.0, 3.0], "procs_alloc": 1, "time_req_s": 60}
NONSENSE = {
    "nothing at all": b"",
    "no rows": b"time,active,submit_s,run_s\n",
    "other columns": b"colour,size\nblue,3\n",
    "no gzip": gzip.compress(b"time,active\n" * 99)[:40],
    "no UTF-8": b"\xff\xfe\x00time,active\n\x80,1\n",
    "no Parquet": b"PAR1 and no more",
    "no times": pd.DataFrame({**DEMAND, **JOBS, "time": None, "submit_s": np.nan}),
    "negative": pd.DataFrame({**DEMAND, **JOBS, "active": -1.0, "procs_alloc": -1}),
    "words for numbers": pd.DataFrame({**DEMAND, **JOBS, "active": "many", "run_s": "long"}),
    "infinite": pd.DataFrame({**DEMAND, **JOBS, "time": np.inf, "run_s": np.inf}),
    "three rows": pd.DataFrame({**DEMAND, **JOBS}),
    "one row thrice": pd.DataFrame({**DEMAND, **JOBS}).iloc[[0, 0, 0]],
}


def put(folder: Path, content: bytes | pd.DataFrame, name: str) -> None:
    ending = {"no gzip": "csv.gz", "no Parquet": "parquet"}.get(name, "csv")
    for parent in ("demand/odd", "jobs/odd"):
        (folder / parent).mkdir(parents=True)
        path = folder / parent / f"table.{ending}"
        path.write_bytes(content if isinstance(content, bytes) else content.to_csv(index=False).encode())


def invoke(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.parametrize("task", ["demand", "duration", "start"])
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_told_and_nothing_is_judged(task: str, name: str, tmp_path: Path) -> None:
    put(tmp_path / "train", NONSENSE[name], name)
    put(tmp_path / "test", NONSENSE[name], name)
    with pytest.raises(FleetcastError, match="nothing to judge"):
        invoke("evaluate", task, "--train", tmp_path / "train", "--test", tmp_path / "test")


@pytest.mark.parametrize(("task", "name"), [("backtest", "no times"), ("drift", "no gzip")])
@pytest.mark.parametrize("kind", ["demand", "duration"])
def test_a_back_test_and_a_drift_report_of_nonsense_say_so(task: str, name: str, kind: str, tmp_path: Path) -> None:
    put(tmp_path / "data", NONSENSE[name], name)
    words = (task, kind, "--data", tmp_path / "data", "--state", tmp_path)
    with pytest.raises(FleetcastError, match=r"too little|no (series|job)"):
        invoke(*words, *(("--since", "2020-01-02") if task == "drift" else ()))


@pytest.mark.parametrize(
    ("command", "option", "says"),
    [
        (("evaluate", "demand", "--train", "{here}", "--test", "{here}"), "--json", "make it first: mkdir -p"),
        (("evaluate", "start", "--train", "{here}", "--test", "{here}"), "--predictions", "make it first"),
        (("backtest", "demand", "--data", "{here}"), "--html", "make it first"),
        (("drift", "demand", "--data", "{here}", "--since", "2020-01-01"), "--json", "make it first"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_any_work(
    command: tuple[str, ...], option: str, says: str, tmp_path: Path
) -> None:
    words = [word.format(here=tmp_path) for word in command]
    with pytest.raises(ConfigError, match=f"{option} .*{says}"):
        invoke(*words, option, tmp_path / "missing" / "file")
    with pytest.raises(ConfigError, match=f"{option} .*is a folder"):
        invoke(*words, option, tmp_path)


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for words in (
        ("evaluate", "demand", "--train", file, "--test", tmp_path),
        ("evaluate", "demand", "--train", tmp_path, "--test", file),
        ("backtest", "demand", "--data", file),
    ):
        with pytest.raises(ConfigError, match="is a file, not a folder"):
            invoke(*words)


def test_what_fits_nothing_needs_no_train_folder(tmp_path: Path) -> None:
    with pytest.raises(FleetcastError, match="nothing to judge"):
        invoke("evaluate", "straggler", "--test", tmp_path)
    with pytest.raises(ConfigError, match="--train: demand needs a data folder"):
        invoke("evaluate", "demand", "--test", tmp_path)
