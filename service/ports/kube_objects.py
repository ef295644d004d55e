"""A Kubernetes collection that a port follows by list and watch, and writes to."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from fleetcast.clients.kube_api import KubeApi, KubeRefused
from fleetcast.clients.kubernetes import ExpiredError
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.schedulers.adapter import Write, WriteOutcome

logger = logging.getLogger(__name__)

AT_ONCE = 8  # objects that are written
RETRY_S = 1.0  # wall; until a server that is away is asked again
MOST_S = 25.0  # wall; of one batch: less than its writer waits for it
GONE = 404


class KubeObject(Protocol):
    """The stored part of a Kubernetes object.

    `key`: its name, or namespace/name. Objects that differ only in the version are equal.
    """

    @property
    def key(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def version(self) -> str: ...


AnyObject = TypeVar("AnyObject", bound=KubeObject)


class KubeObjects(Generic[AnyObject]):
    """A follower of one Kubernetes collection. It starts with the first call of `read_all`.

    It skips objects for which `decode` raises SourceError. path: a function that returns the URL path of the
    collection. It is called again whenever the server has refused a request.
    """

    def __init__(
        self, api: KubeApi, path: Callable[[], Awaitable[str]], decode: Callable[[bytes | msgspec.Raw], AnyObject]
    ) -> None:
        self._api, self._path, self._decode = api, path, decode
        self._objects: dict[str, AnyObject] = {}
        self._follower: asyncio.Task[None] | None = None
        self._known = asyncio.Event()  # something is: the objects, or why not
        self._error: Exception | None = None
        self.path = ""  # of the last list
        self.changes = 0  # grows when a field that we read changes in any object
        self.on_change: Callable[[], None] = lambda: None

    async def read_all(self) -> Mapping[str, AnyObject]:
        """Return the objects by key. Raises SourceError while the server is unreachable."""
        if self._follower is None:
            self._follower = asyncio.ensure_future(self._follow_changes())
        await self._known.wait()
        if self._follower.done():
            self._follower.result()  # a bug
        if self._error is not None:
            raise SourceError(f"cannot follow {self.path or 'it'}: {self._error}")
        return self._objects

    def get(self, key: str) -> AnyObject | None:
        return self._objects.get(key)

    def store_if_newer(self, thing: AnyObject) -> None:
        """Store an object unless the stored one is newer.

        The answer to a patch may arrive before an older event.
        """
        held = self._objects.get(thing.key)
        if held is None or held.uid != thing.uid or _parse_version(thing.version) >= _parse_version(held.version):
            self._objects[thing.key] = thing
            if held != thing:
                self._count_change()

    async def await_write(
        self, key: str, sent: Awaitable[bytes | None], conflicts: Container[int] = (404, 409)
    ) -> WriteOutcome:
        """Await a write to an object, store the server's answer, and return the outcome.

        sent: the write. Its result is None if the object is gone, or has changed since it was read. conflicts:
        status codes of the server with the same meaning.
        """
        try:
            body = await sent
            if body is None:
                return WriteOutcome.CONFLICT
            self.store_if_newer(self._decode(body))
        except KubeRefused as error:
            if error.status == GONE:
                self._objects.pop(key, None)  # its end may have been told before an answer that brought it back
            if error.status in conflicts:
                return WriteOutcome.CONFLICT
            logger.warning("%s: %s", key, error)
            return WriteOutcome.REFUSED
        except SourceError as error:
            logger.warning("%s: %s", key, error)
            return WriteOutcome.UNREACHABLE
        return WriteOutcome.DONE

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
            self._follower = None

    async def _follow_changes(self) -> None:
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list_objects()
                async for kind, body, newest in self._api.watch(self.path, version):
                    self._apply_change(kind, body)
                    version = newest or version
            except ExpiredError:
                version = ""
            except (SourceError, KubeRefused) as error:
                version = "" if isinstance(error, KubeRefused) else version
                self._record_outcome(error)
                await asyncio.sleep(RETRY_S)

    async def _list_objects(self) -> str:
        self.path = await self._path()
        bodies, version = await self._api.list_all(self.path)
        things = filter(None, map(self._try_decode, bodies))
        self._objects = {thing.key: thing for thing in things}
        self._record_outcome(None)
        self._count_change()
        return version

    def _apply_change(self, kind: str, body: msgspec.Raw) -> None:
        self._record_outcome(None)
        thing = None if kind == "BOOKMARK" else self._try_decode(body)
        if thing is not None and kind == "DELETED":
            self._objects.pop(thing.key, None)
            self._count_change()
        elif thing is not None:
            self.store_if_newer(thing)

    def _count_change(self) -> None:
        self.changes += 1
        self.on_change()

    def _try_decode(self, body: msgspec.Raw) -> AnyObject | None:
        try:
            return self._decode(body)
        except SourceError as error:  # asked for again, it would be no other
            logger.warning("%s: %s", self.path, error)
            return None

    def _record_outcome(self, error: Exception | None) -> None:
        if error is not None and self._error is None:
            logger.warning("%s: %s", self.path or "a list", error)
        self._error = error
        self._known.set()


class ManagedFields(msgspec.Struct, rename="camel"):
    """An entry of `managedFields`: the fields that a manager has set by one operation."""

    manager: str = ""
    operation: str = ""
    fields_v1: dict[str, Any] = msgspec.field(default_factory=dict, name="fieldsV1")


async def write_by_key(
    batch: Sequence[Write], write_object: Callable[[list[Write]], Awaitable[Sequence[WriteOutcome]]]
) -> list[WriteOutcome]:
    """Write several objects concurrently, and return the outcomes in the order of `batch`.

    One call contains all writes of an object. The calls begin in the order of each object's first write, so
    the most urgent ones come first. Calls that have not finished after `MOST_S` are stopped, and their
    writes count as unreachable. Every write that was done counts as done.
    """
    ends_s = asyncio.get_running_loop().time() + MOST_S
    free = asyncio.Semaphore(AT_ONCE)
    objects: dict[str, list[int]] = {}
    for at, one in enumerate(batch):
        objects.setdefault(one.key, []).append(at)
    outcomes = [WriteOutcome.UNREACHABLE] * len(batch)

    async def write_places(places: list[int]) -> None:
        async with free, asyncio.timeout_at(ends_s):
            found = await write_object([batch[at] for at in places])
        for at, outcome in zip(places, found, strict=True):
            outcomes[at] = outcome

    for error in await asyncio.gather(*map(write_places, objects.values()), return_exceptions=True):
        if error is not None and not isinstance(error, TimeoutError):
            raise error
    return outcomes


def get_nested_fields(fields: Mapping[str, object], *path: str) -> Mapping[str, object]:
    """Return the part of `managedFields` at a path, or an empty mapping if there is none."""
    for key in path:
        inner = fields.get(key)
        fields = inner if isinstance(inner, dict) else {}
    return fields


def check_server_address(server: str) -> None:
    """Check the address of a Kubernetes API server. Raises ConfigError if it is invalid."""
    if server and not server.startswith(("https://", "http://127.0.0.1", "http://localhost")):
        raise ConfigError(f"options.server = {server!r}: must be like https://HOST:6443")


def _parse_version(version: str) -> int:
    """Convert a resource version to a number.

    Newer versions have higher numbers. A version that is not a number counts as the newest.
    """
    return int(version) if version.isdecimal() else 2**63
