"""A real KEDA out of its published Go module, with its definitions, kept in the user's cache folder.

Built once a version, in about seven minutes of two cores.

    python -m tests.integration.kubernetes.keda_build
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.integration.built import Say, alone_in, cache_folder, main, step, told

KEDA = "2.21.0"
MODULE = "github.com/kedacore/keda/v2"
COMMANDS = {"keda-operator": "cmd/operator", "keda-adapter": "cmd/adapter"}
ANNOTATIONS = "github.com/nexus-rpc/nexus-proto-annotations"  # of a version that is not published any more
REPLACED = f"replace {ANNOTATIONS} v0.1.0 => {ANNOTATIONS} v0.1.1-0.20260629224316-835bd8d49cb4"


@dataclass(frozen=True, slots=True)
class KedaBinaries:
    """A folder with the operator, the metrics adapter and the CustomResourceDefinitions."""

    folder: Path

    @property
    def definitions(self) -> Path:
        return self.folder / "definitions.yaml"

    @property
    def is_whole(self) -> bool:
        return self.definitions.exists() and all(self.binary(name).exists() for name in COMMANDS)

    def binary(self, name: str) -> Path:
        return self.folder / "bin" / name


def keda(say: Say) -> KedaBinaries:
    """The one in the cache, built first where it is not there. Raises BuildError."""
    built = KedaBinaries(cache_folder(f"keda-{KEDA}"))
    with alone_in(built.folder):
        if not built.is_whole:
            _build(built, say)
    return built


def _build(built: KedaBinaries, say: Say) -> None:
    say(f"building KEDA {KEDA} into {built.folder}, once: about 7 minutes")
    source = built.folder / "source"
    source.mkdir(exist_ok=True)
    with told(say, f"building KEDA {KEDA}"):
        lines = ["module local.test/keda", "go 1.26.0", f"require {MODULE} v{KEDA}", REPLACED, ""]
        (source / "go.mod").write_text("\n".join(lines), encoding="utf-8")
        module = Path(json.loads(_go(source, "mod", "download", "-json", f"{MODULE}@v{KEDA}"))["Dir"])
        for name, command in COMMANDS.items():
            _build_one(f"{MODULE}/{command}", built.binary(name), source)
        found = sorted((module / "config" / "crd" / "bases").glob("*.yaml"))
        beside = built.definitions.with_suffix(".tmp")
        beside.write_text("\n---\n".join(path.read_text(encoding="utf-8") for path in found), encoding="utf-8")
        beside.rename(built.definitions)  # the last step: it makes the folder whole


def _build_one(command: str, target: Path, source: Path) -> None:
    if not target.exists():
        beside = target.with_suffix(".tmp")  # a build that is killed leaves no half of a binary under its name
        _go(source, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(beside), command)
        beside.rename(target)


def _go(folder: Path, *arguments: str) -> str:
    return step(["go", *arguments], folder)


if __name__ == "__main__":
    main(keda)
