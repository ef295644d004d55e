"""The optional dependencies `lab`: libraries that only some commands need.

No role of the service imports them.
"""

from fleetcast.fleet.errors import ConfigError

LAB_MODULES = {
    "matplotlib": "matplotlib",
    "pandas": "pandas",
    "prometheus_api_client": "prometheus-api-client",
    "sklearn": "scikit-learn",
    "statsmodels": "statsmodels",
}  # module → its distribution in pyproject.toml


def explain_missing_module(error: ModuleNotFoundError) -> ConfigError | None:
    """Return an error with the command that installs a missing library of the extra `lab`.

    Returns None if the missing module does not belong to the extra.
    """
    distribution = LAB_MODULES.get((error.name or "").partition(".")[0])
    if distribution is None:
        return None
    return ConfigError(f"this command needs {distribution}, which is not installed: pip install 'fleetcast[lab]'")
