"""A classifier of ended Slurm jobs into failure categories. All schedulers have the same categories.

The job's state decides the category, except for FAILED. There, three facts count, the most trusted first:
the signal (125 is Slurm's sign of the kernel's out-of-memory killer), Slurm's reason, and the comments of an
epilog or administrator. If none of them decides, a bad status or signal is the user's fault.
"""

import re

from fleetcast.fleet.events import FailureCategory

UNEXPLAINED: frozenset[FailureCategory] = frozenset({"user", "unknown"})  # what is left when no record says why
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68})  # a program's own fault, as NVIDIA's table of XIDs says
OUT_OF_MEMORY_SIGNAL = 125
ENDED = frozenset(
    (
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
        *("OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "REQUEUED"),  # the last: of accounting, an attempt given up
    )
)
_BY_STATE: dict[str, FailureCategory] = {
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "out_of_memory",
    "NODE_FAIL": "node_lost",
    "BOOT_FAIL": "node_lost",
    "LAUNCH_FAILED": "hardware",
}
_BY_REASON: dict[str, FailureCategory] = {
    "NodeDown": "node_lost",
    "SystemFailure": "hardware",
    "TimeLimit": "timeout",
    "InactiveLimit": "timeout",
    "OutOfMemory": "out_of_memory",
    "JobLaunchFailure": "hardware",
    "Prolog": "hardware",
    "BadConstraints": "user",
}
_XID = re.compile(r"\bxid\D{0,24}?([0-9]{1,4})\b", re.IGNORECASE)
_WORDS: tuple[tuple[re.Pattern[str], FailureCategory], ...] = (
    (re.compile(r"out[ _-]of[ _-]memory|\boom\b|oom[-_ ]?kill", re.IGNORECASE), "out_of_memory"),
    (
        re.compile(
            r"uncorrectable|fall?e?n? off the bus|gpu lost|row remap|\bdbe\b|prolog|hardware|\bmce\b|\bpsu\b",
            re.IGNORECASE,
        ),
        "hardware",
    ),
    (
        re.compile(r"\bnccl\b|infiniband|\bibv?_|\bib\d? |link (?:is )?down|retry_exc_err|network", re.IGNORECASE),
        "network",
    ),
    (re.compile(r"not responding|node (?:fail|down|lost)|rebooted", re.IGNORECASE), "node_lost"),
)


def classify_end(state: str, reason: str, comment: str, status: tuple[int, int]) -> FailureCategory:
    """Return the failure category of a job that ended in `state`. `status`: its exit status and signal.

    >>> classify_end("FAILED", "NonZeroExitCode", "", (1, 0)), classify_end("TIMEOUT", "TimeLimit", "", (0, 15))
    ('user', 'timeout')
    >>> classify_end("FAILED", "NonZeroExitCode", "epilog: n4 Xid (PCI:0000:1b:00): 79", (0, 9))
    'hardware'
    """
    if state in _BY_STATE:
        return _BY_STATE[state]
    code, signal = status
    if signal == OUT_OF_MEMORY_SIGNAL:
        return "out_of_memory"
    cause = classify_reason(reason) or classify_comment(comment)
    if cause is not None:
        return cause
    return "user" if code or signal else "unknown"


def classify_reason(reason: str) -> FailureCategory | None:
    return next((found for word, found in _BY_REASON.items() if reason.startswith(word)), None)


def classify_comment(text: str) -> FailureCategory | None:
    """Return the failure category that a comment describes, or None if it describes no known category."""
    text = text[:4096]
    without_addresses = re.sub(r"\([^()]*\)", "", text)  # "Xid (PCI:0000:1b:00): 79, …"
    if xids := [int(number) for number in _XID.findall(without_addresses)]:
        return "user" if all(number in APPLICATION_XIDS for number in xids) else "hardware"
    return next((found for pattern, found in _WORDS if pattern.search(text)), None)
