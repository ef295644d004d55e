"""Load plugins by import path, and read their options."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from fleet.errors import ConfigError

Options = TypeVar("Options", bound=msgspec.Struct)


def load(key: str, path: str) -> Any:
    """The object at `package.module:name`. Raises ConfigError that names the configuration's key."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: {path!r}: {error}; give 'package.module:name'") from None


def read_options(given: Mapping[str, Any], kind: type[Options]) -> Options:
    """An adapter's options as its struct (with `forbid_unknown_fields`). Raises ConfigError that names the key."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ConfigError(f"options: {error}; it takes {known}") from None


def load_functions(key: str, paths: Sequence[str]) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """(name, function) of import paths `package.module:function`; ConfigError when one is not there."""
    return tuple((path.partition(":")[2], load(key, path)) for path in paths)
