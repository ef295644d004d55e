"""A benchmark whose child process dies says why."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetcast.benchmarks.kit.child import ChildProcess
from fleetcast.benchmarks.ticks.urgent import UrgentSite

BENCHMARKS = sorted((Path(__file__).parents[3] / "benchmarks").rglob("*.py"))
REASON = "import sys; print('no port is free', file=sys.stderr); sys.exit(3)"


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[ChildProcess]:
    started = ChildProcess("the api", [sys.executable, "-c", request.param])
    yield started
    started.stop(1)
    started.log.unlink(missing_ok=True)


@pytest.mark.parametrize("child", [REASON], indirect=True)
def test_an_early_end_shows_the_last_output(child: ChildProcess) -> None:
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(AssertionError, match=f"the api ended with 3; its log is {child.log}, .*:\nno port is free"):
        child.check_running()


@pytest.mark.parametrize("child", ["import time; print('busy', flush=True); time.sleep(60)"], indirect=True)
def test_what_is_late_shows_the_last_output(child: ChildProcess) -> None:
    while not child.read_tail():
        time.sleep(0.01)
    child.check_running()
    with pytest.raises(AssertionError, match=rf"no board\. the api still runs; its log is {child.log}, .*:\nbusy"):
        child.check_running(unless="no board")


@pytest.mark.parametrize("child", [REASON, "import time; time.sleep(60)"], indirect=True)
def test_the_log_stays_after_a_failure_and_goes_otherwise(child: ChildProcess, request: pytest.FixtureRequest) -> None:
    failed = request.node.callspec.params["child"] == REASON
    if failed:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(AssertionError):
            child.check_running()
    child.stop(1)
    assert child.log.exists() == failed
    assert not failed or child.log.read_text() == "no port is free\n"


@pytest.mark.parametrize("child", [REASON], indirect=True)
def test_the_log_stays_after_a_failure_that_nobody_checked(child: ChildProcess) -> None:
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.stop(1)
    assert child.log.read_text() == "no port is free\n"


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_no_benchmark_starts_a_process_whose_output_is_lost(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "DEVNULL" not in text
    assert "Popen(" not in text or path.stem == "child"


def test_a_site_of_any_size_is_within_the_bounds_of_unknown_names(tmp_path: Path) -> None:
    """100,000 GPUs that no topology names end the pipeline: `[limits] unknown_gpus`."""
    import tomllib

    from fleetcast.ingest.topology.load import load_topology

    site = UrgentSite(tmp_path, 100_000)
    try:
        config = tomllib.loads((tmp_path / "site.toml").read_text())
        assert len(load_topology(Path(config["fleet"]["topology"]))) == 12_500
    finally:
        site._stop_processes()
