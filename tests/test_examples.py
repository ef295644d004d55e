"""The examples run: notebooks from the first cell to the last, scripts on what they make, rules in Prometheus."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.programs import needed
from tests.training.made_archive import events_of, live

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's client
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output
    )
    assert "within a factor of two" in shown
    assert "no archive in var/archive or var/demo/state/archive" in shown


@pytest.mark.integration
@pytest.mark.parametrize(
    ("place", "days", "says"),
    [("var/archive", 3, r"^wanted \("), ("var/demo/state/archive", 1, r"^demand: .*too little")],
)
def test_a_notebook_reads_the_archive_of_a_site_and_of_a_demo(
    place: str,
    days: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    live(tmp_path / place, events_of(days=days, jobs_a_day=12))
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples/forecasting.ipynb").read_text(encoding="utf-8"))["cells"]
    exec("".join(cells[-1]["source"]), {})  # the last cell, which is for an archive
    shown = capsys.readouterr().out
    assert re.search(says, shown, re.MULTILINE)
    assert re.search(r"^\d+ jobs$", shown, re.MULTILINE)


RULES = ROOT / "examples/alert_on_risk.yml"
RULE_TESTS = """
rule_files: [%s]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'fleetcast_gpus{instance="a", state="free"}', values: "8x60"}
      - {series: 'fleetcast_node_flagged{instance="a", node="n1", action="drain_now"}', values: "1x60"}
      - {series: 'fleetcast_node_flagged{instance="a", node="n2", action="replace_part"}', values: "1x60"}
      - {series: 'fleetcast_node_flagged{instance="a", node="n3", action="avoid"}', values: "1x60"}
    promql_expr_test:
      - expr: count(ALERTS{alertstate="firing"}) by (alertname)
        eval_time: 40m
        exp_samples:
          - {labels: '{alertname="TooFewHealthyGpus"}', value: 1}
          - {labels: '{alertname="NodesAskForADrain"}', value: 1}
"""


def test_the_rules_for_operators_fire(tmp_path: Path) -> None:
    tests = tmp_path / "rules_test.yml"
    tests.write_text(RULE_TESTS % RULES, encoding="utf-8")
    done = subprocess.run([needed("promtool"), "test", "rules", tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.integration
def test_the_script_for_data_scientists_fits_a_version_that_serves(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, ROOT / "examples/retrain.py", "--models", tmp_path / "models"]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().startswith("version 0001 serves: pinball loss")
