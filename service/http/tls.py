"""TLS of the api's own: new connections get the newest context, made once changed files fit together."""

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
from typing import Any, NoReturn

from fleet.errors import ConfigError
from service.config import ApiConfig
from service.http.certificates import validity_s

logger = logging.getLogger(__name__)

LOOK_S = 2.0  # wall


@dataclass(frozen=True, slots=True)
class Made:
    """A context, until when its certificate is valid (seconds since 1970), and what the files were then."""

    context: ssl.SSLContext
    until_s: float
    stamp: tuple[Any, ...]


class Tls:
    """Raises ConfigError where the files cannot be used; later on it goes on with what it had."""

    def __init__(self, api: ApiConfig) -> None:
        self._api = api
        self._made = make(api)
        self._said = ""

    @property
    def context(self) -> ssl.SSLContext:
        return self._made.context

    @property
    def stamp(self) -> tuple[Any, ...]:
        """Of the files that the context was made of; changes with it."""
        return self._made.stamp

    @property
    def until_s(self) -> float:
        """When the certificate that is shown now expires."""
        return self._made.until_s

    def look(self) -> None:
        """Take over what the files hold, if it is new and can be used."""
        try:
            if stamp_of(self._api) == self._made.stamp:
                return
            self._made = make(self._api)
        except ConfigError as error:
            if str(error) != self._said:
                self._said = str(error)
                logger.error("%s; the certificate of before is shown on", error)
            return
        self._said = ""
        logger.info("took over the certificate in %s, valid until %s", self._api.tls_cert, date_of(self.until_s))

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look after the files meanwhile."""
        work = asyncio.ensure_future(self._look_forever())
        try:
            yield
        finally:
            work.cancel()

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)


def make(api: ApiConfig) -> Made:
    """The context of the files. ConfigError names the key, the file and what to do."""
    stamp = stamp_of(api)
    until_s = _check_dates(api.tls_cert)
    _check_key(api.tls_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0  # a session that is resumed is not verified again
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(api.tls_cert, api.tls_key, password=lambda: _refuse_passphrase(api.tls_key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"api.tls_key = {api.tls_key}: is not the key of api.tls_cert = {api.tls_cert}: name a pair"
            ) from None
        raise ConfigError(
            f"api.tls_cert = {api.tls_cert}, api.tls_key = {api.tls_key}: expected a certificate and its key in PEM "
            f"({error.reason or error})"
        ) from None
    if api.client_ca:
        _ask_for_certificates(context, api.client_ca)
    return Made(context, until_s, stamp)


def _ask_for_certificates(context: ssl.SSLContext, path: str) -> None:
    """Certificates are optional, but those of other authorities are refused."""
    _read("api.client_ca", path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        why = error.reason or error
        raise ConfigError(f"api.client_ca = {path}: expected certificates in PEM ({why})") from None
    context.verify_mode = ssl.CERT_OPTIONAL


def _check_dates(path: str) -> float:
    """Until when the certificate is valid; ConfigError when that is over."""
    try:
        from_s, until_s = validity_s(_read("api.tls_cert", path))
    except ValueError as error:
        raise ConfigError(f"api.tls_cert = {path}: {error}; expected a certificate in PEM") from None
    now_s = time.time()
    if until_s < now_s:
        raise ConfigError(f"api.tls_cert = {path}: expired on {date_of(until_s)}: put a new certificate there")
    if from_s > now_s:
        logger.warning("api.tls_cert = %s: is valid from %s on, which is later than now", path, date_of(from_s))
    return until_s


def _check_key(path: str) -> None:
    _read("api.tls_key", path)
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if mode & 0o077:
        logger.warning("api.tls_key = %s: others than its owner may use it (mode %04o): chmod 600 it", path, mode)


def _read(key: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{key} = {path}: cannot be read: {error.strerror}") from None


def _refuse_passphrase(path: str) -> NoReturn:
    raise ConfigError(f"api.tls_key = {path}: is encrypted, and nobody is here to type its passphrase: decrypt it")


def stamp_of(api: ApiConfig) -> tuple[Any, ...]:
    """Changes with any of the files. A link that leads elsewhere now is another file."""
    stamps: list[Any] = []
    for path in (api.tls_cert, api.tls_key, api.client_ca):
        try:
            told = Path(path).stat() if path else None
        except OSError:
            told = None
        stamps.append(told and (told.st_dev, told.st_ino, told.st_mtime_ns, told.st_size))
    return tuple(stamps)


def date_of(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
