"""The scheduler of scheduler-plugins, with Trimaran in it, out of its published Go module.

Built once a version, in about ten minutes of two cores, and kept in the user's cache folder.

    python -m tests.integration.outside.trimaran.build
"""

import json
import shutil
from pathlib import Path

from tests.integration.built import Say, alone_in, cache_folder, main, step, to_stderr, told
from tests.integration.kubernetes.build import KUBERNETES, Kubernetes

PLUGINS = "0.32.7"
MODULE = "sigs.k8s.io/scheduler-plugins"
FOLDER = cache_folder(f"scheduler-plugins-{PLUGINS}")
SCHEDULER = FOLDER / "bin" / "scheduler"


def is_built() -> bool:
    """Whether this scheduler and the Kubernetes that it works for are in the cache."""
    return SCHEDULER.exists() and Kubernetes(cache_folder(f"kubernetes-{KUBERNETES}")).is_whole


def build(say: Say = to_stderr) -> Path:
    """The scheduler in the cache, built first where it is not there. Raises BuildError."""
    with alone_in(FOLDER):
        if not SCHEDULER.exists():
            say(f"building scheduler-plugins {PLUGINS} into {FOLDER}, once: about 10 minutes")
            with told(say, f"building scheduler-plugins {PLUGINS}"):
                _build()
    return SCHEDULER


def _build() -> None:
    """From a module with its own requirements and its own go.sum: it holds hashes that are in no public database."""
    source = FOLDER / "source"
    source.mkdir(exist_ok=True)
    theirs = Path(json.loads(_go(FOLDER, "mod", "download", "-json", f"{MODULE}@v{PLUGINS}"))["Dir"])
    for name in ("go.mod", "go.sum"):
        shutil.copyfile(theirs / name, source / name)  # the module cache is read-only
    _go(source, "mod", "edit", "-module=local.test/plugins", f"-require={MODULE}@v{PLUGINS}")
    beside = SCHEDULER.with_suffix(".tmp")
    _go(source, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(beside), f"{MODULE}/cmd/scheduler")
    beside.rename(SCHEDULER)  # a build that is killed leaves no half of a binary under its name


def _go(folder: Path, *arguments: str) -> str:
    return step(["go", *arguments], folder)


if __name__ == "__main__":
    main(build)
