"""CheckedCommand: the class of all commands. It refuses unusable values, and names the option in errors.

A command function receives only text that is UTF-8 without NUL, finite numbers, and integers of 64
bits. An error of the file system about an option's value is printed as a sentence.
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

from fleetcast.fleet.errors import ConfigError, FleetcastError

URL = re.compile(r"[A-Za-z][\w+.-]*:")
LARGEST = 2**63 - 1
SHOWN = 80  # characters of a value


class CheckedCommand(TyperCommand):
    """A command whose options are checked before its function runs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Adds the value to the message of an error that names only the option."""
        before = list(args)
        try:
            return list(super().parse_args(ctx, args))
        except typer.BadParameter as error:
            value = _find_typed_text(before, error.param)
            if value is not None and not _contains_value(error.message, value):
                error.message = f"{_format_value(value)}: {error.message}"
            raise

    def invoke(self, ctx: Any) -> Any:
        given = list(_list_given_values(self, ctx))
        for name, value in ctx.params.items():
            if isinstance(value, Path) and URL.match(str(value)):  # libraries for files would take it for a URL
                ctx.params[name] = value.absolute()
        for option, value in given:
            why = _describe_problem(value)
            if why:
                raise typer.BadParameter(f"{_format_value(value)}: {why}", param_hint=option)
        try:
            return super().invoke(ctx)
        except FleetcastError as error:
            error.args = (_add_option_names(str(error), given),)
            raise
        except OSError as error:
            named = _find_options_in_message(str(error), given)
            if not named or isinstance(error, BrokenPipeError):
                raise
            raise ConfigError(
                f"{', '.join(named)} {_format_value(error.filename or '')}: {error.strerror or error}"
            ) from None


def use_checked_commands(app: typer.Typer) -> None:
    """Make every command of an app and of its groups a CheckedCommand."""
    for command in app.registered_commands:
        command.cls = CheckedCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            use_checked_commands(group.typer_instance)


def _list_given_values(command: TyperCommand, ctx: Any) -> Iterator[tuple[str, Any]]:
    """Yield (option or argument, value) for each value on the command line.

    An option has the name that the user typed. An argument has its metavar.
    """
    for param in command.params:
        source = ctx.get_parameter_source(param.name)
        if source is None or source.name != "COMMANDLINE":
            continue
        name = param.opts[-1] if param.param_type_name == "option" else param.metavar or str(param.name).upper()
        value = ctx.params.get(param.name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            yield name, each


def _find_typed_text(args: list[str], param: Any) -> str | None:
    """Return the text that was typed for an option, or None for an argument."""
    for place, arg in enumerate(args):
        for option in getattr(param, "opts", ()):
            if arg == option and place + 1 < len(args):
                return args[place + 1]
            if arg.startswith(f"{option}="):
                return arg.partition("=")[2]
    return None


def _describe_problem(value: Any) -> str:
    """Return the reason why no command can use a value, or "" if it is usable."""
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


def _add_option_names(message: str, given: list[tuple[str, Any]]) -> str:
    """Return the message, preceded by the names of the options whose values it contains.

    A message that already names an option is returned unchanged.
    """
    options = _find_options_in_message(message, given)
    return f"{', '.join(options)}: {message}" if options and not any(one in message for one in options) else message


def _find_options_in_message(message: str, given: list[tuple[str, Any]]) -> list[str]:
    """Return the options whose values a message contains.

    A value that is part of a longer value does not count. An option with an empty value is always
    included, because no message shows that value.
    """
    texts = [(option, _convert_to_text(value).strip()) for option, value in given if value is not None]
    empty = {option for option, text in texts if text in ("", ".")}  # Path("") is "."
    held = [(option, text) for option, text in texts if option not in empty and _contains_value(message, text)]
    found = {option for option, text in held if not any(text != other and text in other for _, other in held)}
    return list(dict.fromkeys(option for option, _ in texts if option in found | empty))


def _convert_to_text(value: Any) -> str:
    return (
        str(value.value)
        if isinstance(value, enum.Enum)
        else os.fspath(value)
        if isinstance(value, Path)
        else str(value)
    )


def _contains_value(message: str, text: str) -> bool:
    forms = {re.escape(form) for form in (text, repr(text)[1:-1]) if form}
    return any(re.search(rf"(?<![\w.]){form}(?!\w)", message) for form in forms)


def _format_value(value: Any) -> str:
    """Format a value as one short line of printable characters."""
    text = value if isinstance(value, (int, float)) else repr(_convert_to_text(value))
    line = str(text)
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
