"""An API server in memory: collections with versions, lists by page, watches that end, and forgetting (410)."""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fleetcast.fleet.errors import SourceError

REFUSED = -1
CREATED = "2026-11-21T10:00:00Z"
CREATED_MS = 1_795_255_200_000
PATHS = {
    "priorityclasses": "/apis/scheduling.k8s.io/v1/priorityclasses",
    "nodes": "/api/v1/nodes",
    "resourceclaimtemplates": "/apis/resource.k8s.io/v1/resourceclaimtemplates",
    "resourceclaims": "/apis/resource.k8s.io/v1/resourceclaims",
    "jobs": "/apis/batch/v1/jobs",
    "jobsets": "/apis/jobset.x-k8s.io/v1alpha2/jobsets",
    "pytorchjobs": "/apis/kubeflow.org/v1/pytorchjobs",
    "pods": "/api/v1/pods",
}


class Reply:
    """What the client asks of urllib3's response."""

    def __init__(self, status: int, body: bytes = b"", pieces: Iterable[bytes] = ()) -> None:
        self.status, self._body, self._pieces = status, body, iter(pieces)

    def read(self) -> bytes:
        return self._body

    def stream(self, amt: int) -> Iterator[bytes]:
        return self._pieces

    def close(self) -> None:
        pass


class SmallKubernetes:
    """Use `put`, `delete`, `forget` and `away` from the test; `get` from the threads of the client."""

    def __init__(self, *, page: int = 2, absent: tuple[str, ...] = ()) -> None:
        self.page = page
        self.absent = absent
        self.away = False
        self.forbidden: set[str] = set()
        self.lists = 0
        self._version = 1
        self._forgotten = 0
        self._objects: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in PATHS}
        self._history: list[tuple[int, str, str, dict[str, Any]]] = []
        self._some = threading.Condition()
        self._told: dict[int, int] = {}  # thread that waits -> version up to which it was told all, or REFUSED

    def is_settled(self, threads: Iterable[threading.Thread]) -> bool:
        """These, a client's, have taken all there is and wait for more (or to ask again for what is refused)."""
        with self._some:
            told = [self._told.get(thread.ident or 0) for thread in threads if thread.is_alive()]
            return all(version in (self._version, REFUSED) for version in told)

    def put(self, name: str, thing: dict[str, Any]) -> None:
        with self._some:
            key = thing["metadata"]["name"]
            kind = "MODIFIED" if key in self._objects[name] else "ADDED"
            self._write(name, kind, thing)
            self._objects[name][key] = thing
            self._some.notify_all()

    def delete(self, name: str, key: str) -> None:
        with self._some:
            self._write(name, "DELETED", self._objects[name].pop(key))
            self._some.notify_all()

    def _write(self, name: str, kind: str, thing: dict[str, Any]) -> None:
        self._version += 1
        thing["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, name, kind, json.loads(json.dumps(thing))))

    def say(self, name: str, line: bytes) -> None:
        """A line to whoever watches, just as it is."""
        with self._some:
            self._version += 1
            self._history.append((self._version, name, "RAW", {"line": line.decode("latin-1")}))
            self._some.notify_all()

    def forget(self) -> None:
        """Everything up to now is compacted, and every watch ends."""
        with self._some:
            self._history.clear()
            self._forgotten = self._version
            self._some.notify_all()

    def get(self, path: str, query: Mapping[str, str], read_s: float) -> Reply:
        name = next(name for name, known in PATHS.items() if known == path)
        self._told.pop(threading.get_ident(), None)
        if self.away:
            raise SourceError("nobody answers", 0.05)
        if name in self.absent or name in self.forbidden:
            self._told[threading.get_ident()] = REFUSED
        if name in self.absent:
            return Reply(404, b'{"message": "the server could not find the requested resource"}')
        if name in self.forbidden:
            return Reply(403, b'{"message": "forbidden"}')
        return self._watch(name, int(query["resourceVersion"])) if "watch" in query else self._list(name, query)

    def _list(self, name: str, query: Mapping[str, str]) -> Reply:
        with self._some:
            self.lists += 1
            rows = list(self._objects[name].values())
            at = int(query.get("continue", 0))
            more = str(at + self.page) if at + self.page < len(rows) else ""
            meta = {"resourceVersion": str(self._version)} | ({"continue": more} if more else {})
            return Reply(200, json.dumps({"metadata": meta, "items": rows[at : at + self.page]}).encode())

    def _watch(self, name: str, version: int) -> Reply:
        if version < self._forgotten:
            return Reply(410, b'{"message": "too old resource version"}')
        return Reply(200, b"", self._lines(name, version))

    def _lines(self, name: str, version: int) -> Iterator[bytes]:
        for _ in range(100):
            with self._some:
                news = [row for row in self._history if row[0] > version and row[1] == name]
                if not news:
                    self._told[threading.get_ident()] = self._version
                    self._some.wait(0.05)
                if self.away or (version < self._forgotten and not news):
                    self._told.pop(threading.get_ident(), None)
                    return
            for number, _, kind, thing in news:
                version = number
                told = json.dumps({"type": kind, "object": thing}).encode() + b"\n"
                line = thing["line"].encode("latin-1") + b"\n" if kind == "RAW" else told
                yield line[: len(line) // 2]  # cut anywhere
                yield line[len(line) // 2 :]
        bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}
        yield json.dumps(bookmark).encode() + b"\n"


def meta(name: str, uid: str = "", **more: Any) -> dict[str, Any]:
    return {"name": name, "namespace": "ml", "uid": uid or f"u-{name}", "creationTimestamp": CREATED, **more}


def template(gpus: int = 8, **more: Any) -> dict[str, Any]:
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"cpu": "16", "memory": "128Gi"}}
    return {"containers": [{"name": "c", "resources": resources}], **more}


def job(name: str, pods: int = 2, **status: Any) -> dict[str, Any]:
    spec = {"parallelism": pods, "completions": pods, "completionMode": "Indexed", "template": {"spec": template()}}
    return {"metadata": meta(name), "spec": spec, "status": status}


def pod(owner: str, index: int, *, kind: str = "Job", gpus: int = 8, life: str = "", **more: Any) -> dict[str, Any]:
    """A pod of a Job that waits; `life` tells one pod of an index from its successor."""
    name = f"{owner}-{index}{life}"
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    api_version = {"PyTorchJob": "kubeflow.org/v1", "DaemonSet": "apps/v1"}.get(kind, "batch/v1")
    owners = [{"apiVersion": api_version, "kind": kind, "name": owner, "uid": f"u-{owner}", "controller": True}]
    return {
        "metadata": meta(name, labels=labels, ownerReferences=owners, **more),
        "spec": template(gpus),
        "status": {"phase": "Pending"},
    }


def condition(kind: str, reason: str = "", message: str = "", status: str = "True") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": CREATED}


def running(thing: dict[str, Any], node: str, restarts: int = 0) -> dict[str, Any]:
    state = {"running": {"startedAt": CREATED}}
    return {
        **thing,
        "spec": {**thing["spec"], "nodeName": node},
        "status": {"phase": "Running", "containerStatuses": [{"name": "c", "restartCount": restarts, "state": state}]},
    }


def ended(thing: dict[str, Any], code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": CREATED}}
    status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"restartCount": 0, "state": state}]}
    return {**thing, "status": status}
