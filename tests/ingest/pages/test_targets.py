import logging
import os
from pathlib import Path

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.ingest.pages.target_spec import TargetSpec, parse_target
from fleetcast.ingest.pages.targets import TargetList


def test_a_target_is_a_url_and_may_name_its_node() -> None:
    assert parse_target("http://n1:9400") == TargetSpec("http://n1:9400/metrics")
    assert parse_target("https://n1/page.prom?x=1") == TargetSpec("https://n1/page.prom?x=1")
    assert parse_target("http://10.0.0.7:9400/metrics gpu-7") == TargetSpec("http://10.0.0.7:9400/metrics", "gpu-7")
    assert parse_target("http://10.0.0.7:9400").host == "10.0.0.7"


@pytest.mark.parametrize(
    "text",
    ["", "n1:9400", "ftp://n1/x", "http://", "http://n1:port", "http://n1 a b", "http://n1 a/b", "file:", "file_sd:"],
)
def test_what_is_no_target_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TargetList([text])
    assert (text.split() or [""])[-1] in str(raised.value)


def test_a_target_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "targets"
    targets = TargetList(["http://n0:9400", f"file:{path}"])
    assert [*targets.read_targets()] == ["http://n0:9400/metrics"]
    path.write_text("# ours\nhttp://n1:9400\n\nhttp://n2:9400 gpu-2  # a comment\nnonsense\n")
    with caplog.at_level(logging.WARNING):
        assert [*targets.read_targets()] == [f"http://n{number}:9400/metrics" for number in range(3)]
    assert "nonsense" in caplog.text
    path.write_text("http://n3:9400\n")
    os.utime(path, (1, 1))
    assert [*targets.read_targets()] == ["http://n0:9400/metrics", "http://n3:9400/metrics"]
    path.unlink()
    assert [*targets.read_targets()] == ["http://n0:9400/metrics"]


@pytest.mark.parametrize("kind", ["file", "file_sd"])
def test_a_target_file_that_is_not_there_is_said_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "targets.json"
    targets = TargetList([f"{kind}:{path}"])
    assert [targets.read_targets(), targets.read_targets()] == [{}, {}]
    assert [record.getMessage() for record in caplog.records] == [
        f"no targets from {path}: there is no such file, looking for it"
    ]
    path.write_text("[]" if kind == "file_sd" else "# none yet")
    targets.read_targets()
    assert len(caplog.records) == 1
