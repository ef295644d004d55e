"""The scenes of the verdicts are what their names say, and no more jobs stop than are needed."""

import pytest

from fleetcast.benchmarks.answers.verdicts import (
    VerdictScene,
    describe_verdict,
    make_elastic_victim,
    make_empty,
    make_five_queues,
    make_shared_gpus,
)
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import PROTECTED
from fleetcast.placement.machines.vacate import remove_jobs


@pytest.mark.parametrize("scene", [make_five_queues(40), make_shared_gpus(40)])
def test_the_request_fits_without_the_chosen_jobs_and_with_none_of_them(scene: VerdictScene) -> None:
    proposal, (request,) = scene.run_pass().proposal, scene.requests
    assert proposal is not None
    assert proposal.victims is not None, proposal.sentence
    chosen = set(proposal.victims.chosen.jobs)
    assert fits_now(request, remove_jobs(scene.view, chosen), Options())
    for job in sorted(chosen):
        assert not fits_now(request, remove_jobs(scene.view, chosen - {job}), Options()), job


def test_a_gang_that_holds_the_fleet_gives_exactly_the_half_that_is_owed() -> None:
    assert describe_verdict(make_elastic_victim(40).run_pass()) == "job00000 shrinks to 20"


def test_jobs_that_share_gpus_hold_all_of_them() -> None:
    scene = make_shared_gpus(40)
    assert sum(scene.amounts) == scene.view.usable.sum()
    assert not scene.view.milli.any()
    freed = remove_jobs(scene.view, scene.view.jobs)
    assert freed.free.all()


def test_a_pass_says_why_no_job_stops_and_how_many_requests_start() -> None:
    verdict = describe_verdict(make_shared_gpus(40, PROTECTED).run_pass())
    assert verdict.endswith("jobs protected by owner or queue")
    assert describe_verdict(make_empty(10).run_pass()) == "80 placed"
