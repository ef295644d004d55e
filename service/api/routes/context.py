"""The objects that the handlers of one API process share."""

from dataclasses import dataclass, field

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.errors import FleetcastError, SourceError
from fleetcast.ingest.inbox.inbox import Backlog, InboxWriter
from fleetcast.ingest.slurm.jobcomp import Attempts
from fleetcast.placement.ledger.promised import PromiseReader
from fleetcast.service.api.answerers import Answerers
from fleetcast.service.api.archived_jobs import ArchivedJobs
from fleetcast.service.api.new_names import NewNames
from fleetcast.service.api.placer_link import PlacerLink
from fleetcast.service.api.recent import RecentIdentities
from fleetcast.service.api.streams import EventStreams
from fleetcast.service.api.telemetry import ApiMetrics
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.board.mirror import BoardMirror
from fleetcast.service.config import Config
from fleetcast.service.http.access import Access
from fleetcast.service.http.body_budget import BodyBudget
from fleetcast.service.http.problems import Problem, convert_to_problem
from fleetcast.service.listening import ApiListening


@dataclass(slots=True)
class Context:
    """The objects that all handlers of an api process share, such as the board's cache and the inbox."""

    config: Config
    clock: Clock
    cache: BoardCache
    placer: PlacerLink
    streams: EventStreams
    metrics: ApiMetrics
    recent: RecentIdentities
    names: NewNames
    access: Access
    backlog: Backlog
    archived: ArchivedJobs
    answerers: Answerers
    bodies: BodyBudget
    promises: PromiseReader
    listening: ApiListening
    inbox: InboxWriter | None = None  # from the application's start to its end
    writes: InboxWriter | None = None  # likewise, for samples: no event waits until they are on disk
    mirror: BoardMirror | None = None  # of a replica: its board comes from another api
    slurm_attempts: Attempts = field(default_factory=Attempts)
    prefix: str = ""

    def make_problem(self, error: FleetcastError) -> Problem:
        return convert_to_problem(error)

    def get_event_writer(self) -> InboxWriter:
        """Return the writer of the inbox. Raises SourceError before the application's start and after its end."""
        return _require_open_writer(self.inbox)

    def get_sample_writer(self) -> InboxWriter:
        """Return the inbox writer for samples. Raises SourceError if it is not open or too many samples wait."""
        self.backlog.refuse_if_full()
        return _require_open_writer(self.writes)


def _require_open_writer(writer: InboxWriter | None) -> InboxWriter:
    if writer is None:
        raise SourceError("the inbox is not open; nothing was stored", retry_after_s=1.0)
    return writer
