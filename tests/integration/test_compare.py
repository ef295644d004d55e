"""The comparison of a day in a process of its own, as the demonstration starts it."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


def test_the_comparison_prints_one_json_object_for_both_arms():
    command = [sys.executable, "-m", "fleetcast.cli.main", "simulate", "day", "--seed", "2", "--seeds", "2"]
    output = subprocess.run(command, capture_output=True, check=True, timeout=100).stdout
    worth = json.loads(output)
    assert worth["seeds"] == 2
    assert worth["risk_blind"]["mean"] > 0
    assert worth["saved"]["low"] <= worth["saved"]["mean"] <= worth["saved"]["high"]
