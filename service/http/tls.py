"""The TLS of our own servers. The certificate files may change while the service runs.

Once changed files fit together, they replace the TLS context. New connections use the newest context.
"""

import asyncio
import contextlib
import logging
import ssl
import stat
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from fleetcast.fleet.errors import ConfigError
from fleetcast.service.http.certificates import read_certificate_validity_s

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 2.0  # wall


@dataclass(frozen=True, slots=True)
class LoadedContext:
    """A TLS context that was made from files.

    until_s: the expiry of the certificate, in Unix seconds. stamp: the result of `make_file_stamp` for the
    files.
    """

    context: ssl.SSLContext
    until_s: float
    stamp: tuple[Any, ...]


class TlsKeys(Protocol):
    """The TLS keys of a configuration section. Their values are paths of PEM files."""

    @property
    def tls_cert(self) -> str: ...

    @property
    def tls_key(self) -> str: ...

    @property
    def client_ca(self) -> str: ...


class Tls:
    """The TLS context of a listener. It is made again when its files change.

    Raises ConfigError if the files are unusable at the start. If changed files are unusable later, the
    present context stays. must_show: the handshake refuses clients without a certificate of `client_ca`.
    protocol: the ALPN name.
    """

    def __init__(
        self, keys: TlsKeys, section: str = "api", *, must_show: bool = False, protocol: str = "http/1.1"
    ) -> None:
        self._keys, self._section, self._must_show, self._protocol = keys, section, must_show, protocol
        self._made = make_tls_context(keys, section, must_show, protocol)
        self._said = ""

    @property
    def context(self) -> ssl.SSLContext:
        return self._made.context

    @property
    def stamp(self) -> tuple[Any, ...]:
        """The stamp of the files that the present context was made from."""
        return self._made.stamp

    @property
    def until_s(self) -> float:
        """The expiry of the present certificate, in Unix seconds."""
        return self._made.until_s

    def reload_if_changed(self) -> None:
        """Load the files if they have changed.

        If they are unusable, log the error and keep the present context.
        """
        try:
            if make_file_stamp(self._keys) == self._made.stamp:
                return
            self._made = make_tls_context(self._keys, self._section, self._must_show, self._protocol)
        except ConfigError as error:
            if str(error) != self._said:
                self._said = str(error)
                logger.error("%s; the certificate of before is shown on", error)
            return
        self._said = ""
        logger.info("took over the certificate in %s, valid until %s", self._keys.tls_cert, format_date(self.until_s))

    @contextlib.asynccontextmanager
    async def reload_while_open(self) -> AsyncIterator[None]:
        """Reload the files when they change, while the context is open."""
        work = asyncio.ensure_future(self._watch_files())
        try:
            yield
        finally:
            work.cancel()

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await asyncio.to_thread(self.reload_if_changed)


def make_tls_context(keys: TlsKeys, section: str, must_show: bool, protocol: str = "http/1.1") -> LoadedContext:
    """Make the TLS context from the files. Raises ConfigError that names the key, the file and the fix."""
    stamp = make_file_stamp(keys)
    cert, key = f"{section}.tls_cert = {keys.tls_cert}", f"{section}.tls_key = {keys.tls_key}"
    until_s = _check_certificate_expiry(cert, keys.tls_cert)
    _check_private_key(key, keys.tls_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0  # a session that is resumed is not verified again
    context.set_alpn_protocols([protocol])
    try:
        context.load_cert_chain(keys.tls_cert, keys.tls_key, password=lambda: _refuse_passphrase(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key}: is not the key of {cert}: name a pair") from None
        raise ConfigError(
            f"{cert}, {key}: expected a certificate and its key in PEM ({error.reason or error})"
        ) from None
    if keys.client_ca:
        _request_client_certificates(context, f"{section}.client_ca = {keys.client_ca}", keys.client_ca)
    if must_show:
        context.verify_mode = ssl.CERT_REQUIRED
    return LoadedContext(context, until_s, stamp)


def _request_client_certificates(context: ssl.SSLContext, label: str, path: str) -> None:
    """Let the context request client certificates, and refuse certificates of other authorities.

    A client may send no certificate. `label`, here and in the functions below: the configuration key and the
    path.
    """
    _read_pem_file(label, path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        why = error.reason or error
        raise ConfigError(f"{label}: expected certificates in PEM ({why})") from None
    context.verify_mode = ssl.CERT_OPTIONAL


def _check_certificate_expiry(label: str, path: str) -> float:
    """Return the expiry of the certificate in Unix seconds. Raises ConfigError if it has expired."""
    try:
        from_s, until_s = read_certificate_validity_s(_read_pem_file(label, path))
    except ValueError as error:
        raise ConfigError(f"{label}: {error}; expected a certificate in PEM") from None
    now_s = time.time()
    if until_s < now_s:
        raise ConfigError(f"{label}: expired on {format_date(until_s)}: put a new certificate there")
    if from_s > now_s:
        logger.warning("%s: is valid from %s on, which is later than now", label, format_date(from_s))
    return until_s


def _check_private_key(label: str, path: str) -> None:
    _read_pem_file(label, path)
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if mode & 0o077:
        logger.warning("%s: others than its owner may use it (mode %04o): chmod 600 it", label, mode)


def _read_pem_file(label: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read: {error.strerror}") from None


def _refuse_passphrase(label: str) -> NoReturn:
    raise ConfigError(f"{label}: is encrypted, and no one can type its passphrase here: decrypt it")


def make_file_stamp(keys: TlsKeys) -> tuple[Any, ...]:
    """Return a stamp that changes when any of the files changes.

    It also changes when a symbolic link points to another file.
    """
    stamps: list[Any] = []
    for path in (keys.tls_cert, keys.tls_key, keys.client_ca):
        try:
            status = Path(path).stat() if path else None
        except OSError:
            status = None
        stamps.append(status and (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(stamps)


def format_date(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
