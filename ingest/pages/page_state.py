"""The state of reading a page line by line, and its tally."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages.exposition import LineParser, parse_metric_name, parse_timestamp
from fleetcast.ingest.pages.page_shape import LineRole, Role
from fleetcast.ingest.pages.unread import describe_unread_page
from fleetcast.ingest.series import Series
from fleetcast.ingest.tally import RecordTally, SkipRule

YEAR_2000_MS = 946_684_800_000
MAX_NAMES = 8  # unread ones, of a page


@dataclass(slots=True)
class PageState:
    """The result of reading a page so far.

    refused: the number of refused sample lines. bad: an error of each REFUSED or BROKEN line in order, then
    other errors. fresh: how many of these errors no earlier page had.
    """

    arrival_ms: int
    open_metrics: bool
    prefixes: list[bytes] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)
    refused: int = 0
    series: list[Series] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    time_ms: list[int] = field(default_factory=list)
    bad: list[RecordError] = field(default_factory=list)
    fresh: int = 0
    keys: set[bytes] = field(default_factory=set)
    entities: set[tuple[EntityKind, int, int, int]] = field(default_factory=set)
    shared: list[Series] = field(default_factory=list)
    repeatable: bool = True
    line: bytes = b""  # the one that is read
    parser: LineParser = field(default_factory=LineParser)

    def record_line(self, prefix: bytes, role: Role) -> None:
        self.prefixes.append(prefix)
        self.roles.append(role)

    def parse_stated_time_ms(self, timestamp: bytes, prefix: bytes, future_limit_ms: int) -> int:
        """Return the time that a line states, in Unix ms.

        Raises RecordError if it is invalid, in the future or before 2000.
        """
        time_ms = parse_timestamp(timestamp.strip(), seconds=self.open_metrics)
        self.repeatable = False
        if time_ms > self.arrival_ms + future_limit_ms:
            raise RecordError("future", f"{(time_ms - self.arrival_ms) / 1000:.0f} s ahead: {prefix[:60]!r}")
        if time_ms < YEAR_2000_MS <= self.arrival_ms:
            raise RecordError(
                "absurd_time", f"{timestamp[:40]!r} is before 2000, expected ms since 1970: {prefix[:60]!r}"
            )
        return time_ms

    def refuse_line(self, prefix: bytes, role: Role, error: RecordError, *, is_fresh: bool = True) -> None:
        """Record a refused line and its error. is_fresh: no earlier page had this error."""
        self.record_line(prefix, role)
        self.bad.append(error.with_traceback(None))  # a traceback would keep the page alive
        self.refused += 1
        self.fresh += is_fresh

    def refuse_rest_of_page(self, error: RecordError, lines: int) -> None:
        """Record that the rest of the page is not read. lines: the number of sample lines in it."""
        self.bad.append(error)
        self.refused += lines
        self.repeatable = False

    def remove_series(self, rows: Collection[int]) -> None:
        """Remove series that were read, and mark their lines as INCOMPLETE. rows: their indices in `series`."""
        at = [line for line, role in enumerate(self.roles) if role is LineRole.WANTED]
        for row in rows:
            self.roles[at[row]] = SkipRule.INCOMPLETE
        keep = [row for row in range(len(self.series)) if row not in rows]
        self.series = [self.series[row] for row in keep]
        self.raw = [self.raw[row] for row in keep]
        self.time_ms = [self.time_ms[row] for row in keep]

    def list_broken_lines(self) -> tuple[bytes, ...]:
        """Return the lines whose role is BROKEN: they are refused as a whole."""
        lines = zip(self.prefixes, self.roles, strict=True)
        return tuple(line for line, role in lines if role is LineRole.BROKEN) if self.bad else ()

    def make_tally(self) -> RecordTally:
        roles = Counter(self.roles)
        ignored = {role: count for role, count in roles.items() if isinstance(role, SkipRule)}
        names = self.list_names(lambda role: role is LineRole.UNREAD) if roles[LineRole.UNREAD] else ()
        return RecordTally(len(self.series), self.refused, ignored, roles[LineRole.UNREAD], names)

    def list_names(self, wanted: Callable[[Role], bool]) -> tuple[str, ...]:
        """Return the first MAX_NAMES metric names of lines whose role is wanted, each once."""
        found: dict[str, None] = {}
        for prefix, role in zip(self.prefixes, self.roles, strict=True):
            if wanted(role):
                found[parse_metric_name(prefix)] = None
                if len(found) == MAX_NAMES:
                    break
        return tuple(found)

    def explain_unread(self, was_read: bool) -> str:
        """Return a sentence that explains why no sample of a page is a known series, or "" if at least one is.

        was_read: an earlier page had known series. The devices may be gone, so that rules skip all remaining lines.
        In this case, the result is "" as well.
        """
        if LineRole.WANTED in self.roles or self.bad or not any(self.roles):
            return ""
        unread = self.list_names(lambda role: role is LineRole.UNREAD)
        if was_read and not unread:
            return ""
        return describe_unread_page(unread or self.list_names(lambda role: role is not LineRole.NOTHING))
