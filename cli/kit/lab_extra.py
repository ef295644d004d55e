"""The extra `lab`: libraries that only some commands need, and that no role of the service imports."""

from fleetcast.fleet.errors import ConfigError

LAB_MODULES = {
    "matplotlib": "matplotlib",
    "pandas": "pandas",
    "prometheus_api_client": "prometheus-api-client",
    "sklearn": "scikit-learn",
    "statsmodels": "statsmodels",
}  # module → its distribution in pyproject.toml


def explain_missing_module(error: ModuleNotFoundError) -> ConfigError | None:
    """Return the line to type if a library of the extra is missing. Returns None for any other module."""
    distribution = LAB_MODULES.get((error.name or "").partition(".")[0])
    if distribution is None:
        return None
    return ConfigError(f"this command needs {distribution}, which is not installed: pip install 'fleetcast[lab]'")
