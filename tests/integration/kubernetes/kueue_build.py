"""A real Kueue out of its published Go module, with its definitions and webhooks, kept in the user's cache folder.

Built once a version, in about three minutes of two cores.

    python -m tests.integration.kubernetes.kueue_build
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.integration.built import Say, alone_in, cache_folder, main, step, told

KUEUE = "0.15.0"
MODULE = "sigs.k8s.io/kueue"
CERTIFICATES = "/etc/kueue/metrics/certs"  # where it insists on finding them, when it does not make its own
VARIABLE = "KUEUE_METRICS_CERTS"  # where ours looks instead


@dataclass(frozen=True, slots=True)
class KueueBinary:
    """A folder with the manager, its CustomResourceDefinitions and its webhooks."""

    folder: Path

    @property
    def manager(self) -> Path:
        return self.folder / "bin" / "kueue"

    @property
    def definitions(self) -> Path:
        return self.folder / "definitions.yaml"

    @property
    def webhooks(self) -> Path:
        return self.folder / "webhooks.yaml"

    @property
    def is_whole(self) -> bool:
        return self.manager.exists() and self.definitions.exists() and self.webhooks.exists()


def kueue(say: Say) -> KueueBinary:
    """The one in the cache, built first where it is not there. Raises BuildError."""
    built = KueueBinary(cache_folder(f"kueue-{KUEUE}"))
    with alone_in(built.folder):
        if not built.is_whole:
            _build(built, say)
    return built


def _build(built: KueueBinary, say: Say) -> None:
    say(f"building Kueue {KUEUE} into {built.folder}, once: about 3 minutes")
    source = built.folder / "source"
    source.mkdir(exist_ok=True)
    with told(say, f"building Kueue {KUEUE}"):
        lines = ["module local.test/kueue", "go 1.25.0", f"require {MODULE} v{KUEUE}", ""]
        (source / "go.mod").write_text("\n".join(lines), encoding="utf-8")
        module = Path(json.loads(_go(source, "mod", "download", "-json", f"{MODULE}@v{KUEUE}"))["Dir"])
        target = built.manager.with_suffix(".tmp")
        _write_main(source, module)
        _go(source, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(target), ".")
        components = module / "config" / "components"
        found = sorted((components / "crd" / "bases").glob("kueue.x-k8s.io_*.yaml"))
        built.definitions.write_text("\n---\n".join(path.read_text(encoding="utf-8") for path in found))
        built.webhooks.write_text((components / "webhook" / "manifests.yaml").read_text(encoding="utf-8"))
        target.rename(built.manager)  # the last step: it makes the folder whole


def _write_main(source: Path, module: Path) -> None:
    """Its main with the folder of certificates from the environment, so that nobody writes below /etc."""
    text = (module / "cmd" / "kueue" / "main.go").read_text(encoding="utf-8")
    ours = text.replace(f'"{CERTIFICATES}"', f'os.Getenv("{VARIABLE}")')
    (source / "main.go").write_text(ours, encoding="utf-8")


def _go(folder: Path, *arguments: str) -> str:
    return step(["go", *arguments], folder)


if __name__ == "__main__":
    main(kueue)
