import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError

FILE = """[queue.a]
weight = 2
guaranteed = {gpu = 8}
credits = {rate = 1, cap_gpu_h = 3}
[queue."a/b"]
per_user = true
"""
TOPOLOGY = '[[rack]]\nname = "r1"\nnodes = "n[1-2]"\ngpus = 2\ngpu_model = "H100"\n'


@pytest.fixture
def queues(tmp_path: Path) -> Path:
    path = tmp_path / "queues.toml"
    path.write_text(FILE)
    return path


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_check_says_what_has_no_effect_yet(queues: Path) -> None:
    queues.write_text(FILE.replace("weight", 'preemptible = "all"\nweight'))
    text = run("queues", "check", queues)
    assert "fine" in text
    assert "2 queues, 1 of them take requests" in text
    assert 'preemptible has no effect: reclaim is "off" in [policy]' in text


def test_check_refuses_with_line_and_fix(queues: Path) -> None:
    queues.write_text("[queue.a]\nweigth = 1\n")
    with pytest.raises(ConfigError, match=r"queues.toml: line 2: queue.a.weigth: no such key; did you mean weight\?"):
        run("queues", "check", queues)
    with pytest.raises(ConfigError, match="cannot read"):
        run("queues", "check", queues.with_name("none.toml"))
    queues.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="no text in UTF-8"):
        run("queues", "check", queues)


def test_show_is_the_tree(queues: Path) -> None:
    first, second = run("queues", "show", queues).splitlines()
    assert " ".join(first.split()) == "a weight 2 guaranteed 8 GPUs, banks 100%, at most 3 GPU-hours"
    assert second.startswith("  b ")
    assert second.endswith("shared by its users")
    rows = json.loads(run("queues", "show", queues, "--json", "-"))["queues"]
    assert [(row["queue"], row["parent"]) for row in rows] == [("a", None), ("a/b", "a")]


def test_guarantees_are_compared_with_a_topology(queues: Path, tmp_path: Path) -> None:
    topology = tmp_path / "topology.toml"
    topology.write_text(TOPOLOGY)
    with pytest.raises(ConfigError, match="guaranteed 8 GPUs, the fleet has 4"):
        run("queues", "check", queues, "--topology", topology)
