import json
import logging
import os
from pathlib import Path

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.ingest.pages.target_groups import read_groups
from fleetcast.ingest.pages.target_spec import TargetSpec
from fleetcast.ingest.pages.targets import TargetList

GROUPS = [
    {"targets": ["n1:9400", "[::1]:9400"]},
    {
        "targets": ["10.0.0.7:443"],
        "labels": {"__scheme__": "https", "__metrics_path__": "gpu", "__param_a": "b c", "node": "n7", "rack": "r1"},
    },
]
SPECS = [
    TargetSpec("http://n1:9400/metrics"),
    TargetSpec("http://[::1]:9400/metrics"),
    TargetSpec("https://10.0.0.7:443/gpu?a=b+c", "n7"),
]


def test_labels_say_how_a_target_is_asked_and_whose_it_is() -> None:
    assert read_groups(json.dumps(GROUPS).encode(), "x.json") == SPECS


def test_groups_may_be_yaml() -> None:
    text = b"- targets:\n  - n1:9400\n  labels:\n    node: gpu-1\n    # whose\n"
    assert read_groups(text, "x.yml") == [TargetSpec("http://n1:9400/metrics", "gpu-1")]


def test_a_bad_entry_costs_itself(caplog: pytest.LogCaptureFixture) -> None:
    groups = [{"targets": ["n1:9400", "a b", "ftp://n2", "n3:x"]}, {"labels": {}}, 5, *[{"targets": [""]}] * 20]
    with caplog.at_level(logging.WARNING):
        assert read_groups(json.dumps(groups).encode(), "x.json") == [TargetSpec("http://n1:9400/metrics")]
    assert "skipping 15 entries more" in caplog.text


@pytest.mark.parametrize(
    ("data", "origin"),
    [
        (b"{}", "x.json"),
        (b"- targets: [a]", "http://inventory/x"),
        (b"a: b", "x.yml"),
        (b"- [", "x.yml"),
        (b"- &a {targets: [n1:1]}\n- *a", "x.yml"),
        (b"\xff\xfe", "x.yml"),
        (b'[{"targets": ["n1:\xff"]}]', "x.json"),
        (b'[{"targets": ["n1:9400"], "labels": {"node": "\xc3("}}]', "http://inventory/x"),
        (b"- " + b"[" * 2000, "x.yml"),
    ],
)
def test_what_is_no_list_of_groups_is_refused_whole(data: bytes, origin: str) -> None:
    with pytest.raises(ConfigError, match=origin):
        read_groups(data, origin)


def test_files_of_a_pattern_come_and_go_and_a_broken_one_keeps_what_it_said(tmp_path: Path) -> None:
    targets = TargetList([f"file_sd:{tmp_path}/*.json"])
    assert targets.has_changing_lists
    assert targets.read_targets() == {}
    (tmp_path / "a.json").write_text(json.dumps(GROUPS[:1]))
    (tmp_path / "b.json").write_text(json.dumps(GROUPS[1:]))
    (tmp_path / "c.txt").write_text(json.dumps(GROUPS[1:]))
    assert list(targets.read_targets().values()) == SPECS
    (tmp_path / "a.json").write_text('[{"targets": ["n1')
    os.utime(tmp_path / "a.json", (1, 1))
    (tmp_path / "b.json").unlink()
    assert list(targets.read_targets().values()) == SPECS[:2]


def test_a_file_with_an_invalid_byte_is_refused_whole_and_says_so_until_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.json"
    targets = TargetList([f"file_sd:{path}"])
    path.write_text(json.dumps(GROUPS[:1]))
    assert list(targets.read_targets().values()) == SPECS[:2]
    path.write_bytes(b'[{"targets": ["n3:9400", "n\xff:9400"]}]')
    os.utime(path, (1, 1))
    for _ in range(3):
        assert list(targets.read_targets().values()) == SPECS[:2]
    (why,) = targets.list_refusals().values()
    assert why.startswith(f"{path}: byte 27 (0xff) is not UTF-8")
    assert caplog.text.count("is not UTF-8") == 1
    path.write_text(json.dumps(GROUPS[1:]))
    assert (list(targets.read_targets().values()), targets.list_refusals()) == (SPECS[2:], {})


def test_a_service_that_lists_targets_is_named_by_its_url() -> None:
    targets = TargetList(["http_sd:http://inventory/gpus?site=a", "http://n0:9400"])
    assert targets.queried_urls == ("http://inventory/gpus?site=a",)
    targets.replace_targets(targets.queried_urls[0], SPECS[:1])
    assert [*targets.read_targets()] == ["http://n0:9400/metrics", "http://n1:9400/metrics"]
    with pytest.raises(ConfigError):
        TargetList(["http_sd:inventory"])
