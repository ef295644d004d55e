"""What another pipeline reports is checked before a tick relies on it."""

from dataclasses import replace

import numpy as np
import pytest

from fleetcast.fleet.samples import EntityKind
from fleetcast.models.risk.local import score_own_nodes
from fleetcast.service.pipeline.other_pipelines import _check_report
from fleetcast.service.pipeline.reports import SHOWN, PipelineFacts, Report
from tests.models.conftest import SmallFleet


def test_a_report_that_lacks_what_gangs_are_compared_by_is_refused() -> None:
    fleet = SmallFleet(2)
    local = score_own_nodes(fleet.frames(), fleet.entities, fleet.topology, fleet.memory, fleet.now_ms)
    gpu = np.zeros((16, len(SHOWN[EntityKind.GPU])), np.float32)
    node = np.zeros((2, len(SHOWN[EntityKind.NODE])), np.float32)
    report = Report(PipelineFacts(1, 2), local, gpu, node, {})
    _check_report(report)
    less = {name: column for name, column in local.gpu.last.items() if name != "cap"}
    with pytest.raises(ValueError, match=r"gpu\.last lacks cap: it is another version's"):
        _check_report(replace(report, local=replace(local, gpu=replace(local.gpu, last=less))))
