"""The Reporter: what it tells, what it costs, and that nothing of it reaches the training loop."""

import ast
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from fleetcast.fleet.events import PhaseName, StepParts
from fleetcast.ingest.inbox.event_body import decode_body
from fleetcast.ingest.lifecycle import compute_first_sequence
from tests.sdk.conftest import SDK
from tests.sdk.door import Door, opened

from fleetcast_client import Reporter, identity_of  # isort: skip
from fleetcast_client.identity import A_SECOND, MOST_RANKS, SINCE_S  # isort: skip
from fleetcast_client.outbox import Outbox  # isort: skip
from fleetcast_client.reporter import PARTS, PHASES  # isort: skip

ENV = ("FLEETCAST_", "SLURM_", "TORCHELASTIC_", "RANK", "OMPI_", "PMI")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(ENV):
            monkeypatch.delenv(name)


@pytest.fixture
def door() -> Iterator[Door]:
    with opened(Door()) as made:
        yield made


def reporter(door: Door, **options: Any) -> Reporter:
    return Reporter(door.url, **{"job": "train-1", "rank": 3, "every_s": 0.02, **options})


def test_a_loop_is_told_as_the_service_understands_it(door: Door) -> None:
    with reporter(door, rank=0) as report:
        report.phase("loading")
        with report.phase("evaluation"):
            pass
        for _ in range(3):
            with report.step(tokens=65536, sequence_length=2048.0, stage=1) as step:
                with step.part("data"):
                    pass
                with step.part("compute"):
                    time.sleep(0.002)
                with step.part("nonsense"):
                    pass
        with report.checkpoint("s3://x", bytes=5):
            pass
        report.step_took(1.5, step=99, parts={"compute": 1.0})
        assert report.flush(5)
        assert report.counts().sent == 9
    decoded = decode_body(json.dumps(door.events).encode(), time.time_ns() // 1_000_000)
    assert decoded.rejected == []
    told = [(event["type"], event.get("name") or event.get("step") or event.get("edge")) for event in door.events]
    assert told == [
        *(("phase", "loading"), ("phase", "evaluation"), ("phase", "loading")),
        *(("step", None), ("step", 1), ("step", 2), ("checkpoint", "begin"), ("checkpoint", "end"), ("step", 99)),
    ]
    step = door.events[4]
    assert step["parts"]["compute"] >= 0.002
    assert set(step["parts"]) == {"data", "compute", "other"}
    assert step["duration_s"] >= step["parts"]["compute"]
    assert [event["sequence"] for event in door.events] == sorted(event["sequence"] for event in door.events)


def test_the_closed_lists_are_those_of_the_service() -> None:
    assert get_args(PhaseName) == PHASES
    assert StepParts.__struct_fields__ == PARTS


def test_only_rank_zero_tells_of_checkpoints(door: Door) -> None:
    with reporter(door) as report:
        with report.checkpoint():
            pass
        report.phase("steady")
    assert [event["type"] for event in door.events] == ["phase"]


def test_a_step_or_checkpoint_that_fails_is_not_told(door: Door) -> None:
    report = reporter(door, rank=0)
    with pytest.raises(ZeroDivisionError), report.step():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), report.checkpoint():
        raise ZeroDivisionError
    report.close()
    assert [event.get("edge") for event in door.events] == ["begin"]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"SLURM_JOB_ID": "123", "SLURM_PROCID": "4"}, ("123", 1, 4)),
        ({"SLURM_JOB_ID": "123", "SLURM_RESTART_COUNT": "2", "RANK": "7", "SLURM_PROCID": "4"}, ("123", 3, 7)),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1"}, ("8_1", 1, 0)),
        ({"SLURM_JOB_ID": "9", "SLURM_HET_JOB_ID": "8", "SLURM_HET_JOB_OFFSET": "1"}, ("8+1", 1, 0)),
        ({"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "1", "RANK": "2"}, ("run", 2, 2)),
        ({"FLEETCAST_JOB": "ns/a", "FLEETCAST_ATTEMPT": "5", "FLEETCAST_RANK": "1", "RANK": "9"}, ("ns/a", 5, 1)),
        ({"FLEETCAST_JOB": "a", "TORCHELASTIC_RESTART_COUNT": "4", "RANK": "x"}, ("a", 1, 0)),
    ],
)
def test_launchers_say_who_we_are(env: dict[str, str], expected: tuple[str, int, int]) -> None:
    found = identity_of(env)
    assert found is not None
    assert (found.job, found.attempt, found.rank) == expected


@pytest.mark.parametrize("env", [{}, {"TORCHELASTIC_RUN_ID": "none"}, {"RANK": "1"}])
def test_without_a_job_nobody_is_told(env: dict[str, str]) -> None:
    assert identity_of(env) is None


def test_a_process_that_begins_later_counts_above_an_earlier_one() -> None:
    first, later = (identity_of({}, "a", rank=5, now_s=SINCE_S + seconds) for seconds in (1000.0, 1060.0))
    assert first is not None
    assert later is not None
    assert first.first == compute_first_sequence(5) + 1000 * A_SECOND
    assert later.first - first.first == 60 * A_SECOND
    last = identity_of({}, "a", rank=10**9)
    assert last is not None
    assert last.first < compute_first_sequence(MOST_RANKS) <= 2**53


def test_what_the_service_cannot_take_now_is_sent_again_as_it_was(door: Door) -> None:
    door.script = [503, 500, 429]
    report = reporter(door)
    report.phase("steady")
    assert report.flush(20)
    assert (report.counts().sent, report.counts().failures) == (1, 3)
    assert len(door.bodies) == 1
    report.close()


def test_what_the_service_refuses_is_counted_and_given_up(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    door.script = [422]
    report = reporter(door)
    report.phase("steady")
    assert report.flush(5)
    door.rejects = 1
    report.phase("steady")
    assert report.flush(5)
    assert (report.counts().sent, report.counts().refused) == (0, 2)
    report.close()
    assert "refused" in caplog.text


def test_a_service_that_is_away_costs_the_queue_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    report = Reporter("http://127.0.0.1:9", job="a", most_waiting=100, every_s=0.01)
    for _ in range(1000):
        with report.step():
            pass
    report.close(0.3)
    counts = report.counts()
    assert counts.dropped >= 900 - 500
    assert counts.waiting + counts.dropped == 1000
    assert caplog.text.count("does not answer") == 1
    report.phase("steady")  # after the end nothing happens


def test_a_service_that_hangs_holds_nobody_up(door: Door) -> None:
    door.opens = threading.Event()
    report = reporter(door)
    report.phase("steady")
    while not door.paths:
        time.sleep(0.001)
    for _ in range(100):
        with report.step():
            pass
    report.close(0.05)
    assert (door.bodies, report.counts().waiting) == ([], 101)  # the request hung all the while
    door.opens.set()


@pytest.mark.parametrize("url", ["", "ftp://x", "nonsense", "http://"])
def test_without_a_url_nothing_is_told_and_nothing_fails(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with Reporter(url, job="a") as report:
        assert not report.enabled
        report.phase("nonsense")
        with report.step() as step, step.part("data"):
            pass
        assert report.flush()
    assert "Fleetcast" in caplog.text


def test_bad_values_are_the_services_to_refuse(door: Door) -> None:
    report = reporter(door)
    report.step_took(float("nan"), parts={"x": {1, 2}})  # type: ignore[dict-item]
    report.phase("steady")
    report.flush(60)
    counts = report.counts()
    assert counts.refused >= 1  # with the phase, where both were in one body
    assert counts.refused + counts.sent == 2
    report.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_leaves_the_loop_alone() -> None:
    def broken(body: bytes) -> Any:
        raise RuntimeError("a bug")

    outbox = Outbox(broken, every_s=0.01)
    outbox.put({"a": 1})
    time.sleep(0.1)
    outbox.put({"a": 2})
    assert outbox.flush(0.5) is False
    outbox.close(0.1)


def run(code: str, url: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(SDK), "FLEETCAST_URL": url, "FLEETCAST_JOB": "a", **env}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=30, check=False)


def test_a_fork_tells_nothing_and_does_not_hang(door: Door) -> None:
    code = """
import os, warnings
warnings.simplefilter("ignore")
from fleetcast_client import Reporter
report = Reporter(every_s=0.01)
report.phase("loading")
pid = os.fork()
report.phase("evaluation" if pid == 0 else "steady")
if pid == 0:
    report.flush(1); report.close(); os._exit(0)
os.waitpid(pid, 0)
"""
    assert run(code, door.url).returncode == 0
    assert [event["name"] for event in door.events] == ["loading", "steady"]


def test_the_end_of_a_process_sends_what_is_left_in_bounded_time(door: Door) -> None:
    code = """
from fleetcast_client import Reporter
report = Reporter()
for _ in range(700):
    report.step_took(1.0)
"""
    done = run(code, door.url, FLEETCAST_TOKEN="secret")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(door.events) == 700
    assert set(door.tokens) == {"Bearer secret"}
    done = run(code, "http://127.0.0.1:9")  # or it is killed, which raises
    assert "given up" in done.stderr
    assert done.returncode == 0


def test_a_step_costs_less_than_twenty_microseconds(door: Door) -> None:
    report = reporter(door, most_waiting=200_000, every_s=60.0)
    report.phase("steady")
    best = 1.0
    for _ in range(20):
        began = time.thread_time()
        for _ in range(1_000):
            with report.step(tokens=65536) as step, step.part("compute"):
                pass
        best = min(best, (time.thread_time() - began) / 1_000)
    report.close(0.0)
    assert best < 20e-6, f"{best * 1e6:.1f} us a step"


def test_the_reporter_imports_nothing_but_the_standard_library() -> None:
    code = "import sys, fleetcast_client; print(sorted({'fleet', 'ingest', 'numpy', 'msgspec'} & set(sys.modules)))"
    command = [sys.executable, "-S", "-c", code]
    env = {"PYTHONPATH": str(SDK)}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_every_file_is_python_3_9() -> None:
    for path in Path(SDK, "fleetcast_client").glob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert path.name in ("__init__.py",) or "__future__" in names


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({}, ()),
        ({"FLEETCAST_GPUS": "2,3", "LOCAL_RANK": "1"}, (2, 3)),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_GPUS": "4,5,6,7", "SLURM_LOCALID": "2"}, (6,)),
        ({"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0,1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "4,5", "LOCAL_RANK": "1"}, (5,)),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, (4, 5)),
        ({"CUDA_VISIBLE_DEVICES": "0", "LOCAL_RANK": "3"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f1e"}, ()),
    ],
)
def test_the_gpus_of_a_process_are_those_that_schedulers_count(env: dict[str, str], gpus: tuple[int, ...]) -> None:
    found = identity_of({"FLEETCAST_JOB": "a", "FLEETCAST_NODE": "n1", **env})
    assert found is not None
    assert (found.node, found.gpus) == ("n1", gpus)
