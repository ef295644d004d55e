"""Our chart through a real Helm: what it renders and what it refuses."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[4] / "deploy" / "helm" / "fleetcast"
RELEASE, NAMESPACE = "weather", "fleetcast"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
ADAPTERS: Mapping[str, Mapping[str, Any]] = VALUES["adapters"]
Thing = dict[str, Any]


class HelmChart:
    """Helm's command over the chart. `kubeconfig`: of the cluster that it may talk to."""

    def __init__(self, binary: Path, folder: Path, kubeconfig: Path | None = None) -> None:
        self._binary, self._folder = binary, folder
        kept = {f"HELM_{name}_HOME": str(folder) for name in ("CACHE", "CONFIG", "DATA")}
        self._environment = os.environ | kept | {"KUBECONFIG": str(kubeconfig or folder / "none")}

    def run(self, *words: str, values: Mapping[str, Any] | None = None) -> "subprocess.CompletedProcess[str]":
        """`words` begin with Helm's command."""
        path = self._folder / "values.yaml"
        path.write_text(yaml.safe_dump(dict(values or {})), encoding="utf-8")
        given = ["-f", str(path)] if words[0] in ("lint", "template", "install", "upgrade") else []
        command = [str(self._binary), *words, *given, "--namespace", NAMESPACE]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=300, check=False)

    def done(self, *words: str, values: Mapping[str, Any] | None = None) -> str:
        """What it printed; fails when it failed."""
        ended = self.run(*words, values=values)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def refusal(self, values: Mapping[str, Any]) -> str:
        """What is wrong with these values; empty when they are taken."""
        ended = self.run("template", RELEASE, str(CHART), values=values)
        return ended.stderr if ended.returncode else ""

    def hooks(self) -> list[Thing]:
        """Those of the release that is installed."""
        return [thing for thing in yaml.safe_load_all(self.done("get", "hooks", RELEASE)) if thing]

    def things(self, values: Mapping[str, Any] | None = None) -> list[Thing]:
        """All objects, hooks too."""
        text = self.done("template", RELEASE, str(CHART), values=values)
        return [thing for thing in yaml.safe_load_all(text) if thing]


def executors(*on: str) -> dict[str, Any]:
    """The value `executors` with these on."""
    return {name: {"enabled": name in on} for name in VALUES["executors"]}


def adapters(*on: str, **more: Any) -> dict[str, Any]:
    """Values with these adapters on, and no other."""
    return {"adapters": {name: {"enabled": name in on} for name in ADAPTERS}, **more}


def only(things: list[Thing], kind: str, ending: str = "") -> Thing:
    """The one object of a kind, whose name ends so."""
    (found,) = [row for row in things if row["kind"] == kind and row["metadata"]["name"].endswith(ending)]
    return found
