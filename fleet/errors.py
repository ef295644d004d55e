"""The error tree: each class says what happens next.

    FleetcastError
    ├── RecordError      one bad input record: count by reason, store an example, skip it
    ├── SourceError      a source is unreachable: back off, retry, show a gauge
    ├── ConfigError      refuse to start, name the key, the value and the fix (exit 2)
    ├── RequestError     the caller's fault                                    HTTP 422
    ├── UnknownEntity    no such node, job or request                          HTTP 404
    ├── StaleError       the data are too old to answer with                   HTTP 503
    ├── ConflictError    the plan lost the race: decide again once             HTTP 409
    └── ModelError       a model is missing or unusable: serve the baseline, alert

Any other error is a bug. A source with one is counted, logged and restarted. Any other process
exits and restarts.
"""


class FleetcastError(Exception):
    """The root of the error tree. It is never raised itself."""


class RecordError(FleetcastError):
    """A bad input record, or `count` of them for one reason.

    `reason` is a short label, and becomes a metric label. `detail` is the evidence of the first record.
    """

    def __init__(self, reason: str, detail: str = "", count: int = 1) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.count = count


class SourceError(FleetcastError):
    """The error of a source that does not answer. Try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConfigError(FleetcastError):
    """An error in the configuration. The process refuses to start."""


class RequestError(FleetcastError):
    """A request that cannot be fulfilled as written. `field`: the wrong key, or None."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownEntity(FleetcastError):
    """The error for a node, job or request that does not exist."""


class StaleError(FleetcastError):
    """The error for data that are too old to answer with. Try again after `retry_after_s` seconds."""

    retry_after_s = 2.0


class ConflictError(FleetcastError):
    """The error for a plan that lost the race against another commit."""


class ModelError(FleetcastError):
    """The error for a model that is missing or gives invalid results."""
