"""The table of XIDs beside NVIDIA's catalogue, where that is at hand."""

import csv
import os
from pathlib import Path

import pytest

from fleetcast.fleet.xids import ACTION_OF

DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
CATALOGUE = DATA / "faults" / "xid" / "nvidia_xids.csv"
OURS = {
    "WORKFLOW_XID_48": "DOUBLE_BIT",
    "WORKFLOW_XID_45": "CLEANUP",
    "WORKFLOW_NVLINK_ERR": "NVLINK",
    "WORKFLOW_NVLINK5_ERR": "NVLINK_FATAL",
    "XID_154": "RECOVERY",
    "CHECK_UVM": "UVM",
}


@pytest.mark.skipif(not CATALOGUE.is_file(), reason="NVIDIA's XID catalogue is not here")
def test_actions_are_those_of_the_catalogue() -> None:
    with open(CATALOGUE, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    named = {int(row["Code"]): row["Resolution Bucket (Immediate Action)"] for row in rows}
    used = {int(row["Code"]) for row in rows if row["Description"] != "Unused"}
    wrong = {code: action for code, action in ACTION_OF.items() if OURS.get(named[code], named[code]) != action}
    assert not wrong
    assert {code for code in used if named[code]} <= ACTION_OF.keys() | {142}
