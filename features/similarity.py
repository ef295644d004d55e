"""Which jobs are of one kind: by user and name, by user and size, by queue and size. A kind is a 64-bit key.

What is known of finished jobs is kept and published by these keys, and asked for by them; the most telling one that
is known speaks. A key is a hash, so that a reader of an array of keys needs neither names nor a decoder.
"""

import hashlib
import re
from typing import Literal

STEM_CHARS = 80
_NO_LETTERS = re.compile(r"[\W\d_]+")

Kind = Literal["user, name and GPUs", "user and name", "user and GPUs", "user", "queue and GPUs", "GPUs", "all jobs"]


def stem(name: str) -> str:
    """The words of a name without its numbers: what the runs of one kind of job have in common.

    >>> stem("Train-042"), stem("resnet50_lr0.1_7"), stem("0042")
    ('train', 'resnet-lr', '')
    """
    return _NO_LETTERS.sub("-", name.lower()).strip("-")[:STEM_CHARS]


def kinds(user: str, name: str, queue: str, gpus: int) -> dict[Kind, int]:
    """The keys of a job, the most telling first; without a user or a name there are none of these.

    >>> list(kinds("", "train-1", "batch", 8))
    ['queue and GPUs', 'GPUs', 'all jobs']
    """
    words = stem(name)
    found: dict[Kind, int] = {}
    if user and words:
        found["user, name and GPUs"] = _key("user, name and GPUs", user, words, str(gpus))
        found["user and name"] = _key("user and name", user, words)
    if user:
        found["user and GPUs"] = _key("user and GPUs", user, str(gpus))
        found["user"] = _key("user", user)
    found["queue and GPUs"] = _key("queue and GPUs", queue, str(gpus))
    found["GPUs"] = _key("GPUs", str(gpus))
    found["all jobs"] = _key("all jobs")
    return found


def _key(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
