"""A current Prometheus and its promtool out of their published Go module, for tests and for the benchmark beside us.

Built once a version, in about three minutes of two cores, and kept in the user's cache folder.

    python -m tests.integration.prometheus_build
"""

from pathlib import Path

from tests.integration.built import Say, alone_in, cache_folder, main, step, told

VERSION, MODULE_VERSION = "3.15.0", "v0.315.0"
MODULE = "github.com/prometheus/prometheus"
GO_MOD = f"module local.test/prometheus\n\ngo 1.26.0\n\nrequire {MODULE} {MODULE_VERSION}\n"
FLAGS = ("-trimpath", "-tags", "remove_all_sd,netgo", "-ldflags")
LINKED = f"-s -w -X github.com/prometheus/common/version.Version={VERSION}"


def prometheus(say: Say) -> Path:
    """The binary in the cache, built first where it is not there: one process builds, others wait. Or BuildError."""
    folder = cache_folder(f"prometheus-{VERSION}")
    built = folder / "bin" / "prometheus"
    with alone_in(folder):
        if not built.exists():
            _build(folder, built, say)
    return built


def _build(folder: Path, built: Path, say: Say) -> None:
    say(f"building Prometheus {VERSION} into {folder}, once: about 3 minutes")
    source = folder / "source"
    source.mkdir(exist_ok=True)
    (source / "go.mod").write_text(GO_MOD, encoding="utf-8")
    beside = folder / "bin" / "prometheus.tmp"  # a build that is killed leaves no half of a binary under its name
    with told(say, f"building Prometheus {VERSION}"):
        step(["go", "build", *FLAGS, LINKED, "-o", str(beside), f"{MODULE}/cmd/prometheus"], source)
    beside.rename(built)


if __name__ == "__main__":
    main(prometheus)
