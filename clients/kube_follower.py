"""The objects of one Kubernetes collection, followed by list and watch in a task of its own."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from clients.kube_api import KubeApi, KubeRefused
from clients.kubernetes import ExpiredError
from fleet.errors import SourceError

logger = logging.getLogger(__name__)

RETRY_S = 1.0


class KubeObject(Protocol):
    """What tells an object from another, and its newer state from an older one."""

    @property
    def key(self) -> str: ...

    @property
    def uid(self) -> str: ...

    @property
    def version(self) -> str: ...


Thing = TypeVar("Thing", bound=KubeObject)


class KubeFollower(Generic[Thing]):
    """Follows `path` from the first `read` on. decode: an object of it; raises SourceError. what: for messages."""

    def __init__(self, api: KubeApi, path: str, decode: Callable[[bytes | msgspec.Raw], Thing], what: str) -> None:
        self._api, self._path, self._decode, self._what = api, path, decode, what
        self._things: dict[str, Thing] = {}
        self._task: asyncio.Task[None] | None = None
        self._known = asyncio.Event()  # something is: the objects, or why not
        self._error: Exception | None = None

    @property
    def things(self) -> Mapping[str, Thing]:
        """The newest known, by key."""
        return self._things

    async def read(self) -> Mapping[str, Thing]:
        """`things`, once there are some. Raises SourceError while the server is away."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._follow())
        await self._known.wait()
        if self._task.done():
            self._task.result()  # a bug
        if self._error is not None:
            raise SourceError(f"cannot follow the {self._what}: {self._error}")
        return self._things

    def keep(self, thing: Thing) -> None:
        """The newer of two: the answer to a patch may be here before an older event is."""
        held = self._things.get(thing.key)
        if held is None or held.uid != thing.uid or _number(thing.version) >= _number(held.version):
            self._things[thing.key] = thing

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _follow(self) -> None:
        version = ""
        while True:
            try:
                if not version:
                    objects, version = await self._api.list_all(self._path)
                    self._things = {thing.key: thing for thing in map(self._decode, objects)}
                    self._tell(None)
                async for kind, body, newest in self._api.watch(self._path, version):
                    self._change(kind, body)
                    version = newest or version
            except ExpiredError:
                version = ""
            except (SourceError, KubeRefused) as error:
                self._tell(error)
                await asyncio.sleep(RETRY_S)

    def _tell(self, error: Exception | None) -> None:
        if error is not None and self._error is None:
            logger.warning("%s: %s", self._what, error)
        self._error = error
        self._known.set()

    def _change(self, kind: str, body: msgspec.Raw) -> None:
        self._tell(None)
        if kind == "BOOKMARK":
            return
        try:
            thing = self._decode(body)
        except SourceError as error:  # asked for again, it would be no other
            logger.warning("%s: %s", self._what, error)
            return
        if kind == "DELETED":
            self._things.pop(thing.key, None)
        else:
            self.keep(thing)


def _number(version: str) -> int:
    """Versions count up; one that is no number is as new as can be."""
    return int(version) if version.isdecimal() else 2**63
