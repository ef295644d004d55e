"""Lists and watches of Kubernetes collections, each in its own thread.

They use the connection of the official Kubernetes client for Python.

    list (pages) ── Listing ──┐                                               410: from the start
    watch from its version ── Changes, Changes, … ── stream ends: watch again from the last version or bookmark

The official client handles kubeconfig, in-cluster credentials and their renewal, TLS and proxies.
We send the requests and decode the answers. The official client's decoded pods are large and slow, and
its watch ends without an error.
"""

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.fleet.event_wait import wait_for_event

logger = logging.getLogger(__name__)

PAGE = 500
MAX_LINE_BYTES = 16 * 2**20  # an object has at most 1.5 MiB in etcd
MAX_WAITING = 64  # messages that nobody has taken yet; the server's buffers hold the rest
CONNECT_S, READ_S, WATCH_S = 5.0, 30.0, 120.0
RETRY_S, RETRY_MOST_S, ABSENT_S = 0.5, 5.0, 30.0
LINGERS_S = 10.0  # a watch that says nothing for so long after its end is dead


class ExpiredError(Exception):
    """The error for status 410: the version is too old, or comes from another server. List the collection again."""


class AbsentError(Exception):
    """The error for a collection that the server does not have (404), or that we may not read."""


@dataclass(frozen=True, slots=True)
class Collection:
    """A Kubernetes collection to list and watch.

    `decode` turns an object's JSON into the part to store. It runs in the reading thread. others: paths
    of other API versions, tried in order if the server does not have the collection.
    """

    name: str
    path: str
    decode: Callable[[bytes], Any]
    others: tuple[str, ...] = ()

    def rotate_paths(self) -> "Collection":
        """Return the same collection with the next path first."""
        return replace(self, path=self.others[0], others=(*self.others[1:], self.path)) if self.others else self


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects of a collection, decoded, at `version`."""

    name: str
    objects: tuple[Any, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes from a watch: (ADDED | MODIFIED | DELETED, object).

    The collection has the version `version` after the last of these changes.
    """

    name: str
    changes: tuple[tuple[str, Any], ...]
    version: str


@dataclass(frozen=True, slots=True)
class CollectionAbsent:
    """A message that the server lacks a collection or refuses to show it. The follower tries again later."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class ServerAway:
    """A message that the server of a collection does not answer. The follower retries until it answers."""

    name: str
    error: SourceError


Message = Listing | Changes | CollectionAbsent | ServerAway


class _Meta(msgspec.Struct, frozen=True, rename={"version": "resourceVersion", "token": "continue"}):
    version: str = ""
    token: str = ""


class _Page(msgspec.Struct):
    metadata: _Meta = _Meta()
    items: list[msgspec.Raw] | None = None


class _WatchEvent(msgspec.Struct):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class _Head(msgspec.Struct):
    """The version of an object, or the code and message of a Status."""

    metadata: _Meta | None = None
    code: int = 0
    message: str = ""


_page = msgspec.json.Decoder(_Page).decode
_decode_event = msgspec.json.Decoder(_WatchEvent).decode
_head = msgspec.json.Decoder(_Head).decode


class KubernetesResponse(Protocol):
    """The part of urllib3's response that we use."""

    status: int

    def read(self) -> bytes: ...
    def stream(self, amt: int) -> Iterator[bytes]: ...
    def close(self) -> None: ...


class Server(Protocol):
    """An API server with blocking calls. `get` raises SourceError if there is no answer."""

    def get(self, path: str, query: Mapping[str, str], read_s: float) -> KubernetesResponse: ...


class Cluster:
    """The API server of a kubeconfig's context.

    If `kubeconfig` is empty and we run in a pod, it is the API server of our own cluster.
    """

    def __init__(self, kubeconfig: str = "", context: str = "") -> None:
        """Create the client without connecting. Raises ConfigError if the official client is not installed."""
        try:
            import kubernetes  # noqa: F401
        except ImportError:
            raise ConfigError(
                "pipeline.sources kubernetes: the package `kubernetes` is missing; pip install 'fleetcast[kubernetes]'"
            ) from None
        self._kubeconfig, self._context = kubeconfig, context
        self._client: Any = None
        self._lock = threading.Lock()

    def _get_connection(self) -> Any:
        """Return the official client's connection, made at the first call. Raises SourceError."""
        import urllib3
        from kubernetes import client, config

        with self._lock:
            if self._client is None:
                made = client.Configuration()
                try:
                    if self._kubeconfig or not _is_in_pod():
                        config.load_kube_config(self._kubeconfig or None, self._context or None, made)
                    else:
                        config.load_incluster_config(made)
                except (config.ConfigException, OSError, ValueError) as error:
                    where = f"kubeconfig {self._kubeconfig!r}: " if self._kubeconfig else ""
                    raise SourceError(f"no way to a cluster: {where}{error}", 15.0) from None
                made.retries = False
                made.connection_pool_maxsize = 16
                if not made.verify_ssl:
                    logger.warning(
                        "the kubeconfig says not to verify who %s is; reading from it all the same", made.host
                    )
                    urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
                self._client = client.ApiClient(made)
            return self._client

    def get(self, path: str, query: Mapping[str, str], read_s: float) -> KubernetesResponse:
        import urllib3

        client = self._get_connection()
        settings = client.configuration.auth_settings()  # asks for a new token where the old one has run out
        headers = {row["key"]: row["value"] for row in settings.values() if row["in"] == "header" and row["value"]}
        try:
            answer: KubernetesResponse = client.rest_client.pool_manager.request(
                *("GET", client.configuration.host + path),
                fields=dict(query),
                headers={**headers, "accept": "application/json"},
                timeout=urllib3.Timeout(connect=CONNECT_S, read=read_s),
                preload_content=False,
                retries=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise SourceError(f"{client.configuration.host} does not answer: {error}", RETRY_S) from None
        return answer


def _is_in_pod() -> bool:
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST"))


def list_all(server: Server, what: Collection) -> Listing:
    """Fetch all objects of a collection page by page, and the list's version.

    Raises ExpiredError, AbsentError, SourceError.
    """
    objects: list[Any] = []
    token = ""
    while True:
        query = {"limit": str(PAGE)} | ({"continue": token} if token else {})
        with _require_success(server.get(what.path, query, READ_S)) as answer:
            body = answer.read()
        try:
            page = _page(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise SourceError(
                f"{what.path} is no list: {explain_decode_error(error, _page, body)}", RETRY_MOST_S
            ) from None
        objects += [what.decode(bytes(item)) for item in page.items or ()]
        token = page.metadata.token
        if not token:
            return Listing(what.name, tuple(objects), page.metadata.version)


def watch(server: Server, what: Collection, version: str, watch_s: float = WATCH_S) -> Iterator[Changes]:
    """Yield the changes after `version` as they arrive, for about `watch_s` seconds.

    Raises ExpiredError, AbsentError, SourceError.
    """
    query = {
        **{"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version},
        "timeoutSeconds": str(max(1, round(watch_s))),
    }
    with _require_success(server.get(what.path, query, watch_s + LINGERS_S)) as answer:
        yield Changes(what.name, (), version)  # it answers
        for lines in _split_lines(answer):
            changes = []
            for line in lines:
                kind, version = _decode_change(line)
                if kind.type != "BOOKMARK":
                    changes.append((kind.type, what.decode(bytes(kind.object))))
            yield Changes(what.name, tuple(changes), version)


@contextmanager
def _require_success(answer: KubernetesResponse) -> Iterator[KubernetesResponse]:
    """Yield a successful answer, and close it at the end.

    Raises ExpiredError, AbsentError or SourceError for any other answer.
    """
    import urllib3

    try:
        if answer.status != 200:
            raise _make_refusal(answer.status, answer.read())
        yield answer
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise SourceError(f"the connection broke: {error}", RETRY_S) from None
    finally:
        answer.close()


def _make_refusal(status: int, body: bytes) -> Exception:
    try:
        message = _head(body).message
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        message = ""
    why = f"HTTP {status} {message[:200]}".strip()
    if status == 410 or "resource version" in message.lower():  # one of a server that was set back, too
        return ExpiredError(why)
    if status == 404:
        return AbsentError(why)
    if status in (401, 403):
        return AbsentError(f"{why}; a ClusterRole must allow list and watch")
    return SourceError(why, RETRY_S)


def _split_lines(answer: KubernetesResponse) -> Iterator[list[bytes]]:
    """Yield lists of whole lines that arrived together. An incomplete last line is dropped."""
    rest = b""
    for piece in answer.stream(2**16):
        *lines, rest = (rest + piece).split(b"\n") if b"\n" in piece else (rest + piece,)
        if len(rest) > MAX_LINE_BYTES:
            raise SourceError(f"a line of more than {MAX_LINE_BYTES} bytes", RETRY_MOST_S)
        if whole := [line for line in lines if line.strip()]:
            yield whole


def _decode_change(line: bytes) -> tuple[_WatchEvent, str]:
    """Decode a line of a watch. Returns the event and the object's version.

    Raises ExpiredError, AbsentError or SourceError.
    """
    try:
        event = _decode_event(line)
        head = _head(event.object)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SourceError(
            f"the watch sent what is none of its events: {explain_decode_error(error, _decode_event, line)}", RETRY_S
        ) from None
    if event.type == "ERROR":
        raise _make_refusal(head.code, bytes(event.object))
    if head.metadata is None or not head.metadata.version:
        raise SourceError(f"the watch sent an object without a version: {line[:80]!r}", RETRY_S)
    return event, head.metadata.version


class Follower:
    """A reader that lists and watches collections for one event loop. Each collection has a daemon thread.

    Once the queue of messages is full, further changes wait at the server.
    """

    def __init__(self, server: Server, what: Sequence[Collection], versions: Mapping[str, str]) -> None:
        self._server = server
        self._queue: queue.Queue[Message] = queue.Queue(MAX_WAITING)
        self._loop = asyncio.get_running_loop()
        self._some = asyncio.Event()
        self._closed = threading.Event()
        self._crash: Exception | None = None  # of a thread that has ended
        self._threads = [
            threading.Thread(
                target=self._run_thread, args=(row, versions.get(row.name, "")), daemon=True, name=row.name
            )
            for row in what
        ]
        for thread in self._threads:
            thread.start()

    async def wait_for_messages(self, most_s: float | None = None) -> list[Message]:
        """Return the messages that have arrived. Waits for the first one, at most `most_s` seconds.

        The list is empty if none arrives in this time. Raises the error that ended a thread.
        """
        if not await wait_for_event(self._some, most_s):
            return []
        if self._crash is not None:
            raise self._crash
        self._some.clear()
        messages = []
        while True:
            try:
                messages.append(self._queue.get_nowait())
            except queue.Empty:
                return messages

    def close(self) -> None:
        """End the threads at their next line or timeout, without waiting for them."""
        self._closed.set()

    def _put_message(self, message: Message) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(message, timeout=0.5)
                self._notify_loop()
                return
            except queue.Full:
                continue

    def _notify_loop(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._some.set)

    def _run_thread(self, what: Collection, version: str) -> None:
        """List and watch a collection until the thread ends. Passes any error on to the reader of messages.

        If an error were lost, the collection would stop changing without notice.
        """
        try:
            self._follow_collection(what, version)
        except Exception as error:
            self._crash = error
            self._notify_loop()

    def _follow_collection(self, what: Collection, version: str) -> None:
        failures, absent = 0, 0
        while not self._closed.is_set():
            try:
                if not version:
                    listing = list_all(self._server, what)
                    version = listing.version
                    self._put_message(listing)
                for changes in watch(self._server, what, version):
                    failures = 0 if changes.changes else failures
                    if self._closed.is_set():
                        return
                    version = changes.version
                    self._put_message(changes)
                failures = 0
            except ExpiredError as error:
                logger.warning("%s: version %s is gone (%s), listing them again", what.name, version, error)
                version = ""
                failures += 1
                if failures > 1:
                    self._closed.wait(RETRY_S * failures)
            except AbsentError as error:  # a server that starts says so, too, before it knows its roles
                absent += 1
                what, version = what.rotate_paths(), "" if what.others else version
                if absent % (len(what.others) + 1):
                    continue
                failures += 1
                self._put_message(CollectionAbsent(what.name, str(error)))
                self._closed.wait(min(ABSENT_S, RETRY_S * 2 ** min(failures, 10)))
            except SourceError as error:
                failures += 1
                self._put_message(ServerAway(what.name, error))
                self._closed.wait(min(RETRY_MOST_S, max(error.retry_after_s, RETRY_S * 2 ** min(failures, 10))))
