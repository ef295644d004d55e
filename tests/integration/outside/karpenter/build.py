"""A real Karpenter over kwok's made-up machines, out of its published Go module, with its definitions.

Built once a version, in about two minutes of two quiet cores, and kept in the user's cache folder.

    python -m tests.integration.outside.karpenter.build
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.integration.built import Say, alone_in, cache_folder, main, step, to_stderr, told

KARPENTER = "1.14.0"
MODULE = "sigs.k8s.io/karpenter"
DEFINITIONS = ("kwok/charts/crds", "kwok/apis/crds")


@dataclass(frozen=True, slots=True)
class KarpenterBinary:
    """A folder with the controller and its CustomResourceDefinitions."""

    folder: Path

    @property
    def controller(self) -> Path:
        return self.folder / "bin" / "karpenter-kwok"

    @property
    def definitions(self) -> Path:
        return self.folder / "definitions.yaml"

    @property
    def is_whole(self) -> bool:
        return self.controller.exists() and self.definitions.exists()


def karpenter(say: Say) -> KarpenterBinary:
    """The one in the cache, built first where it is not there. Raises BuildError."""
    built = _cached()
    with alone_in(built.folder):
        if not built.is_whole:
            _build(built, say)
    return built


def is_built() -> bool:
    return _cached().is_whole


def build() -> Path:
    """The folder of the cache. Raises BuildError."""
    return karpenter(to_stderr).folder


def _cached() -> KarpenterBinary:
    return KarpenterBinary(cache_folder(f"karpenter-{KARPENTER}"))


def _build(built: KarpenterBinary, say: Say) -> None:
    say(f"building Karpenter {KARPENTER} into {built.folder}, once: about 2 minutes")
    source = built.folder / "source"
    source.mkdir(exist_ok=True)
    with told(say, f"building Karpenter {KARPENTER}"):
        lines = ["module local.test/karpenter", "go 1.26.0", f"require {MODULE} v{KARPENTER}", ""]
        (source / "go.mod").write_text("\n".join(lines), encoding="utf-8")
        module = Path(json.loads(_go(source, "mod", "download", "-json", f"{MODULE}@v{KARPENTER}"))["Dir"])
        target = built.controller.with_suffix(".tmp")
        _go(source, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(target), f"{MODULE}/kwok")
        found = [path for folder in DEFINITIONS for path in sorted((module / folder).glob("*.yaml"))]
        built.definitions.write_text("\n---\n".join(path.read_text(encoding="utf-8") for path in found))
        target.rename(built.controller)  # the last step: it makes the folder whole


def _go(folder: Path, *arguments: str) -> str:
    return step(["go", *arguments], folder)


if __name__ == "__main__":
    main(karpenter)
