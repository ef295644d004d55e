"""The rights that our account uses, from the audit log of a real API server."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.integration.kubernetes.control_plane import READER

FORBIDDEN = 403


class Right(NamedTuple):
    """One verb on one resource, such as ("", "pods/eviction", "create")."""

    group: str
    resource: str
    verb: str


def make_audit_flags(folder: Path) -> tuple[str, ...]:
    """Return the flags with which an API server logs the requests of our account. The log is below `folder`."""
    rules = [{"level": "Metadata", "users": [READER]}, {"level": "None"}]
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules}
    (folder / "audit.yaml").write_text(yaml.safe_dump(policy), encoding="utf-8")
    return (
        f"--audit-policy-file={folder / 'audit.yaml'}",
        f"--audit-log-path={folder / 'audit.log'}",
        "--audit-log-mode=blocking-strict",
    )


def read_used_rights(folder: Path) -> tuple[set[Right], set[Right]]:
    """Return the rights of all requests of our account, and those of requests that the server has forbidden."""
    used, forbidden = set(), set()
    for line in (folder / "audit.log").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        asked = event["objectRef"]
        part = f"/{asked['subresource']}" if asked.get("subresource") else ""
        right = Right(asked.get("apiGroup", ""), asked["resource"] + part, event["verb"])
        used.add(right)
        if event["responseStatus"]["code"] == FORBIDDEN:
            forbidden.add(right)
    return used, forbidden


def list_granted_rights(rules: Iterable[Mapping[str, list[str]]]) -> set[Right]:
    """Return the rights that the rules of a ClusterRole grant."""
    return {
        Right(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
