"""Loading of plugins by import path, and decoding of their options."""

import importlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from fleetcast.fleet.decode_faults import find_first_fault
from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.fleet.import_names import PACKAGE, suggest_import_path
from fleetcast.service.withheld_imports import allow_imports

Options = TypeVar("Options", bound=msgspec.Struct)


def load_plugin(key: str, path: str) -> Any:
    """Return the object at `package.module:name`.

    Raises ConfigError that names the configuration key.
    """
    module, _, name = path.partition(":")
    if advice := suggest_import_path(path):
        raise ConfigError(f"{key}: {path!r}: {advice}")
    if module.partition(".")[0] != PACKAGE:
        allow_imports()
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: {path!r}: {error}; give 'package.module:name'") from None
    except Exception as error:  # whatever the code of a plugin raises when it is imported
        raise ConfigError(f"{key}: {path!r} cannot be imported: {describe_cause(error)}") from None


def call_plugin(key: str, path: str, plugin: Callable[..., Any], *arguments: object) -> Any:
    """Call the class or function of a plugin, and return its result.

    Raises ConfigError for any error of the plugin's own code. key, path: where the configuration names the
    plugin, for the message.
    """
    try:
        return plugin(*arguments)
    except FleetcastError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}: {path!r} cannot be made: {describe_cause(error)}") from None


def describe_cause(error: Exception) -> str:
    """Describe an error by its class, its message, and the file and line that raised it.

    >>> describe_cause(NameError("name 'y' is not defined"))
    "NameError: name 'y' is not defined"
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = (error.filename, error.lineno) if isinstance(error, SyntaxError) else None
    if place is None and frames:
        place = (frames[-1].filename, frames[-1].lineno)
    words = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {words}" + (f" ({place[0]}, line {place[1]})" if place else "")


def make_forecaster(path: str) -> Any:
    """Make the forecaster that an entry of `pipeline.forecasters` names. Raises ConfigError."""
    key = "pipeline.forecasters"
    found = load_plugin(key, path)
    check_callable(key, path, found)
    return call_plugin(key, path, found)


def check_callable(key: str, path: str, found: object) -> None:
    """Raise ConfigError if a plugin is neither a function nor a class."""
    if not callable(found):
        raise ConfigError(f"{key}: {path!r} is {type(found).__name__}: expected a function or a class")


def read_options(given: Mapping[str, Any], kind: type[Options]) -> Options:
    """Decode an adapter's options into its own struct type (with `forbid_unknown_fields`).

    Raises ConfigError that names the key.
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options.{find_first_fault(error, kind, given, toml=True).sentence}") from None


def load_functions(key: str, paths: Sequence[str]) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """Return (name, function) for each import path `package.module:function`.

    Raises ConfigError if a function does not exist.
    """
    return tuple((path.partition(":")[2], load_plugin(key, path)) for path in paths)
