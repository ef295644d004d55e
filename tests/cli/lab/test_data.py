import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fleetcast.cli.lab.data import app, find_data_folder
from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.ingest.job_tables import read_job_table

runner = CliRunner()

HELIOS = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
11,u1,vcA,8,64,1,COMPLETED,2020-04-01 10:00:00,2020-04-01 10:05:00,2020-04-01 11:05:00,3600,300
12,u2,vcA,0,16,1,COMPLETED,2020-04-01 10:01:00,2020-04-01 10:01:00,2020-04-01 10:02:00,60,0
13,u2,vcB,1,8,1,CANCELLED,2020-04-01 12:00:00,None,None,0,0
14,u3,vcB,two,8,1,FAILED,2020-04-01 12:00:00,None,None,0,0
15,u3,"vc
16,u3,vcB,2,8,1,FAILED,yesterday,None,None,0,0
"""

SWF = """; UnixStartTime: 1272639600
; MaxNodes: 1024
1 0 5 222 80 -1 -1 80 14400 1200000 1 1 1 -1 1 -1 -1 -1
2 1136 0 244682 128 1.5 -1 128 259200 1048576 1 2 2 -1 1 -1 -1 -1
3 1160 0 10 128
4 1170 0 ten 128 -1 -1 128 259200 1048576 1 2 2 -1 1 -1 -1 -1
"""

SLURM = """JobID|JobIDRaw|User|State|Submit|Start|End|AllocTRES|AllocGRES|NNodes|Comment
7|7|ann|COMPLETED|2026-01-01T10:00:00|2026-01-01T10:10:00|2026-01-01T11:10:00|cpu=1,gres/gpu=16,node=2||2|fine
7.batch|7.batch||COMPLETED|2026-01-01T10:00:00|2026-01-01T10:10:00|2026-01-01T11:10:00|cpu=1||1|
7|7|ann|COMPLETED|2026-01-01T10:00:00|2026-01-01T10:10:00|2026-01-01T11:10:00|cpu=1,gres/gpu=16,node=2||2|fine
8|8|bob|CANCELLED by 5|2026-01-01T10:30:00|2026-01-01T10:40:00|2026-01-01T10:41:00|cpu=1|gpu:4|1|two
lines
9|9|bob|RUNNING|2026-01-01T10:30:00|2026-01-01T10:40:00|Unknown|cpu=1,gres/gpu=1||1|
10|10|bob|COMPLETED|2026-01-01T10:30:00|2026-01-01T10:40:00|2026-01-01T10:45:00|cpu=4||1|
8|8|bob|COMPLETED|2026-01-01T10:30:00|2026-01-01T12:00:00|2026-01-01T12:30:00|cpu=1,gres/gpu:h100=4||1|again
"""


def invoke(*words: object) -> str:
    result = runner.invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "jobs" / "venus").mkdir(parents=True)
    (folder / "demand" / "venus").mkdir(parents=True)
    (folder / "jobs" / "ricc").mkdir()
    times = pd.to_datetime(["2020-06-01", "2020-07-01", "2020-07-02", "2020-06-02"])
    jobs = pd.DataFrame({"job_id": list("abcd"), "submit_time": times, "gpu_count": [1, 8, 8, 16]})
    jobs.to_parquet(folder / "jobs" / "venus" / "venus_gpu_jobs.parquet")
    pd.DataFrame({"time": times, "running_gpu_num": [1, 2, 3, 4]}).to_csv(
        folder / "demand" / "venus" / "series.csv", index=False
    )
    pd.DataFrame({"job_id": [1, 2], "submit_s": [0, 500]}).to_parquet(folder / "jobs" / "ricc" / "ricc_2010.parquet")
    (folder / "jobs" / "ricc" / "NOTICE.txt").write_text("thanks")
    return folder


def test_list_says_what_is_here_and_where_the_rest_is_published(data):
    output = invoke("list", "--data", data)
    assert "3 sets" in output
    assert "4 rows  2020-06-01 to 2020-07-02" in output
    assert "1 other files" in output
    assert "https://github.com/alibaba/ServeGen" in output


def test_list_of_a_missing_folder_names_every_set(tmp_path):
    output = invoke("list", "--data", tmp_path / "nowhere")
    assert "no data sets here" in output
    assert "jobs/venus" in output


def test_the_data_folder_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FLEETCAST_DATA", str(tmp_path))
    assert find_data_folder() == tmp_path
    monkeypatch.delenv("FLEETCAST_DATA")
    assert find_data_folder().parts[-2:] == ("shared", "data")


def test_split_by_time_keeps_layout_and_columns(data, tmp_path):
    out = tmp_path / "split"
    output = invoke("split", "jobs/venus", "--at", "2020-07-01", "--out", out, "--data", data)
    assert "train 2 rows, test 2 rows" in output
    train = pd.read_parquet(out / "train" / "jobs" / "venus" / "venus_gpu_jobs.parquet")
    test = pd.read_parquet(out / "test" / "jobs" / "venus" / "venus_gpu_jobs.parquet")
    assert train.job_id.tolist() == ["a", "d"]
    assert test.job_id.tolist() == ["b", "c"]
    assert list(train.columns) == list(test.columns)


def test_held_out_rows_go_to_test_with_their_past(data, tmp_path):
    out = tmp_path / "split"
    words = ("--hold-out", "gpu_count=16", "--hold-out", "gpu_count=1")
    invoke("split", "jobs/venus", "--at", "2020-07-02", *words, "--out", out, "--data", data)
    test = pd.read_parquet(out / "test" / "jobs" / "venus" / "venus_gpu_jobs.parquet")
    assert test.job_id.tolist() == ["a", "c", "d"]


def test_a_clock_in_seconds_is_split_at_a_number_and_other_files_are_copied(data, tmp_path):
    out = tmp_path / "split"
    output = invoke("split", "ricc", "--at", "100", "--out", out, "--data", data)
    assert "ricc_2010.parquet: train 1 rows, test 1 rows" in output
    assert (out / "test" / "jobs" / "ricc" / "NOTICE.txt").read_text() == "thanks"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("venus", "--at", "2020-07-01"), "name it in full"),
        (("nothing", "--at", "2020-07-01"), "there are: demand/venus"),
        (("jobs/venus", "--at", "soon"), "expected a time"),
        (("ricc", "--at", "2020-07-01"), "number from 0 to 500"),
        (("jobs/venus", "--hold-out", "vc=a"), "no column 'vc'"),
        (("jobs/venus", "--hold-out", "gpu_count=3"), "no row has it"),
        (("jobs/venus", "--hold-out", "gpu_count"), "expected KEY=VALUE"),
        (("jobs/venus",), "nothing to split by"),
    ],
)
def test_a_wrong_split_is_refused_with_the_reason(data, tmp_path, words, reason):
    with pytest.raises(ConfigError, match=reason):
        invoke("split", *words, "--out", tmp_path / "split", "--data", data)
    assert not (tmp_path / "split").exists()


def test_a_split_never_overwrites_another(data, tmp_path):
    words = ("split", "ricc", "--at", "100", "--out", tmp_path / "split", "--data", data)
    invoke(*words)
    with pytest.raises(ConfigError, match="exists"):
        invoke(*words)


def test_helios_import_keeps_further_columns_and_counts_what_it_skips(tmp_path):
    (tmp_path / "cluster_log.csv").write_text(HELIOS)
    (tmp_path / "cluster_gpu_number.csv").write_text("date,vcA,vcB,total\n2020-04-01,512,552,1064\nbroken,1,2\n")
    output = invoke("import", "helios", tmp_path, "--name", "venus", "--out", tmp_path / "data")
    table = pd.read_parquet(tmp_path / "data" / "jobs" / "venus" / "venus_gpu_jobs.parquet")
    assert table.gpu_count.tolist() == [8, 1]
    assert table.arrival_s.tolist() == [0.0, 7200.0]
    assert table.vc.tolist() == ["vcA", "vcB"]
    assert table.start_time.isna().tolist() == [False, True]
    for reason in ("1: no GPUs", "1: gpu_num", "1: field count", "1: submit_time"):
        assert f"skipped {reason}" in output
    numbers = pd.read_parquet(tmp_path / "data" / "jobs" / "venus" / "venus_gpu_number.parquet")
    assert numbers.gpus.tolist() == [512, 552, 1064]


def test_an_imported_helios_log_serves_as_the_trace(tmp_path):
    from fleetcast.simulator.days.traces import load_trace

    (tmp_path / "cluster_log.csv").write_text(HELIOS)
    invoke("import", "helios", tmp_path / "cluster_log.csv", "--name", "venus", "--out", tmp_path / "data")
    trace = load_trace(tmp_path / "data", nodes=4, gpus_per_node=8, now_ms=1_700_000_000_000)
    assert trace.source == "venus"
    assert trace.user == ("u1", "u2")


def test_swf_import_reads_gzip_and_keeps_the_header(tmp_path):
    path = tmp_path / "log.swf.gz"
    path.write_bytes(gzip.compress(SWF.encode()))
    output = invoke("import", "swf", path, "--name", "ricc", "--out", tmp_path / "data")
    table = pd.read_parquet(tmp_path / "data" / "jobs" / "ricc" / "ricc.parquet")
    assert table.submit_s.tolist() == [0, 1136]
    assert table.cpu_time_avg.tolist() == [-1.0, 1.5]
    assert "MaxNodes: 1024" in (tmp_path / "data" / "jobs" / "ricc" / "header.txt").read_text()
    assert "skipped 1: field count" in output
    assert "skipped 1: run_s" in output


def test_a_cut_gzip_keeps_what_came_before_the_cut(tmp_path):
    path = tmp_path / "log.swf.gz"
    packed = gzip.compress(SWF.encode() * 2000)
    path.write_bytes(packed[: len(packed) // 2])
    output = invoke("import", "swf", path, "--out", tmp_path / "data")
    assert "skipped 1: broken gzip" in output


def test_slurm_import_reads_both_ways_of_naming_gpus(tmp_path):
    path = tmp_path / "sacct.txt"
    path.write_bytes(SLURM.encode() + b"\xff\xfe|broken\n")
    output = invoke("import", "slurm", path, "--out", tmp_path / "data")
    table = pd.read_parquet(tmp_path / "data" / "jobs" / "slurm" / "slurm_gpu_jobs.parquet")
    assert table.job_id.tolist() == ["7", "8", "9", "8#1"]
    assert table.gpu_count.tolist() == [16, 4, 1, 4]
    assert np.array_equal(table.service_sec, [3600.0, 60.0, np.nan, 1800.0], equal_nan=True)
    assert table.state.tolist() == ["COMPLETED", "CANCELLED", "RUNNING", "COMPLETED"]
    assert table.slurm_comment.tolist() == ["fine", "two", "", "again"]
    for reason in ("1: job step", "1: duplicate", "1: no GPUs", "2: field count"):
        assert f"skipped {reason}" in output


def test_slurm_import_reads_the_two_character_delimiter(tmp_path):
    path = tmp_path / "sacct.txt"
    path.write_text(SLURM.replace("fine", "a|b").replace("|", "|#").replace("a|#b", "a|b"))
    invoke("import", "slurm", path, "--out", tmp_path / "data")
    table = pd.read_parquet(tmp_path / "data" / "jobs" / "slurm" / "slurm_gpu_jobs.parquet")
    assert table.slurm_comment.tolist() == ["a|b", "two", "", "again"]


def test_a_file_of_another_layout_is_refused(tmp_path):
    path = tmp_path / "sacct.txt"
    path.write_text(SLURM)
    with pytest.raises(ConfigError, match=r"not a cluster_log\.csv"):
        invoke("import", "helios", path, "--out", tmp_path)
    with pytest.raises(FleetcastError, match="no usable job"):
        invoke("import", "swf", path, "--out", tmp_path)
    with pytest.raises(ConfigError, match="expected one of"):
        invoke("import", "philly", path, "--out", tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        invoke("import", "swf", tmp_path / "missing", "--out", tmp_path)


def test_a_header_that_no_reader_can_split_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster_log.csv").write_text('"' + "a" * 200_000)
    with pytest.raises(ConfigError, match="its header is unreadable"):
        read_job_table("helios", tmp_path)


@pytest.mark.parametrize("at", ["2020-07-01T02:00:00+02:00", "2020-07-01T00:00:00Z", "2020-07-01"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_a_moment_and_times_may_have_a_zone_or_none(data, tmp_path, at, zone):
    path = data / "demand" / "venus" / "series.csv"
    table = pd.read_csv(path, parse_dates=["time"])
    table["time"] = table["time"].dt.tz_localize(zone).astype(str)
    table.to_csv(path, index=False)
    invoke("split", "demand/venus", "--at", at, "--data", data, "--out", tmp_path / "out")
    assert len(pd.read_csv(tmp_path / "out/train/demand/venus/series.csv")) == 2
    assert len(pd.read_csv(tmp_path / "out/test/demand/venus/series.csv")) == 2
