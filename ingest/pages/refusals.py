"""Records of refused lines, and of the targets that keep sending them.

A prefix (name and labels) is refused until the limits, the fleet's names or the known boards
change. A line may be refused as a whole, for example because its value is no number. It is then
refused as long as it stays the same.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.redaction import redact_secrets
from fleetcast.ingest.pages.page_shape import LineRole
from fleetcast.ingest.pages.page_state import PageState
from fleetcast.ingest.source import Batch

logger = logging.getLogger(__name__)

LASTING_ROUNDS = 20  # scrapes with refused lines, one after the other
MAX_LOGGED = 10  # targets
MAX_SHOWN = 20  # targets, in the ingestion document
_BY_PLACE = frozenset({"duplicate", "too_many_series"})  # the same line may be read elsewhere on the page


@dataclass(frozen=True, slots=True)
class RememberedRefusals:
    """The refusals of a page whose shape is remembered.

    errors: one for each reason, with the number of its lines. of_prefix: for each REFUSED prefix in page order,
    the index of its error, as bytes.
    """

    errors: tuple[RecordError, ...] = ()
    of_prefix: bytes = b""

    @classmethod
    def from_page(cls, page: PageState) -> "RememberedRefusals":
        if not page.bad:
            return cls()
        counts = Counter(error.reason for error in page.bad)
        first: dict[str, RecordError] = {}
        for error in page.bad:
            first.setdefault(error.reason, error)
        numbers = {reason: number for number, reason in enumerate(first)}
        refused = (role for role in page.roles if role in (LineRole.REFUSED, LineRole.BROKEN))
        pairs = zip(refused, page.bad, strict=True)
        return cls(
            tuple(RecordError(reason, error.detail, counts[reason]) for reason, error in first.items()),
            bytes(numbers[error.reason] for role, error in pairs if role is LineRole.REFUSED),
        )

    def list_prefix_errors(self) -> Iterator[RecordError | None]:
        """Yield the error of each REFUSED prefix, or None if only its place on the page was wrong."""
        errors = [RecordError(error.reason, error.detail) for error in self.errors]
        for number in self.of_prefix:
            yield None if errors[number].reason in _BY_PLACE else errors[number]


@dataclass(slots=True)
class _TargetRefusals:
    rounds: int = 0
    lines: int = 0
    why: str = ""


@dataclass(slots=True)
class LastingRefusals:
    """The targets that had refused lines at their latest scrapes."""

    _targets: dict[str, _TargetRefusals] = field(default_factory=dict)  # by URL
    _logged: int = 0

    def record_page(self, url: str, batch: Batch) -> None:
        """Record the result of a target's page. Logs when a lasting refusal begins or ends."""
        refused = batch.get_tally().refused
        if not refused:
            before = self._targets.pop(url, None)
            if before is not None and before.rounds >= LASTING_ROUNDS:
                logger.info("%s: no line is refused any more", redact_secrets(url))
            return
        found = self._targets.setdefault(url, _TargetRefusals())
        found.rounds, found.lines = found.rounds + 1, refused
        found.why = str(batch.bad[0]) if batch.bad else ""
        if found.rounds == LASTING_ROUNDS:
            self._log_lasting_refusal(url, found)

    def forget_target(self, url: str) -> None:
        """Forget a target that is no longer scraped."""
        self._targets.pop(url, None)

    def health(self) -> dict[str, Any]:
        """Return the number of targets with lasting refusals, and the first of these targets with the reason."""
        lasting = [(url, found) for url, found in self._targets.items() if found.rounds >= LASTING_ROUNDS]
        shown: Sequence[dict[str, Any]] = [
            {"target": redact_secrets(url), "lines": found.lines, "reason": found.why}
            for url, found in lasting[:MAX_SHOWN]
        ]
        return {"targets_refusing": len(lasting), "targets_refused": shown}

    def _log_lasting_refusal(self, url: str, found: _TargetRefusals) -> None:
        self._logged += 1
        if self._logged <= MAX_LOGGED:
            lines = "1 line is" if found.lines == 1 else f"{found.lines:,} lines are"
            logger.warning("%s: %s refused at every scrape: %s", redact_secrets(url), lines, found.why)
        elif self._logged == MAX_LOGGED + 1:
            logger.warning(
                "more targets have lines that are refused at every scrape: see targets_refused in /v1/ingestion"
            )
