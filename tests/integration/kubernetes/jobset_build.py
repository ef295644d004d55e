"""A real JobSet controller out of its published Go module, in the user's cache folder.

Built once a version, in about three minutes of two cores (one beside a built Kueue).

    python -m tests.integration.kubernetes.jobset_build
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.integration.built import Say, alone_in, cache_folder, main, step, told

JOBSET = "0.10.1"
MODULE = "sigs.k8s.io/jobset"


@dataclass(frozen=True, slots=True)
class JobSetBinary:
    """A folder with the controller and its CustomResourceDefinition."""

    folder: Path

    @property
    def manager(self) -> Path:
        return self.folder / "bin" / "jobset"

    @property
    def definition(self) -> Path:
        return self.folder / "definition.yaml"

    @property
    def is_whole(self) -> bool:
        return self.manager.exists() and self.definition.exists()


def jobset(say: Say) -> JobSetBinary:
    """Return the controller in the cache. Builds it first if it is missing. Raises BuildError."""
    built = JobSetBinary(cache_folder(f"jobset-{JOBSET}"))
    with alone_in(built.folder):
        if not built.is_whole:
            _build(built, say)
    return built


def _build(built: JobSetBinary, say: Say) -> None:
    say(f"building JobSet {JOBSET} into {built.folder}, once: about 3 minutes")
    source = built.folder / "source"
    source.mkdir(exist_ok=True)
    with told(say, f"building JobSet {JOBSET}"):
        lines = ["module local.test/jobset", "go 1.25.0", f"require {MODULE} v{JOBSET}", ""]
        (source / "go.mod").write_text("\n".join(lines), encoding="utf-8")
        module = Path(json.loads(step(["go", "mod", "download", "-json", f"{MODULE}@v{JOBSET}"], source))["Dir"])
        target = built.manager.with_suffix(".tmp")
        step(["go", "build", "-trimpath", "-ldflags", "-s -w", "-o", str(target), MODULE], source)
        definition = module / "config" / "components" / "crd" / "bases" / "jobset.x-k8s.io_jobsets.yaml"
        built.definition.write_text(definition.read_text(encoding="utf-8"), encoding="utf-8")
        target.rename(built.manager)  # the last step: it makes the folder whole


if __name__ == "__main__":
    main(jobset)
