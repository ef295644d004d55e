"""The check that the packages of the gRPC extra are installed."""

import importlib

from fleetcast.fleet.errors import ConfigError


def require_grpc(port: int) -> None:
    """Check that the gRPC packages are installed. Raises ConfigError that names the extra."""
    for name in ("grpc", "google.protobuf"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"api.grpc_port = {port}: gRPC needs a package that is not here ({error}): "
                "pip install 'fleetcast[grpc]', or set api.grpc_port = 0"
            ) from None
