"""Training that is killed in the middle leaves the registry as it was, and runs again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleetcast.models.versions.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import sys, time
from pathlib import Path
from fleetcast.models.versions.card import Card
from fleetcast.models.demand.trees import DemandTrees
from fleetcast.models.versions.registry import Registry
from tests.training.made_panels import made_trees

trees, slow = made_trees(), len(sys.argv) > 2
save = trees.save

def saving(folder):
    save(folder)
    if slow:
        (Path(sys.argv[1]) / "saved").touch()
        time.sleep(60)

card = Card(kind="demand", created_ms=0, made_by="a test", seed=0, fitted_until_ms=trees.fitted_until_ms)
print(Registry(Path(sys.argv[1])).add_version("demand", saving, card))
"""


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), *words], env=env, text=True, stdout=subprocess.PIPE
    )


@pytest.mark.integration
def test_a_kill_while_a_version_is_written_leaves_none_and_the_next_run_is_whole(tmp_path: Path) -> None:
    with start(tmp_path, "slowly") as killed:
        while not (tmp_path / "saved").exists():
            assert killed.poll() is None, "it ended before it had saved"
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
        killed.wait(30)
    registry = Registry(tmp_path)
    assert registry.list_names("demand") == []
    assert registry.find_serving_folder("demand") is None
    with start(tmp_path) as again:
        assert again.communicate(timeout=100)[0].strip() == "0001"
    assert registry.find_damage("demand", "0001") is None
    assert not list((tmp_path / "demand").glob(".new*"))
