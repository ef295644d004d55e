"""Logging of the processes: one line for each event, as text or as JSON. No line contains a secret.

2026-11-21T13:43:20.123Z INFO api fleetcast.service.api.role: listening on http://127.0.0.1:8080/
{"time": "2026-11-21T13:43:20.123Z", "level": "info", "role": "api", "logger":
"fleetcast.service.api.role", "message": "…"}
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType
from typing import TypeVar

from fleetcast.cli.kit.screen import echo
from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.fleet.printable import escape_unprintable
from fleetcast.fleet.redaction import redact_secrets

FORMAT_VARIABLE, LEVEL_VARIABLE = "FLEETCAST_LOG_FORMAT", "FLEETCAST_LOG_LEVEL"

Choice = TypeVar("Choice", bound=StrEnum)


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LineFormatter(logging.Formatter):
    """A formatter that writes a record as one line.

    `role`: the name of the process that logs.
    """

    def __init__(self, form: Format, role: str) -> None:
        super().__init__("%(message)s")
        self.form = form
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        message = redact_secrets(record.getMessage())
        trace = redact_secrets(self.formatException(record.exc_info)) if record.exc_info else ""
        if self.form is Format.TEXT:
            said = f"{message}\n{trace}" if trace else message
            return f"{time} {record.levelname} {self.role} {record.name}: {escape_unprintable(said)}"
        row = {"time": time, "level": record.levelname.lower(), "role": self.role, "logger": record.name}
        return escape_unprintable(json.dumps(row | {"message": message} | ({"exception": trace} if trace else {})))


def configure_logging(form: Format | None = None, level: LogLevel | None = None, role: str = "fleetcast") -> None:
    """Send logs to stderr. If a setting is None, it comes from the environment.

    Raises ConfigError if the environment has an unknown value.
    """
    form = form or _read_choice(Format, FORMAT_VARIABLE, Format.TEXT)
    level = level or _read_choice(LogLevel, LEVEL_VARIABLE, LogLevel.INFO)
    os.environ[FORMAT_VARIABLE], os.environ[LEVEL_VARIABLE] = form, level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(form, role))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # below that it tells of every bad request
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it tells of every try; what came of them says who asked
    sys.excepthook = _log_crash


def _read_choice(kind: type[Choice], variable: str, default: Choice) -> Choice:
    text = os.environ.get(variable) or default
    if text not in set(kind):
        raise ConfigError(f"{variable} = {text!r}: must be one of {', '.join(kind)}")
    return kind(text)


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    logging.getLogger("fleetcast").critical("ended by an error of ours", exc_info=(kind, error, trace))


def report_error(error: FleetcastError) -> None:
    """Print on stderr the error that ends the command. With JSON logs, log the error instead."""
    if os.environ.get(FORMAT_VARIABLE) == Format.JSON:
        logging.getLogger("fleetcast").error("%s", error)
    else:
        echo(f"fleetcast: {redact_secrets(str(error))}", err=True)
