"""The places of running attempts, cached while no attempt starts, ends or moves.

Between two ticks of a large fleet, few jobs change their places, while all of them report steps.
`RunningPlaces` is the same object as long as the places and submissions of the running attempts do
not change. So readers may cache results by the identity of this object.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.jobs import JobAttempt


class RunningPlaces:
    """The places of the running attempts at one moment. Attempts are numbered as in `running`."""

    def __init__(self, running: Sequence[JobAttempt]) -> None:
        self._of = [(row.job, row.attempt, row.ranks, row.nodes, row.submission, _find_origin(row)) for row in running]
        self.hosts = tuple(row.hosts for row in running)  # nodes of each attempt
        self.gpus = tuple(row.gpus for row in running)  # as its events state them

    @classmethod
    def from_running(cls, running: Sequence[JobAttempt], before: Self | None = None) -> Self:
        """Return the places of `running`, or `before` itself if none of its inputs has changed."""
        return before if before is not None and before.matches_attempts(running) else cls(running)

    def matches_attempts(self, running: Sequence[JobAttempt]) -> bool:
        """Return whether these are the same attempts, in the same order, with the same places and submissions."""
        return len(running) == len(self._of) and all(
            row.ranks is ranks
            and row.nodes is nodes
            and row.submission is submission
            and row.job == job
            and row.attempt == attempt
            and _find_origin(row) == teller
            for row, (job, attempt, ranks, nodes, submission, teller) in zip(running, self._of, strict=True)
        )

    @cached_property
    def keys(self) -> list[tuple[str, int]]:
        """The job name and attempt number of each attempt, in order."""
        return [of[:2] for of in self._of]

    @cached_property
    def host_counts(self) -> NDArray[np.int64]:
        """(attempt,) the number of nodes that each attempt runs on."""
        return np.array([len(hosts) for hosts in self.hosts], np.int64)

    @cached_property
    def jobs_on(self) -> dict[str, list[int]]:
        """Node name → indices of the attempts that run there."""
        found: dict[str, list[int]] = {}
        for number, hosts in enumerate(self.hosts):
            for host in dict.fromkeys(hosts):
                found.setdefault(host, []).append(number)
        return found


def _find_origin(row: JobAttempt) -> str:
    """Return the origin of an attempt's facts if it has no submission. Otherwise return "".

    Without a submission, the number of GPUs of an attempt depends on this origin.
    """
    return row.source if row.submission is None else ""
