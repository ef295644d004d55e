"""A first install: exporters answer, all GPUs are at work, and no event says for which jobs."""

from typing import Any

import pytest
from playwright.sync_api import expect

from tests.integration.console.page import Opener
from tests.service.console_scene import Scene

pytestmark = pytest.mark.integration

GPUS = {"total": 32, "running": 32, "free": 0, "unknown_use": 32}
AT_WORK = "32 GPUs are at work; no event says for whom."


class FirstInstall(Scene):
    """Four nodes whose GPUs are at work, without a job."""

    held_by: tuple[str, ...] = ("unknown",) * 8

    def fleet(self) -> dict[str, Any]:
        return super().fleet() | {"gpus": GPUS, "queued_gpus": 0, "queued_jobs": 0}

    def node(self, name: str) -> dict[str, Any] | None:
        body = super().node(name)
        assert body is not None
        gpus = [
            gpu | {"job": None, "held_by": held_by, "request": "r-7" if held_by == "promise" else None}
            for gpu, held_by in zip(body["gpus"], self.held_by, strict=True)
        ]
        return body | {"jobs": [], "gpus": gpus}

    def job_rows(self) -> dict[str, Any]:
        return {"as_of_ms": self.as_of_ms(), "rows": []}


def test_panels_about_jobs_say_that_no_event_names_them(open_console: Opener) -> None:
    empty = {"as_of_ms": 1, "rows": []}
    page = open_console(FirstInstall(drift=False), override={"/v1/spikes": empty, "/v1/utilisation": empty}).page
    for panel in ("#stragglers-foot", "#spikes-foot", "#use-foot"):
        expect(page.locator(panel)).to_have_text(f"No running job is known: {AT_WORK}")
    expect(page.locator("#health-detail")).not_to_contain_text("runs slow")


@pytest.mark.parametrize(
    ("held_by", "line"),
    [
        (("unknown",) * 8, "8 GPUs are at work; no event says for whom."),
        (("unknown",) + ("promise",) * 7, "1 GPU is at work; no event says for whom. 7 GPUs are promised to r-7."),
        ((None,) * 8, "Nothing runs here."),
    ],
)
def test_a_node_page_says_nothing_runs_only_where_nothing_does(
    open_console: Opener, held_by: tuple[str, ...], line: str
) -> None:
    scene = FirstInstall(drift=False)
    scene.held_by = held_by
    page = open_console(scene).page
    page.evaluate("location.hash = 'node=n005'")
    expect(page.locator("#drawer").get_by_text(line, exact=True)).to_be_visible()
