"""A check that the packages which `import` finds under our names are ours.

Another package such as `models` on the path would shadow one of them.
"""

from base64 import urlsafe_b64encode
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from fleet.errors import ConfigError

PACKAGES = (
    *("benchmarks", "cli", "clients", "features", "fleet", "ingest"),
    *("models", "placement", "schedulers", "service", "simulator", "training"),
)


def check_packages() -> None:
    """Raise ConfigError if one of our packages is shadowed by another, or overwritten by a wheel."""
    root = Path(__file__).parent.parent
    recorded = _recorded_hashes(root)
    for name in PACKAGES:
        spec = find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        ours = root / name / "__init__.py"
        wanted = recorded.get(f"{name}/__init__.py")
        if found != ours.resolve() or (wanted and wanted != _hash(ours)):
            raise ConfigError(
                f"the package {name!r} is {found or 'missing'}, and that is not Fleetcast's: "
                "install fleetcast into an environment of its own, and keep that name off PYTHONPATH"
            )


def _recorded_hashes(root: Path) -> dict[str, str]:
    """Return path → hash of the files that the wheel installed into `root`.

    Empty in a source tree and for an editable install.
    """
    rows = (row.split(",") for file in root.glob("fleetcast-*.dist-info/RECORD") for row in file.read_text().split())
    return {row[0]: row[1] for row in rows if len(row) == 3}


def _hash(file: Path) -> str:
    """Return the hash of a file, as the RECORD of a wheel writes it."""
    return "sha256=" + urlsafe_b64encode(sha256(file.read_bytes()).digest()).decode().rstrip("=")
