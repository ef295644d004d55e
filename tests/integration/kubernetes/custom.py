"""JobSet and PyTorchJob as a server knows them that has only their names: what they are is left to the test."""

from typing import Any


def definition(group: str, version: str, kind: str, scope: str = "Namespaced") -> dict[str, Any]:
    """A CustomResourceDefinition whose objects may hold anything."""
    plural = kind.lower() + "s"
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": anything, "status": anything}}
    served = {
        **{"name": version, "served": True, "storage": True},
        **{"schema": {"openAPIV3Schema": schema}, "subresources": {"status": {}}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"},
            "versions": [served],
        },
    }


JOBSET = definition("jobset.x-k8s.io", "v1alpha2", "JobSet")
PYTORCHJOB = definition("kubeflow.org", "v1", "PyTorchJob")
