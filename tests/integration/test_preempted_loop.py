"""The training loop of docs/actions.md, with no scheduler, stops for an action of a real placer."""

import sys
from pathlib import Path
from textwrap import indent

import pytest

from fleetcast.placement.actions.action import ActionKind
from tests.dashboards.grafana import ROOT
from tests.integration.action_scene import DONE, open_scene

pytestmark = pytest.mark.integration

LOOP = """
import sys, time
from pathlib import Path
from fleetcast_client import Reporter

def save():
    Path(sys.argv[1]).touch()

with Reporter() as report:
    for step in range(100_000):
        with report.step(step):
            time.sleep(0.1)
"""


def test_the_loop_of_the_document_saves_ends_and_frees_its_gpu(tmp_path: Path) -> None:
    page = (ROOT / "docs/actions.md").read_text(encoding="utf-8")
    (block,) = (part.partition("```")[0] for part in page.split("```python\n")[1:])
    loop, saved = tmp_path / "loop.py", tmp_path / "saved"
    loop.write_text(LOOP + indent(block, 8 * " "))
    variables = {"FLEETCAST_JOB": "run", "FLEETCAST_NODE": "n2", "FLEETCAST_GPUS": "0"}
    with open_scene(tmp_path, Path(sys.executable)) as scene:
        job = scene.launch("run", loop, str(saved), variables=variables)
        assert scene.until("it runs on the board", lambda: scene.nodes("run")) == ["n2"]
        action_id = scene.send(ActionKind.SHRINK, "run", 1, ["n2"])
        scene.until("it refuses what it cannot do", lambda: scene.life(action_id)[-1] == "refused")
        assert not saved.exists()
        action_id = scene.send(ActionKind.PREEMPT, "run", 1, ["n2"])
        scene.until("the loop ends", lambda: job.process.poll() is not None)
        assert job.process.returncode == 0
        assert saved.exists()
        scene.until("the stop is seen", lambda: scene.life(action_id) == DONE)
