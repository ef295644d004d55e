"""The names under which modules of Fleetcast are imported. All begin with `fleetcast`."""

from importlib.util import find_spec
from pathlib import Path

PACKAGE = "fleetcast"
ROOT = Path(__file__).parents[1]


def suggest_import_path(path: str) -> str:
    """Suggest the full import path for a path of Fleetcast without `fleetcast.`. Returns "" for other paths.

    path: `package.module:name`. The module may have moved within its package.
    """
    module, _, name = path.partition(":")
    if not (found := find_full_module_names(module)):
        return ""
    return f"the package of all modules is {PACKAGE}: give " + " or ".join(f"'{full}:{name}'" for full in found)


def find_full_module_names(module: str) -> tuple[str, ...]:
    """Return the full names of the Fleetcast modules that a name without `fleetcast.` may mean.

    Returns an empty tuple if the user has a package of that name, such as `models`. Imports nothing, because the
    user's package may run any code.
    """
    parts = module.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts) or not _is_own_package(parts[0]):
        return ()
    exact = ROOT.joinpath(*parts).with_suffix(".py")
    found = [exact] if exact.exists() else sorted((ROOT / parts[0]).rglob(f"{parts[-1]}.py"))
    return tuple(".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)) for path in found)


def _is_own_package(package: str) -> bool:
    """Return whether Fleetcast has a package of this name, and Python finds no other package of that name."""
    if not (ROOT / package / "__init__.py").exists():
        return False
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    places = (spec.submodule_search_locations or [spec.origin or ""]) if spec is not None else []
    return all(Path(place).resolve() == (ROOT / package).resolve() for place in places)
