"""fleetcast-client: a reporter of a training loop's steps and phases, and a client of Fleetcast's HTTP API.

from fleetcast_client import Reporter

with Reporter() as report:
    for batch in batches:
        with report.step() as step:
            with step.part("compute"):
                train(batch)
"""

from fleetcast_client.client import Client
from fleetcast_client.errors import ApiError, FleetcastError, NotAllowed, NotFound, Unreachable
from fleetcast_client.identity import Identity, identity_of
from fleetcast_client.outbox import Counts
from fleetcast_client.reporter import Reporter

__all__ = [
    "ApiError",
    "Client",
    "Counts",
    "FleetcastError",
    "Identity",
    "NotAllowed",
    "NotFound",
    "Reporter",
    "Unreachable",
    "identity_of",
]
