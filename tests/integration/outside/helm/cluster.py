"""A release in a real cluster: a volume for it, who may do what there, and how the server takes an object."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.integration.built import needed, step
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.outside.helm.chart import NAMESPACE, RELEASE

CONTROLLERS = ("job-controller", "statefulset-controller", "deployment-controller", "replicaset-controller")
CONTROLLERS += ("persistentvolume-binder-controller", "garbage-collector-controller")
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
NODES = ("m01", "m02", "m03")
MERGE = {"content-type": "application/merge-patch+json"}
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
APPLY = {"content-type": "application/apply-patch+yaml"}


def volume() -> dict[str, Any]:
    """For the state of the release: nothing ever runs that would look into it."""
    spec = {"capacity": {"storage": "50Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/nowhere"}}
    claim = {"namespace": NAMESPACE, "name": f"state-{RELEASE}-control-0"}
    return {"metadata": {"name": "state"}, "spec": {**spec, "claimRef": claim}}


def may(plane: ControlPlane, verb: str, resource: str, group: str = "", part: str = "", account: str = ACCOUNT) -> bool:
    """`kubectl auth can-i VERB RESOURCE --as=ACCOUNT`."""
    asked = {"verb": verb, "resource": resource, "group": group, "subresource": part}
    review = {"spec": {"user": account, "groups": ["system:authenticated"], "resourceAttributes": asked}}
    answer = plane.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def applied(plane: ControlPlane, thing: dict[str, Any]) -> httpx.Response:
    """Strict server-side apply of one object, as a dry run."""
    group, _, version = thing["apiVersion"].rpartition("/")
    root = f"/apis/{group}/{version}" if group else f"/api/{version}"
    served = plane.http.get(root).json()["resources"]
    row = next(row for row in served if row["kind"] == thing["kind"] and "/" not in row["name"])
    space = f"/namespaces/{NAMESPACE}" if row["namespaced"] else ""
    query = {"dryRun": "All", "fieldValidation": "Strict", "fieldManager": "test"}
    path = f"{root}{space}/{row['name']}/{thing['metadata']['name']}"
    return plane.http.patch(path, params=query, headers=APPLY, content=yaml.safe_dump(thing))


def downloaded(module: str, folder: Path, request: pytest.FixtureRequest) -> Path:
    """A published Go module, `path@version`, for the definitions in it."""
    told = needed(lambda say: step(["go", "mod", "download", "-json", module], folder), request)
    return Path(json.loads(told)["Dir"])


@contextlib.contextmanager
def defined(plane: ControlPlane, *paths: Path) -> Iterator[None]:
    """Define the kinds of these files, and wait at the end until the server has none of them.

    The server deletes a definition after the objects of its kind, and refuses its name until then.
    """
    things = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths]
    try:
        for thing in things:
            plane.create(DEFINITIONS, thing)
            spec = thing["spec"]
            path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            plane.until(path, lambda path=path: plane.http.get(path).status_code == 200)
        yield
    finally:
        definitions = [f"{DEFINITIONS}/{thing['metadata']['name']}" for thing in things]
        for path in definitions:
            plane.http.delete(path)
        for path in definitions:
            plane.until(f"{path} is gone", lambda path=path: plane.http.get(path).status_code == 404)
