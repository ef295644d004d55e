"""CapacityBuffer as a server knows it: the fields of its specification, and the rules that it is refused by."""

from typing import Any

from tests.integration.kubernetes.custom import definition

NAMED = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "minLength": 1}}}
COUNT = {"type": "integer", "format": "int32", "minimum": 0}
SPEC = {
    "type": "object",
    "properties": {
        "provisioningStrategy": {"type": "string", "default": "buffer.x-k8s.io/active-capacity"},
        "podTemplateRef": NAMED,
        "scalableRef": {**NAMED, "properties": {key: {"type": "string"} for key in ("apiGroup", "kind", "name")}},
        "replicas": COUNT,
        "percentage": COUNT,
        "limits": {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}},
    },
    "x-kubernetes-validations": [
        {"rule": "!has(self.podTemplateRef) || has(self.replicas) || has(self.limits)", "message": "no size"},
        {"rule": "!(has(self.podTemplateRef) && has(self.scalableRef))", "message": "two shapes"},
    ],
}


def capacity_buffer() -> dict[str, Any]:
    """Its CustomResourceDefinition."""
    made = definition("autoscaling.x-k8s.io", "v1beta1", "CapacityBuffer")
    made["metadata"]["annotations"] = {"api-approved.kubernetes.io": "unapproved, of a test"}  # the group is protected
    (version,) = made["spec"]["versions"]
    version["schema"]["openAPIV3Schema"]["properties"]["spec"] = SPEC
    return made
