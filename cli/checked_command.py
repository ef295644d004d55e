"""The class of all commands: values that no command can use are refused, and errors name the option they come from.

A command function receives only text that is UTF-8 without NUL, finite numbers, and integers of 64 bits. An error of
the file system that is about an option's value becomes a sentence.
"""

import enum
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer
from typer.core import TyperCommand

from fleet.errors import ConfigError, FleetcastError

URL = re.compile(r"[A-Za-z][\w+.-]*:")
LARGEST = 2**63 - 1
SHOWN = 80  # characters of a value


class CheckedCommand(TyperCommand):
    """A command whose options are checked before its function runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the value where only the option is named."""
        before = list(args)
        try:
            return list(super().parse_args(ctx, args))
        except typer.BadParameter as error:
            value = _typed(before, error.param)
            if value is not None and not _holds(error.message, value):
                error.message = f"{_shown(value)}: {error.message}"
            raise

    def invoke(self, ctx: Any) -> Any:
        given = list(_given(self, ctx))
        for name, value in ctx.params.items():
            if isinstance(value, Path) and URL.match(str(value)):  # libraries for files would take it for a URL
                ctx.params[name] = value.absolute()
        for option, value in given:
            why = _unusable(value)
            if why:
                raise typer.BadParameter(f"{_shown(value)}: {why}", param_hint=option)
        try:
            return super().invoke(ctx)
        except FleetcastError as error:
            error.args = (_named(str(error), given),)
            raise
        except OSError as error:
            named = _option_of(str(error), given)
            if named is None or isinstance(error, BrokenPipeError):
                raise
            raise ConfigError(f"{named} {_shown(error.filename or '')}: {error.strerror or error}") from None


def check_all(app: typer.Typer) -> None:
    """Make every command of an app and of its groups a CheckedCommand."""
    for command in app.registered_commands:
        command.cls = CheckedCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            check_all(group.typer_instance)


def _given(command: TyperCommand, ctx: Any) -> Iterator[tuple[str, Any]]:
    """(option as it is typed, value) of everything on the command line. An argument is named by its metavar."""
    for param in command.params:
        source = ctx.get_parameter_source(param.name)
        if source is None or source.name != "COMMANDLINE":
            continue
        name = param.opts[-1] if param.param_type_name == "option" else param.metavar or str(param.name).upper()
        value = ctx.params.get(param.name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            yield name, each


def _typed(args: list[str], param: Any) -> str | None:
    """Return the text that was typed for an option, or None for an argument."""
    for place, arg in enumerate(args):
        for option in getattr(param, "opts", ()):
            if arg == option and place + 1 < len(args):
                return args[place + 1]
            if arg.startswith(f"{option}="):
                return arg.partition("=")[2]
    return None


def _unusable(value: Any) -> str:
    """Return why no command can use a value, or an empty string."""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        return f"must lie in -{LARGEST}..{LARGEST}"
    if isinstance(value, (str, Path)) and not isinstance(value, enum.Enum):
        text = str(value)
        if "\0" in text:
            return "must not hold a NUL character"
        try:
            text.encode()
        except UnicodeEncodeError:
            return "must be text in UTF-8"
        try:
            urlsplit(text)
        except ValueError as error:
            return f"is no URL: {error}"
    return ""


def _named(message: str, given: list[tuple[str, Any]]) -> str:
    """Put the option before a message that is about its value and does not name it."""
    option = _option_of(message, given)
    return message if option is None or option in message else f"{option}: {message}"


def _option_of(message: str, given: list[tuple[str, Any]]) -> str | None:
    """Return the option whose value a message holds: the longest value, if there are several.

    No message shows an empty value, so an option without one is named where no other fits.
    """
    values = [(option, _text(value)) for option, value in given if value is not None]
    found = [(len(text), option) for option, text in values if text.strip() and _holds(message, text)]
    empty = [option for option, text in values if text.strip() in ("", ".")]  # Path("") is "."
    return max(found)[1] if found else next(iter(empty), None)


def _text(value: Any) -> str:
    return (
        str(value.value)
        if isinstance(value, enum.Enum)
        else os.fspath(value)
        if isinstance(value, Path)
        else str(value)
    )


def _holds(message: str, text: str) -> bool:
    forms = {re.escape(form) for form in (text, repr(text)[1:-1]) if form}
    return any(re.search(rf"(?<![\w.]){form}(?!\w)", message) for form in forms)


def _shown(value: Any) -> str:
    """A value as one short line of printable characters."""
    text = value if isinstance(value, (int, float)) else repr(_text(value))
    line = str(text)
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
