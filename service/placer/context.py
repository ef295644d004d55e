"""The objects that the placer's HTTP handlers share."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from fleetcast.fleet.errors import FleetcastError
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ledger.ledger import LedgerError
from fleetcast.service.http.access import Access
from fleetcast.service.http.body_budget import BodyBudget
from fleetcast.service.http.problems import Problem, convert_to_problem
from fleetcast.service.http.table import CALLER
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.moves import MovesAdvisor
from fleetcast.service.placer.queue_desk import QueueAdmin
from fleetcast.service.placer.reclaim_preview import DryRuns
from fleetcast.service.placer.service import PlacementService
from fleetcast.service.placer.start_times import StartTimeSampler

logger = logging.getLogger(__name__)

UNNAMED = "unknown"  # no tokens are set, and the request names no user


@dataclass(slots=True)
class PlacerContext:
    """The objects that the placer's handlers share.

    Handlers call `queue_changed` when a new request waits.
    """

    service: PlacementService
    starts: StartTimeSampler
    access: Access
    bodies: BodyBudget
    metrics: PlacerMetrics
    queue_changed: Callable[[], None]
    prefix: str = "/v1"
    admin: QueueAdmin = field(init=False)
    dry_runs: DryRuns = field(init=False)
    moves: MovesAdvisor = field(init=False)
    _damage: str = field(default="", init=False)  # of the ledger, as logged last

    def __post_init__(self) -> None:
        self.admin = QueueAdmin(self.service)
        self.dry_runs, self.moves = DryRuns(self.service), MovesAdvisor(self.service)

    def get_caller(self, request: Request) -> str:
        return identify_caller(request)

    def make_problem(self, error: FleetcastError) -> Problem:
        """Convert an error into a problem. If the ledger is damaged, log each new damage once.

        The log is for the operator, who does not see the answers.
        """
        if isinstance(error, LedgerError) and str(error) != self._damage:
            self._damage = str(error)
            logger.error("%s", error)
        return convert_to_problem(error)


def identify_caller(request: Request, wanted: PlacementRequest | None = None) -> str:
    """Return the name of the caller's token. Without tokens, return the user that the request names."""
    return request.scope[CALLER] or (wanted.user if wanted else "") or UNNAMED
