"""Helm out of its published Go module, with the libraries of the Kubernetes that it talks to.

Built once a version, in about four minutes of two cores (one beside a built Kubernetes), into the user's cache folder.

    python -m tests.integration.outside.helm.build
"""

from pathlib import Path

from tests.integration.built import Say, alone_in, cache_folder, main, step, to_stderr, told
from tests.integration.kubernetes.build import KUBERNETES, LIBRARIES

HELM = "3.20.2"
MODULE = "helm.sh/helm/v3"
SHARED = ("api", "apiextensions-apiserver", "apimachinery", "apiserver", "cli-runtime", "client-go")
SHARED += ("component-base", "component-helpers", "kubectl", "metrics")  # with what a built Kubernetes has compiled
FOLDER = cache_folder(f"helm-{HELM}")
BINARY = FOLDER / "bin" / "helm"


def is_built() -> bool:
    return BINARY.exists()


def build(say: Say = to_stderr) -> Path:
    """Helm in the cache, built first where it is not there. Raises BuildError."""
    with alone_in(FOLDER):
        if not is_built():
            say(f"building Helm {HELM} into {FOLDER}, once: about 4 minutes")
            with told(say, f"building Helm {HELM}"):
                _build()
    return BINARY


def _build() -> None:
    source = FOLDER / "source"
    source.mkdir(exist_ok=True)
    lines = ["module local.test/helm", "go 1.26.0", f"require {MODULE} v{HELM}"]
    lines += [f"require k8s.io/{name} v{LIBRARIES}" for name in SHARED]
    (source / "go.mod").write_text("\n".join([*lines, ""]), encoding="utf-8")
    beside = BINARY.with_suffix(".tmp")
    command = f"{MODULE}/cmd/helm"
    step(["go", "build", "-trimpath", "-ldflags", _flags(), "-o", str(beside), command], source)
    beside.rename(BINARY)  # a build that is killed leaves no half of a binary under its name


def _flags() -> str:
    """Its own version, and that of Kubernetes: without them it renders for 1.20."""
    major, minor, _ = KUBERNETES.split(".")
    known = {
        f"{MODULE}/internal/version.version": f"v{HELM}",
        f"{MODULE}/pkg/lint/rules.k8sVersionMajor": major,
        f"{MODULE}/pkg/lint/rules.k8sVersionMinor": minor,
        f"{MODULE}/pkg/chartutil.k8sVersionMajor": major,
        f"{MODULE}/pkg/chartutil.k8sVersionMinor": minor,
    }
    return "-s -w " + " ".join(f"-X {name}={value}" for name, value in known.items())


if __name__ == "__main__":
    main(build)
