"""The alerts: rules that Prometheus takes, that fire when they should, and that say what to do."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.dashboards.grafana import FOLDER, ROOT, rules
from tests.programs import needed

TESTS = Path(__file__).parent / "alerts_test.yml"
SEVERITIES = {"page", "ticket", "info"}


def promtool(*arguments: str | Path, folder: Path | None = None) -> str:
    """Run promtool and return what it prints. It opens a database in `folder` for each test of a rule.

    The databases are small and short-lived, so most runs of Go's garbage collector would free nothing.
    """
    environment = {**os.environ, "GOGC": "400", **({"TMPDIR": str(folder)} if folder else {})}
    command = [needed("promtool"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "config", FOLDER / "prometheus.yml")
    promtool("check", "rules", FOLDER / "alerts.yml")


def test_every_alert_fires_on_what_it_is_for_and_is_quiet_else(tmp_path: Path) -> None:
    promtool("test", "rules", TESTS, folder=tmp_path)
    tests = [test["alert_rule_test"][0] for test in yaml.safe_load(TESTS.read_text(encoding="utf-8"))["tests"]]
    firing = Counter(test["alertname"] for test in tests if test["exp_alerts"])
    quiet = Counter(test["alertname"] for test in tests if not test["exp_alerts"])
    assert firing == quiet == Counter(rule["alert"] for rule in rules())


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_every_alert_has_a_severity_words_and_a_run_book(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in SEVERITIES
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook"}
    path, _, anchor = notes["runbook"].partition("#")
    sections = re.findall(r"^## (\w+)\n(.+)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {title.lower() for title, first in sections if first.startswith("**Means**")}


def test_every_run_book_is_of_an_alert() -> None:
    titles = re.findall(r"^## (\w+)", (FOLDER / "runbooks.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert Counter(titles) == Counter(str(rule["alert"]) for rule in rules())
