"""Load plugins by import path."""

import importlib
from typing import Any

from fleet.errors import ConfigError


def load(key: str, path: str) -> Any:
    """The object at `package.module:name`. Raises ConfigError that names the configuration's key."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: {path!r}: {error}; give 'package.module:name'") from None
