"""The reasons why Slurm jobs wait, and which of them block a job even if enough GPUs are free.

A job that waits for machines, its priority, a quota or a licence is demand. A job that is held,
depends on another job, begins later or requests something that its partition never gives is
blocked: more free GPUs would not start it. Reasons that this file does not name count as waiting.
"""

import re

_BLOCKED = frozenset(
    {
        # people and scripts hold it
        *("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "FedJobLock"),
        # it waits for another job, a time, a reservation or its own throttle
        *("Dependency", "DependencyNeverSatisfied", "BeginTime", "Reservation", "JobArrayTaskLimit", "Cleaning"),
        # nothing will start it as it is
        *("BadConstraints", "PartitionDown", "PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit"),
        *("PartitionConfig", "ReservationDeleted", "DeadLine", "AccountNotAllowed", "QOSNotAllowed", "InvalidAccount"),
        *("InvalidQOS", "AssociationTimeLimit", "AssocTimeLimit", "QOSTimeLimit", "QOSUsageThreshold", "FrontEndDown"),
        "MaxMemPerLimit",
    }
)
_HELD_STATES = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_PER_JOB = re.compile(r"(?:QOS|Assoc)(?:Max|Min)\w*(?:PerJob|PerNode|WallDuration)\w*|QOSMin\w+|Max\w+PerJob")
_HELD_WORDS = re.compile(r"\bheld\b", re.IGNORECASE)  # "launch failed requeued held", "job requeued in held state"


def is_blocked(reason: str, states: tuple[str, ...] = (), *, is_held: bool = False) -> bool:
    """Return whether a waiting job may not start even if enough GPUs are free.

    `reason`: Slurm's reason, with or without details after a comma. `is_held`: its priority is 0, as
    `--hold` sets it.

    >>> is_blocked("JobHeldUser"), is_blocked("Dependency"), is_blocked("launch failed requeued held")
    (True, True, True)
    >>> is_blocked("Resources"), is_blocked("ReqNodeNotAvail, UnavailableNodes:n1"), is_blocked("QOSGrpGRES")
    (False, False, False)
    """
    word = re.split(r"[,(]", reason.strip("() "), maxsplit=1)[0].strip()
    if is_held or word in _BLOCKED or not _HELD_STATES.isdisjoint(states):
        return True
    return _PER_JOB.fullmatch(word) is not None or _HELD_WORDS.search(word.replace("_", " ")) is not None
