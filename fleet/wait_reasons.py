"""The kind of resource that an attempt waits for: machines or a quota. The scheduler's reason decides.

A job that waits for a quota would not start even if machines became free. It starts once its own queue,
account or user holds less. A reason that this file does not name means waiting for machines.
"""

import re

OVER_QUOTA = "its queue is at its quota"  # of a request in our own queue
_SLURM = re.compile(
    r"(?:QOS|Assoc)(?:Grp|Max)\w+|(?:QOS|Assoc|Association)(?:Resource|Job)s?Limit|QOSUsageThreshold"
    r"|Max(?:TRES|GRES|Cpu|Node|Jobs|Submit)\w*Per(?:User|Account)\w*"
)
_WORDS = re.compile(r"\bquotas?\b|overquota|\bover ?limit\b|\boverused\b|kueue admits", re.IGNORECASE)


def waits_for_quota(reason: str) -> bool:
    """Return whether a job with this reason waits for a quota instead of machines.

    >>> waits_for_quota("QOSGrpGRES"), waits_for_quota("AssocGrpGRES, 8 of 8"), waits_for_quota("Licenses")
    (True, True, False)
    >>> waits_for_quota("insufficient unused quota for nvidia.com/gpu in flavor h100"), waits_for_quota("Resources")
    (True, False)
    """
    word = re.split(r"[,( ]", reason.strip("() "), maxsplit=1)[0]
    return _SLURM.fullmatch(word) is not None or _WORDS.search(reason) is not None
