"""The causes of slow jobs that are counted are those that the API tells."""

from typing import get_args

from fleetcast.service.answers.jobs import StragglerCause
from fleetcast.service.pipeline.fleet_metrics import CAUSES


def test_every_cause_that_the_api_tells_is_counted_as_itself() -> None:
    assert set(CAUSES) == set(get_args(StragglerCause))
