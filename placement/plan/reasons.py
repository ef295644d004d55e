"""The reasons why entries of the queue wait: a code, and the details from which a sentence is made.

Thousands of entries share one reason, so its sentence is made only when a caller reads it. The free
GPUs that the sentence names are those after the pass.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.machines.words import describe_fitting_room, describe_needs
from fleetcast.placement.plan.turns import QueueTurns
from fleetcast.placement.queues.closed import format_date

WaitCode = Literal["queue", "never", "next", "window", "room", "kept", "untried", "unknown", "gone"]
"""queue: its queue may have no more; never: it fits into no empty fleet; next: GPUs are reserved for it; window: GPUs
are reserved for it from the end of a window on; room: too little is free; kept: what is free is reserved for others;
untried: the pass had tried enough others; unknown: nobody knows when CPUs and host memory come free; gone: the file of
queues does not name its queue any more."""


@dataclass(slots=True)
class StateAfterPass:
    """The state of the fleet and of the queues after a pass, from which sentences are made."""

    options: Options
    view: ClusterView
    turns: QueueTurns

    def describe_room(self, request: PlacementRequest) -> str:
        """Describe the free room for a request: `16 free GPUs fit`."""
        return describe_fitting_room(request, int(screen(request, self.view, self.options).room.sum()))


class WaitReason(msgspec.Struct, gc=False):
    """The reason why a request waits.

    request: one of the requests that share the reason. job: the job of the claim that is in the way, or the job or
    window that the request's own claim waits for. number: that of the claim, from 1, the head's. start_ms: the start of
    its own claim, 0 without one. said: the sentence, if it is known already. at_limit: the cached value of
    `is_over_quota`, None until a caller reads it.
    """

    code: WaitCode
    request: PlacementRequest
    after: StateAfterPass
    job: str = ""
    number: int = 1
    start_ms: int = 0
    said: str = ""
    at_limit: bool | None = None

    @property
    def sentence(self) -> str:
        if not self.said:
            self.said = self._make_sentence()
        return self.said

    def _make_sentence(self) -> str:
        if self.code == "kept":
            place = f"{self.job} is {self._rank_phrase}"
            return f"would fit, but on reserved GPUs: {place}, and should start before this job ends"
        what = f"waits for {describe_needs(self.request)}"
        if self.code == "untried":
            allowed = self.after.turns.limit_to_quota(self.request)
            if isinstance(allowed, str):
                return allowed
            return f"{what}; not tried in this pass; {self.job} is {self._rank_phrase}"
        text = f"{what}; {self.after.describe_room(self.request)}"
        if self.code == "next":
            return f"{text}; it is {self._rank_phrase}, when {self.job} has ended"
        if self.code == "window":
            return f"{text}; it is {self._rank_phrase}, when {self.job} ends at {format_date(self.start_ms)} UTC"
        if self.code == "unknown":
            return f"{text}; when more comes is not known"
        return f"{text}; {self.job} is {self._rank_phrase}"

    @property
    def is_over_quota(self) -> bool:
        """True if the request's queue is at its limit, so that more machines would not start the request."""
        if self.at_limit is None:
            self.at_limit = self.code in ("queue", "untried") and self.after.turns.is_at_limit(self.request)
        return self.at_limit

    @property
    def _rank_phrase(self) -> str:
        return "next" if self.number == 1 else f"number {self.number} of those with reserved GPUs"
