"""Logging of disk errors that must not end the process."""

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def log_disk_errors(what: str, then: str) -> Iterator[None]:
    """Log an OSError from the context, and continue. A restart would not repair the disk.

    what: the action that failed. then: what happens instead.
    """
    try:
        yield
    except OSError as error:
        logger.error("cannot %s: %s; %s", what, error, then)
