"""A real Kubernetes out of its published Go modules: etcd, its three servers, kubectl, and kwok for its nodes.

Built once a version, in about eight minutes of two cores, and kept in the user's cache folder.

    python -m tests.integration.kubernetes.build
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tests.integration.built import Say, alone_in, cache_folder, main, step, told

KUBERNETES, LIBRARIES, KWOK = "1.36.3", "0.36.3", "0.8.0"
MODULE = "local.test/core"
COMMANDS = (
    "k8s.io/kubernetes/cmd/kube-apiserver",
    "k8s.io/kubernetes/cmd/kube-scheduler",
    "k8s.io/kubernetes/cmd/kube-controller-manager",
    "k8s.io/kubernetes/cmd/kubectl",
    "sigs.k8s.io/kwok/cmd/kwok",
    "go.etcd.io/etcd/server/v3",
)
ETCD_IS_NAMED = "v3"  # go build names a command by the last element of its path
STAGES = (
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-complete.yaml",
    "pod/fast/pod-delete.yaml",
)


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """A folder of binaries that belong together. `stages`: what kwok does to nodes and pods."""

    folder: Path

    @property
    def stages(self) -> Path:
        return self.folder / "stages.yaml"

    def binary(self, name: str) -> Path:
        return self.folder / "bin" / name

    @property
    def is_whole(self) -> bool:
        names = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubectl", "kwok")
        return self.stages.exists() and all(self.binary(name).exists() for name in names)


def kubernetes(say: Say) -> Kubernetes:
    """The one in the cache, built first where it is not there. One process builds, others wait. Raises BuildError."""
    built = Kubernetes(cache_folder(f"kubernetes-{KUBERNETES}"))
    with alone_in(built.folder):
        if not built.is_whole:
            _build(built, say)
    return built


def _build(built: Kubernetes, say: Say) -> None:
    say(f"building Kubernetes {KUBERNETES} into {built.folder}, once: about 8 minutes")
    source = built.folder / "core"
    source.mkdir(exist_ok=True)
    with told(say, f"building Kubernetes {KUBERNETES}"):
        (source / "go.mod").write_text(_go_mod(source), encoding="utf-8")
        for command in COMMANDS:
            _build_one(command, source, built.folder / "bin")
        kwok = Path(_go(source, "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kwok").strip())
        text = "\n---\n".join((kwok / "kustomize" / "stage" / name).read_text(encoding="utf-8") for name in STAGES)
        beside = built.stages.with_suffix(".tmp")
        beside.write_text(text, encoding="utf-8")
        beside.rename(built.stages)  # the last step: it makes the folder whole


def _build_one(command: str, source: Path, bin: Path) -> None:
    version = "k8s.io/component-base/version"
    major, minor, _ = KUBERNETES.split(".")
    named = {"gitVersion": f"v{KUBERNETES}", "gitMajor": major, "gitMinor": minor}
    flags = " ".join(["-s -w", *(f"-X {version}.{key}={value}" for key, value in named.items())])
    last = command.rpartition("/")[2]
    target = bin / ("etcd" if last == ETCD_IS_NAMED else last)
    if not target.exists():
        beside = target.with_suffix(".tmp")  # a build that is killed leaves no half of a binary under its name
        _go(source, "build", "-trimpath", "-ldflags", flags, "-o", str(beside), command)
        beside.rename(target)


def _go_mod(source: Path) -> str:
    """A module that wants Kubernetes, whose staging modules are replaced by their published versions."""
    answer = _go(source.parent, "mod", "download", "-json", f"k8s.io/kubernetes@v{KUBERNETES}")
    theirs = Path(json.loads(answer)["GoMod"]).read_text(encoding="utf-8")
    lines = [f"module {MODULE}", "go 1.26.0", *re.findall(r"^godebug .*$", theirs, re.MULTILINE)]
    lines += [f"require k8s.io/kubernetes v{KUBERNETES}", f"require sigs.k8s.io/kwok v{KWOK}"]
    staged = re.findall(r"(k8s\.io/[a-z-]+) => \./staging", theirs)
    return "\n".join([*lines, *(f"replace {name} => {name} v{LIBRARIES}" for name in staged), ""])


def _go(folder: Path, *arguments: str) -> str:
    return step(["go", *arguments], folder)


if __name__ == "__main__":
    main(kubernetes)
