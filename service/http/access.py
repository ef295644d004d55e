"""Access control, closed by default: without tokens, only a loopback address is allowed.

Tokens come from the environment, never from configuration or a command line: in `FLEETCAST_TOKENS`,
or in the file that `FLEETCAST_TOKENS_FILE` names. Each token has its own line, and `#` begins a
comment:

    name scope[,scope] token            grafana read 0f6c2e…    scopes: read, events, place, admin (all)
    name read token queues=NAME[,NAME]  nlp-lead read 93ab17… queues=research/nlp

A token that is bound to queues may read the jobs, requests, charges and audit lines of these queues
and of the queues below them. A caller sends `Authorization: Bearer TOKEN`, or Basic with the token
as password and any user (for programs that only accept a URL, `http://user:TOKEN@host`). With our
own TLS, a client's certificate may replace a token (`[access] subjects`). Without tokens and
subjects, every caller that reaches us may do everything, except pages of other sites in a browser.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote, unquote

from starlette.requests import Request

from fleetcast.fleet.errors import ConfigError
from fleetcast.service.http.certificates import NAMES
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.wrong_tokens import LATE_S, WrongTokens

TOKENS, TOKENS_FILE = "FLEETCAST_TOKENS", "FLEETCAST_TOKENS_FILE"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOOPBACK_HOST = re.compile(rb"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?", re.IGNORECASE)
READERS_HOST = re.compile(rb"(localhost|\d+\.\d+\.\d+\.\d+|\[[0-9a-f:.]+\])(:\d+)?", re.IGNORECASE)
SHORTEST = 16
CHALLENGE = 'Bearer realm="fleetcast"'  # Basic is taken, too, but to offer it makes browsers ask by themselves
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # what RFC 6750 lets a bearer token be

SUBJECT = re.compile(r"[!-~]([ -~]{0,254}[!-~])?")
QUEUES = "queues="  # in a line of a token, or among a certificate's scopes
ADMITTED = "fleetcast.admitted"  # in the scope of a request: its Caller
VOUCHED = "x-fleetcast-caller"
VOUCHED_QUEUES = "x-fleetcast-queues"

Headers = Iterable[tuple[bytes, bytes]]


class Scope(StrEnum):
    READ = "read"
    EVENTS = "events"
    PLACE = "place"
    ADMIN = "admin"


def choose_default_scope(method: str) -> Scope:
    """Return the scope that a route requires if its row in the route table names none."""
    return Scope.READ if method in SAFE_METHODS else Scope.ADMIN


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a token or a certificate. The audit trail contains the caller's name.

    queues: the caller may read only these queues and those below them. If empty, it may read all queues.
    """

    name: str
    scopes: frozenset[Scope]
    by_certificate: bool = False
    queues: tuple[str, ...] = ()

    def has_scope(self, scope: Scope | None) -> bool:
        return scope is None or scope in self.scopes or Scope.ADMIN in self.scopes

    def may_read_queue(self, queue: str) -> bool:
        """Return whether the caller may read the data of a queue."""
        return not self.queues or any(queue == own or queue.startswith(f"{own}/") for own in self.queues)


ANYBODY = Caller("", frozenset({Scope.ADMIN}))  # no tokens are set: nobody says who he is


def get_admitted_caller(request: Request) -> Caller:
    """Return the caller that was admitted for a request.

    If no tokens are required, return a caller that may do everything.
    """
    found = request.scope.get(ADMITTED, ANYBODY)
    assert isinstance(found, Caller)
    return found


class Access:
    """The callers that a process knows: by the digest of a token, or by the name on a certificate.

    `is_open`: no caller is known, so every request is admitted. `link`: the key that api and placer share
    (link_key.py). `heeds_link`: the process that presents this key may name another caller, for which it
    forwards the request. `failed` is called with the reason of each refusal: missing, unknown, slowed (one
    unknown token too many), subject (no known certificate), scope.
    """

    def __init__(
        self,
        callers: Mapping[bytes, Caller] | None = None,
        subjects: Mapping[str, Caller] | None = None,
        link: str = "",
        heeds_link: bool = False,
    ) -> None:
        self._callers = tuple((callers or {}).items())
        self._subjects = dict(subjects or {})
        self._link = link
        self._heeded = link if heeds_link else ""
        self.is_open = not self._callers and not self._subjects
        self.wrong_tokens = WrongTokens()
        self.failed: Callable[[str], None] = lambda reason: None

    def list_names(self) -> list[str]:
        return [*(caller.name for _, caller in self._callers), *self._subjects]

    async def admit_caller(self, request: Request, scope: Scope | None, by_queue: bool = False) -> Caller:
        """Return the caller of a request if it may do `scope`. Raises problems 401, 403 and 429.

        Each refusal is counted. An address that sends many unknown tokens gets its refusals later.
        """
        names, host = request.scope.get(NAMES, ()), request.client.host if request.client else ""
        caller = await self.admit_by_headers(host, request.method, request.scope["headers"], scope, names, by_queue)
        request.scope[ADMITTED] = caller
        return caller

    async def admit_by_headers(
        self,
        host: str,
        method: str,
        headers: Headers,
        scope: Scope | None,
        names: Sequence[str] = (),
        by_queue: bool = False,
    ) -> Caller:
        """Return the caller that sent these headers if it may do `scope`. Raises problems 401, 403 and 429.

        It works for any protocol. host: the address that the request came from.
        """
        try:
            return self.authorize(method, headers, scope, names, by_queue)
        except Refusal as refusal:
            wait_s = self.wrong_tokens.count_wrong_token(host) if refusal.reason == "unknown" else None
            self.failed(refusal.reason if wait_s is None else "slowed")
            if wait_s is None:
                raise
        await asyncio.sleep(LATE_S)
        detail = f"too many unknown tokens came from your address: the next one is looked at in {wait_s} s"
        raise Problem(429, "too_many_tokens", detail, headers={"retry-after": str(wait_s)})

    def make_caller_headers(self, request: Request) -> dict[str, str]:
        """Return the headers from which the placer recognises the admitted caller."""
        caller = request.scope.get(ADMITTED)
        if isinstance(caller, Caller) and caller.by_certificate:
            if not self._link:
                return {}
            stated = f"{','.join(sorted(caller.scopes))} {caller.name}"
            bound = {VOUCHED_QUEUES: quote(",".join(caller.queues), safe=",/")} if caller.queues else {}
            return {"authorization": f"Bearer {self._link}", VOUCHED: stated, **bound}
        return {name: value for name, value in request.headers.items() if name == "authorization"}

    def authorize(
        self,
        method: str,
        headers: Headers,
        scope: Scope | None,
        names: Sequence[str] = (),
        by_queue: bool = False,
    ) -> Caller:
        """Return the caller if it may do `scope`. Raises problems 401 and 403.

        scope: None accepts any token. names: those on the client's certificate. They count only without a token.
        by_queue: the route filters its answer by queue, so a caller bound to queues is admitted.
        """
        self.refuse_other_sites(method, headers)
        if self.is_open:
            return ANYBODY
        caller = self._authenticate(headers, names)
        if caller.queues and by_queue:
            return caller
        if not caller.has_scope(scope):
            has = ", ".join(sorted(caller.scopes))
            what = "certificate" if caller.by_certificate else "token"
            detail = f"this needs a {what} with the scope {scope}; that of {caller.name} has {has}"
            challenge = f'{CHALLENGE}, error="insufficient_scope", scope="{scope}"'
            raise Refusal("scope", 403, "forbidden", detail, challenge)
        if caller.queues:
            raise _make_queue_refusal(caller, scope)
        return caller

    def refuse_other_sites(self, method: str, headers: Headers) -> None:
        """Raise a 403 problem for a browser's request from a page of another site.

        Routes that require no token call this.
        """
        if method not in SAFE_METHODS:
            refuse_foreign_sites(headers)
        if self.is_open:
            refuse_foreign_hosts(headers, reads=method in SAFE_METHODS)

    def _authenticate(self, headers: Headers, names: Sequence[str]) -> Caller:
        given = [value for name, value in headers if name == b"authorization"]
        if not given and names:
            return self._authenticate_certificate(names)
        if not given:
            raise _make_unauthorized_refusal("missing", "a token is needed: Authorization: Bearer TOKEN", CHALLENGE)
        token = parse_presented_token(given[0]) if len(given) == 1 else None
        digest = hashlib.sha256(token or b"").digest()
        found = None
        for known, caller in self._callers:  # every one is compared, so that the time tells nothing
            if hmac.compare_digest(known, digest):
                found = caller
        if self._heeded and hmac.compare_digest(self._heeded.encode(), token or b""):
            return parse_vouched_caller(headers)
        if token is None or found is None:
            raise _make_unauthorized_refusal(
                "unknown", "no such token is known here", f'{CHALLENGE}, error="invalid_token"'
            )
        return found

    def _authenticate_certificate(self, names: Sequence[str]) -> Caller:
        for name in names:
            if name in self._subjects:
                return self._subjects[name]
        shown = ", ".join(repr(name[:80]) for name in names[:5])
        raise _make_unauthorized_refusal(
            "subject", f"no name of your certificate is in [access] subjects: {shown}", CHALLENGE
        )


class Refusal(Problem):
    """A problem that refuses a caller. `reason` is a short label for counters."""

    def __init__(self, reason: str, status: int, code: str, detail: str, challenge: str) -> None:
        super().__init__(status, code, detail, headers={"www-authenticate": challenge})
        self.reason = reason


def _make_queue_refusal(caller: Caller, scope: Scope | None) -> Refusal:
    """Return the refusal for a caller that is bound to queues and requests data of other queues."""
    detail = (
        f"{caller.name} reads of {', '.join(caller.queues)} alone, and this answer covers more: "
        "ask for /v1/queues, /v1/queue, /v1/charges, /v1/placements, /v1/actions, /v1/plan, /v1/jobs or /v1/audit"
    )
    challenge = f'{CHALLENGE}, error="insufficient_scope", scope="{scope or Scope.READ}"'
    return Refusal("scope", 403, "forbidden", detail, challenge)


def _make_unauthorized_refusal(reason: str, detail: str, challenge: str) -> Refusal:
    return Refusal(reason, 401, "unauthorized", detail, challenge)


def parse_vouched_caller(headers: Headers) -> Caller:
    """Return the caller that the api names in its headers. The api has checked the caller's certificate.

    Raises problem 401 if the headers name no caller.
    """
    stated = [unquote(value.decode("latin-1")) for name, value in headers if name == VOUCHED_QUEUES.encode()]
    queues = tuple(queue for value in stated for queue in value.split(","))
    for name, value in headers:
        if name == VOUCHED.encode():
            scopes, _, who = value.decode("latin-1").partition(" ")
            if who and set(scopes.split(",")) <= set(Scope):
                return Caller(who, frozenset(map(Scope, scopes.split(","))), True, queues)
    raise _make_unauthorized_refusal("missing", f"the api names no caller: {VOUCHED}", CHALLENGE)


def parse_presented_token(authorization: bytes) -> bytes | None:
    """Return the token in an Authorization header's value, or None if there is none.

    >>> parse_presented_token(b"Bearer abc"), parse_presented_token(b"Basic dXNlcjphYmM=")
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


def refuse_foreign_sites(headers: Headers) -> None:
    """Raise a 403 problem for a browser's request from a page of another site."""
    named = {name: value for name, value in headers if name in (b"origin", b"host", b"sec-fetch-site")}
    host, site, origin = named.get(b"host"), named.get(b"sec-fetch-site"), named.get(b"origin")
    ours = site in (b"same-origin", b"none") if site else origin is None or origin.partition(b"://")[2] == host
    if not ours:
        raise Problem(403, "other_site", "a page of another site may not change anything here")


def refuse_foreign_hosts(headers: Headers, *, reads: bool) -> None:
    """Raise a 403 problem if the Host header is not an allowed name of this service.

    The DNS name of another site may point to this address, and a page of that site could then read answers.
    reads: also allow any IP address.
    """
    allowed = READERS_HOST if reads else LOOPBACK_HOST
    for name, host in headers:
        if name == b"host" and not allowed.fullmatch(host):
            detail = (
                f"without tokens, call this service by localhost or {'an IP' if reads else 'a loopback'} address, "
                f"such as http://127.0.0.1:8080/, not {host[:80].decode('latin-1')!r}: set {TOKENS} to use any name"
            )
            raise Problem(403, "other_site", detail)


def load_access(
    host: str,
    environ: Mapping[str, str] = os.environ,
    subjects: Mapping[str, Sequence[str]] | None = None,
    link: str = "",
    heeds_link: bool = False,
) -> Access:
    """Load the tokens of the environment, and the callers with certificates (`subjects`).

    Raises ConfigError if they are malformed. Raises ConfigError without any of them if `host` is not a
    loopback address.
    """
    text, path = environ.get(TOKENS, ""), environ.get(TOKENS_FILE, "")
    if text.strip() and path:
        raise ConfigError(f"{TOKENS} and {TOKENS_FILE} are both set: set one of them")
    callers: dict[bytes, Caller] = {}
    if path:
        callers = parse_tokens(_read_token_file(path), f"{TOKENS_FILE} = {path}")
    elif text.strip():
        callers = parse_tokens(text, TOKENS)
    access = Access(callers, parse_subjects(subjects or {}), link, heeds_link)
    if access.is_open and host not in LOOPBACK:
        raise ConfigError(
            f"api.host = {host!r}: beyond loopback ({', '.join(LOOPBACK)}) requests need tokens: set {TOKENS} or "
            f"{TOKENS_FILE} to lines of 'name scope[,scope] token'; scopes are {_format_scopes()}"
        )
    return access


def parse_subjects(subjects: Mapping[str, Sequence[str]]) -> dict[str, Caller]:
    """Return certificate name → caller. Raises ConfigError for a malformed name or scope."""
    callers = {}
    for name, scopes in subjects.items():
        if not SUBJECT.fullmatch(name):
            raise ConfigError(
                f"access.subjects: {name!r}: expected a common or alternative name, 1 to 256 printable letters"
            )
        bound = [word for word in scopes if word.startswith(QUEUES)]
        scopes = [word for word in scopes if word not in bound]
        if not scopes or not set(scopes) <= set(Scope) or len(bound) > 1:
            raise ConfigError(
                f"access.subjects: {name!r} = {[*scopes, *bound]}: expected some of the scopes {_format_scopes()}; "
                f"with {Scope.READ} alone one {QUEUES}NAME[,NAME] may stand"
            )
        queues = _parse_queues(bound[0], scopes, f"access.subjects: {name!r}") if bound else ()
        callers[name] = Caller(name, frozenset(map(Scope, scopes)), True, queues)
    return callers


def _read_token_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{TOKENS_FILE} = {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{TOKENS_FILE} = {path}: is no text in UTF-8") from None


def parse_tokens(text: str, where: str) -> dict[bytes, Caller]:
    """Return SHA-256 of a token → its caller.

    Raises ConfigError that names the line. The error repeats no word of the line, because any word may be
    the token.
    """
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        caller, token = _parse_token_line(words, f"{where}, line {number}")
        digest = hashlib.sha256(token.encode()).digest()
        if digest in callers:
            raise ConfigError(f"{where}, line {number}: this token was given to another name already")
        if caller.name in {known.name for known in callers.values()}:
            raise ConfigError(f"{where}, line {number}: this name has a token already")
        callers[digest] = caller
    if not callers:
        raise ConfigError(f"{where}: there is no token in it; expected lines of 'name scope[,scope] token'")
    return callers


def _parse_token_line(words: list[str], where: str) -> tuple[Caller, str]:
    if len(words) not in (3, 4):
        raise ConfigError(f"{where}: {len(words)} words, expected 'name scope[,scope] token [{QUEUES}NAME[,NAME]]'")
    name, scopes, token, *bound = words
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: the name must be 1 to 64 letters, digits, dots, dashes, _ or @")
    if not set(scopes.split(",")) <= set(Scope):
        raise ConfigError(f"{where}: unknown scope; scopes are {_format_scopes()}, joined by commas")
    if len(token) < SHORTEST:
        raise ConfigError(f"{where}: the token has {len(token)} characters, at least {SHORTEST} are needed")
    if not TOKEN.fullmatch(token):
        raise ConfigError(f"{where}: a token is made of letters, digits and . _ ~ + / - (= at its end)")
    queues = _parse_queues(bound[0], scopes.split(","), where) if bound else ()
    return Caller(name, frozenset(map(Scope, scopes.split(","))), queues=queues), token


def _parse_queues(word: str, scopes: Sequence[str], where: str) -> tuple[str, ...]:
    """Parse the queues of `queues=a,b/c`.

    Raises ConfigError. The error does not repeat the word, because it may be a misplaced token.
    """
    queues = tuple(word.removeprefix(QUEUES).split(","))
    if not word.startswith(QUEUES) or not all(part for queue in queues for part in queue.split("/")):
        raise ConfigError(f"{where}: behind the token only {QUEUES}NAME[,NAME] may stand, such as {QUEUES}research/nlp")
    if set(scopes) != {Scope.READ}:
        raise ConfigError(f"{where}: bound to queues, so its scope can only be {Scope.READ}, not {','.join(scopes)}")
    return queues


def _format_scopes() -> str:
    return ", ".join(Scope)
