"""What a disk that is full or read-only is to a process that goes on: a log line that says what happens meanwhile."""

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def said(what: str, then: str) -> Iterator[None]:
    """An OSError becomes a log line: a restart would not mend it, and cost what is in memory."""
    try:
        yield
    except OSError as error:
        logger.error("cannot %s: %s; %s", what, error, then)
