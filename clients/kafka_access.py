"""Access to a Kafka cluster: addresses, TLS and SASL. Secrets come from the environment only."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet.errors import ConfigError

PASSWORD = "FLEETCAST_KAFKA_PASSWORD"  # of the SASL user
KEY_PASSWORD = "FLEETCAST_KAFKA_KEY_PASSWORD"  # of the client's private key, where it has one
SECURITY = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


class KafkaAccess(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options for access to a Kafka cluster. `brokers`: HOST:PORT of some brokers. The files are PEM."""

    brokers: str | list[str]
    security: str = "plaintext"
    sasl_mechanism: str = "SCRAM-SHA-512"
    username: str = ""
    ca_file: str = ""  # whom to trust; empty: the system's certificates
    cert_file: str = ""  # our own certificate, where the brokers ask for one
    key_file: str = ""

    @property
    def addresses(self) -> list[str]:
        """The HOST:PORT of each broker."""
        given = self.brokers.split(",") if isinstance(self.brokers, str) else self.brokers
        return [address.strip() for address in given]


def check_access(access: KafkaAccess, environment: Mapping[str, str] = os.environ) -> None:
    """Check the options without a connection. Raises ConfigError that names the option."""
    if not access.addresses:
        raise ConfigError("kafka: brokers = []: expected at least one HOST:PORT")
    for address in access.addresses:
        host, _, port = address.rpartition(":")
        if not host or not (port.isascii() and port.isdecimal() and len(port) <= 5) or not 0 < int(port) < 65_536:
            raise ConfigError(f"kafka: brokers = {address!r}: expected HOST:PORT, such as kafka-1:9092")
    _check_choice("security", access.security, SECURITY)
    if access.security.startswith("sasl_"):
        _check_choice("sasl_mechanism", access.sasl_mechanism, MECHANISMS)
        if not access.username:
            raise ConfigError(f"kafka: security = {access.security!r} needs username")
        if not environment.get(PASSWORD):
            raise ConfigError(f"kafka: the password of {access.username!r} is expected in the environment: {PASSWORD}")
    for key in ("ca_file", "cert_file", "key_file"):
        path = getattr(access, key)
        if path and not Path(path).is_file():
            raise ConfigError(f"kafka: {key} = {path!r}: no such file")


def _check_choice(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"kafka: {key} = {value!r}: expected one of {', '.join(known)}")


def make_client_settings(access: KafkaAccess, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the settings that all of kafka-python's clients share.

    Backoffs are short, so that a client finds a returning broker at once.
    """
    found: dict[str, Any] = {
        "bootstrap_servers": access.addresses,
        "client_id": "fleetcast",
        "security_protocol": access.security.upper(),
        "reconnect_backoff_max_ms": 500,
        "bootstrap_timeout_ms": 5000,
        "request_timeout_ms": 10_000,
    }
    if access.security.startswith("sasl_"):
        found["sasl_mechanism"] = access.sasl_mechanism
        found["sasl_plain_username"] = access.username
        found["sasl_plain_password"] = environment.get(PASSWORD, "")
    files: dict[str, str | None] = {
        "ssl_cafile": access.ca_file,
        "ssl_certfile": access.cert_file,
        "ssl_keyfile": access.key_file,
        "ssl_password": environment.get(KEY_PASSWORD),
    }
    return found | {key: value for key, value in files.items() if value}
