"""The owner's word on whether a running job may be stopped, in a Kubernetes label or a Slurm comment.

A word that is neither yes nor no counts as not said. The job gets it as the label `unread_preemptible`, and its
submission counts as one bad record.
"""

import re
from collections.abc import Iterable

from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import JobEvent, NodeEvent, Submitted

LABEL = "fleetcast.io/preemptible"
UNREAD = "unread_preemptible"  # the label of a job with an unreadable word
YES, NO = ("true", "yes", "1"), ("false", "no", "0")
_IN_COMMENT = re.compile(r"(?<![\w./-])fleetcast(?:\.io)?/preemptible=([^\s;,]*)", re.IGNORECASE)


def find_in_comment(comment: str) -> str:
    """Return the value of the key `fleetcast.io/preemptible` in a comment, or "" without one.

    The key `fleetcast/preemptible` means the same. The last occurrence counts.

    >>> find_in_comment("resubmit me; fleetcast.io/preemptible=false"), find_in_comment("preemptible=false")
    ('false', '')
    """
    found = _IN_COMMENT.findall(comment)
    return found[-1] if found else ""


def parse_preemptible(word: str) -> bool | None:
    """Return whether a word is yes or no, or None if it is neither.

    >>> parse_preemptible("Yes"), parse_preemptible("0"), parse_preemptible("maybe"), parse_preemptible("")
    (True, False, None, None)
    """
    word = word.lower()
    return True if word in YES else False if word in NO else None


def make_unread_label(word: str) -> dict[str, str]:
    """Return the label for a job whose word is neither yes nor no. Empty for a readable word, or without one."""
    if not word or parse_preemptible(word) is not None:
        return {}
    shown = "".join(part if part.isprintable() else "?" for part in word[:MAX_NAME_LENGTH])
    return {UNREAD: shown}


def list_unread_words(events: Iterable[JobEvent | NodeEvent]) -> list[RecordError]:
    """Return an error for each submission whose word on preemption is unreadable."""
    expected = f"expected one of {', '.join(YES + NO)}"
    return [
        RecordError("bad_value", f"job {event.job}: preemptible is {event.labels[UNREAD]!r}, {expected}")
        for event in events
        if isinstance(event, Submitted) and UNREAD in event.labels
    ]
