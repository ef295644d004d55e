"""Plugins: what an import path in the configuration names."""

import importlib
from typing import Any

from fleet.errors import ConfigError


def load(key: str, path: str) -> Any:
    """What `package.module:name` names. Raises ConfigError, with the configuration's key, when it is not there."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: {path!r}: {error}; give 'package.module:name'") from None
