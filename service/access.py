"""Who may ask for what. Closed by default: loopback without a token, any other address only with tokens.

Tokens come from the environment, never from a file of the configuration nor from a command line: `FLEETCAST_TOKENS`
holds them, or `FLEETCAST_TOKENS_FILE` names a file that does; a line each, `#` begins a comment:

    name scope[,scope] token            grafana read 0f6c2e…        scopes: read, events, place, admin (all of them)

A caller sends `Authorization: Bearer TOKEN`, or Basic with the token as the password and any user name (a program
that can only be given a URL takes `http://user:TOKEN@host`). Without tokens everybody who reaches us may do
everything; only a page of another site, opened in a browser on this machine, may change nothing and read nothing.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from starlette.requests import Request

from fleet.errors import ConfigError
from service.problems import Problem
from service.wrong_tokens import LATE_S, WrongTokens

TOKENS, TOKENS_FILE = "FLEETCAST_TOKENS", "FLEETCAST_TOKENS_FILE"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_HOST = re.compile(rb"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?", re.IGNORECASE)
READERS_HOST = re.compile(rb"(localhost|\d+\.\d+\.\d+\.\d+|\[[0-9a-f:.]+\])(:\d+)?", re.IGNORECASE)
SHORTEST = 16
CHALLENGE = 'Bearer realm="fleetcast"'  # Basic is taken, too, but to offer it makes browsers ask by themselves
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # what RFC 6750 lets a bearer token be

Headers = Iterable[tuple[bytes, bytes]]


class Scope(StrEnum):
    READ = "read"
    EVENTS = "events"
    PLACE = "place"
    ADMIN = "admin"


def default_scope(method: str) -> Scope:
    """What a route asks for that names no scope."""
    return Scope.READ if method in SAFE_METHODS else Scope.ADMIN


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a token belongs to; the name goes into the audit trail."""

    name: str
    scopes: frozenset[Scope]

    def may(self, scope: Scope | None) -> bool:
        return scope is None or scope in self.scopes or Scope.ADMIN in self.scopes


ANYBODY = Caller("", frozenset({Scope.ADMIN}))  # no tokens are set: nobody says who he is


class Access:
    """The tokens of one process, kept as digests. `is_open` without any.

    `failed` hears why a caller was refused: missing, unknown, slowed (unknown, one of too many), scope.
    """

    def __init__(self, callers: Mapping[bytes, Caller] | None = None) -> None:
        self._callers = tuple((callers or {}).items())
        self.is_open = not self._callers
        self.wrong_tokens = WrongTokens()
        self.failed: Callable[[str], None] = lambda reason: None

    def names(self) -> list[str]:
        return [caller.name for _, caller in self._callers]

    async def admit(self, request: Request, scope: Scope | None) -> Caller:
        """The caller of a request, as `check` finds him; refusals are counted, and told late to who guesses."""
        try:
            return self.check(request.method, request.scope["headers"], scope)
        except Refusal as refusal:
            host = request.client.host if request.client else ""
            wait_s = self.wrong_tokens.count(host) if refusal.reason == "unknown" else None
            self.failed(refusal.reason if wait_s is None else "slowed")
            if wait_s is None:
                raise
        await asyncio.sleep(LATE_S)
        detail = f"too many unknown tokens came from your address: the next one is looked at in {wait_s} s"
        raise Problem(429, "too_many_tokens", detail, headers={"retry-after": str(wait_s)})

    def check(self, method: str, headers: Headers, scope: Scope | None) -> Caller:
        """The caller, who may do what `scope` names (None: any token will do). Problems: 401, 403."""
        self.check_site(method, headers)
        if self.is_open:
            return ANYBODY
        caller = self._caller(headers)
        if not caller.may(scope):
            has = ", ".join(sorted(caller.scopes))
            detail = f"this needs a token with the scope {scope}; that of {caller.name} has {has}"
            challenge = f'{CHALLENGE}, error="insufficient_scope", scope="{scope}"'
            raise Refusal("scope", 403, "forbidden", detail, challenge)
        return caller

    def check_site(self, method: str, headers: Headers) -> None:
        """A 403 problem for a browser that asks on behalf of a page that is not ours; routes for anybody ask this."""
        if method not in SAFE_METHODS:
            refuse_other_sites(headers)
        if self.is_open:
            refuse_other_names(headers, READERS_HOST if method in SAFE_METHODS else LOOPBACK_HOST)

    def _caller(self, headers: Headers) -> Caller:
        given = [value for name, value in headers if name == b"authorization"]
        if not given:
            raise _unauthorized("missing", "a token is needed: Authorization: Bearer TOKEN", CHALLENGE)
        token = presented(given[0]) if len(given) == 1 else None
        digest = hashlib.sha256(token or b"").digest()
        found = None
        for known, caller in self._callers:  # every one is compared, so that the time tells nothing
            if hmac.compare_digest(known, digest):
                found = caller
        if token is None or found is None:
            raise _unauthorized("unknown", "no such token is known here", f'{CHALLENGE}, error="invalid_token"')
        return found


class Refusal(Problem):
    """A caller who may not; `reason` is a short label."""

    def __init__(self, reason: str, status: int, code: str, detail: str, challenge: str) -> None:
        super().__init__(status, code, detail, headers={"www-authenticate": challenge})
        self.reason = reason


def _unauthorized(reason: str, detail: str, challenge: str) -> Refusal:
    return Refusal(reason, 401, "unauthorized", detail, challenge)


def presented(authorization: bytes) -> bytes | None:
    """The token in the value of an Authorization header; None when there is none to be found in it.

    >>> presented(b"Bearer abc"), presented(b"Basic dXNlcjphYmM=")
    (b'abc', b'abc')
    """
    scheme, _, rest = authorization.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if scheme.lower() != b"basic":
        return None
    try:
        return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return None


def refuse_other_sites(headers: Headers) -> None:
    """A 403 problem for what a browser sends on behalf of a page that is not ours."""
    named = {name: value for name, value in headers if name in (b"origin", b"host", b"sec-fetch-site")}
    host, site, origin = named.get(b"host"), named.get(b"sec-fetch-site"), named.get(b"origin")
    ours = site in (b"same-origin", b"none") if site else origin is None or origin.partition(b"://")[2] == host
    if not ours:
        raise Problem(403, "other_site", "a page of another site may not change anything here")


def refuse_other_names(headers: Headers, allowed: re.Pattern[bytes]) -> None:
    """A 403 problem where we are called by a name that is not ours: a page can have its own name lead here.

    An address is nobody's name, so that to read it need not even be loopback's.
    """
    for name, host in headers:
        if name == b"host" and not allowed.fullmatch(host):
            detail = (
                f"without tokens only a loopback address may be asked, such as http://127.0.0.1:8080/, and not "
                f"{host[:80].decode('latin-1')!r}: set {TOKENS} to be called by any name (see README)"
            )
            raise Problem(403, "other_site", detail)


def load_access(host: str, environ: Mapping[str, str] = os.environ) -> Access:
    """The tokens of the environment. ConfigError when they are malformed, or missing where `host` is not loopback."""
    text, path = environ.get(TOKENS, ""), environ.get(TOKENS_FILE, "")
    if text.strip() and path:
        raise ConfigError(f"{TOKENS} and {TOKENS_FILE} are both set: set one of them")
    if path:
        return Access(parse_tokens(_read(path), f"{TOKENS_FILE} = {path}"))
    if text.strip():
        return Access(parse_tokens(text, TOKENS))
    if host not in LOOPBACK:
        raise ConfigError(
            f"api.host = {host!r}: beyond loopback ({', '.join(LOOPBACK)}) requests need tokens: set {TOKENS} or "
            f"{TOKENS_FILE} to lines of 'name scope[,scope] token'; scopes are {_scopes()}"
        )
    return Access()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{TOKENS_FILE} = {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{TOKENS_FILE} = {path}: is no text in UTF-8") from None


def parse_tokens(text: str, where: str) -> dict[bytes, Caller]:
    """Callers by the SHA-256 of their token. ConfigError names the line, never a word of it: it may be the token."""
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        caller, token = _parse_line(words, f"{where}, line {number}")
        digest = hashlib.sha256(token.encode()).digest()
        if digest in callers:
            raise ConfigError(f"{where}, line {number}: this token was given to another name already")
        if caller.name in {known.name for known in callers.values()}:
            raise ConfigError(f"{where}, line {number}: this name has a token already")
        callers[digest] = caller
    if not callers:
        raise ConfigError(f"{where}: there is no token in it; expected lines of 'name scope[,scope] token'")
    return callers


def _parse_line(words: list[str], where: str) -> tuple[Caller, str]:
    if len(words) != 3:
        raise ConfigError(f"{where}: {len(words)} words, expected 'name scope[,scope] token'")
    name, scopes, token = words
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: the name must be 1 to 64 letters, digits, dots, dashes, _ or @")
    if not set(scopes.split(",")) <= set(Scope):
        raise ConfigError(f"{where}: unknown scope; scopes are {_scopes()}, joined by commas")
    if len(token) < SHORTEST:
        raise ConfigError(f"{where}: the token has {len(token)} characters, at least {SHORTEST} are needed")
    if not TOKEN.fullmatch(token):
        raise ConfigError(f"{where}: a token is made of letters, digits and . _ ~ + / - (= at its end)")
    return Caller(name, frozenset(map(Scope, scopes.split(",")))), token


def _scopes() -> str:
    return ", ".join(Scope)
