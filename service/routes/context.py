"""What the handlers of one API process share."""

from dataclasses import dataclass, field

from fleet.clock import Clock
from fleet.errors import SourceError
from ingest.inbox import Backlog, InboxWriter
from ingest.slurm_jobcomp import Attempts
from service.access import Access
from service.archived_jobs import ArchivedJobs
from service.board_mirror import BoardMirror
from service.body_budget import BodyBudget
from service.config import Config
from service.feed import BoardFeed
from service.kube_desk import KubeDesk
from service.new_names import NewNames
from service.placer_link import PlacerLink
from service.recent import RecentIdentities
from service.stream_hub import StreamHub
from service.telemetry import ApiMetrics


@dataclass(slots=True)
class Context:
    """Made by `create_app`; `inbox` and `writes` are there from the application's start to its end.

    `writes` takes the samples, in segments of their own: no event waits for theirs to reach the disk.
    """

    config: Config
    clock: Clock
    feed: BoardFeed
    placer: PlacerLink
    stream: StreamHub
    metrics: ApiMetrics
    recent: RecentIdentities
    names: NewNames
    access: Access
    backlog: Backlog
    archived: ArchivedJobs
    bodies: BodyBudget
    inbox: InboxWriter | None = None
    writes: InboxWriter | None = None
    mirror: BoardMirror | None = None  # of a replica: its board comes from another api
    kube: KubeDesk = field(default_factory=KubeDesk)
    slurm_attempts: Attempts = field(default_factory=Attempts)

    def writer(self) -> InboxWriter:
        """The inbox; SourceError before the start and after the end."""
        return _open(self.inbox)

    def sample_writer(self) -> InboxWriter:
        """The same for samples; SourceError also while too much of them waits."""
        self.backlog.refuse()
        return _open(self.writes)


def _open(writer: InboxWriter | None) -> InboxWriter:
    if writer is None:
        raise SourceError("the inbox is not open; nothing was kept", retry_after_s=1.0)
    return writer
