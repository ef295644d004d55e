"""Names under which modules of Fleetcast are imported: all begin with `fleetcast`."""

from importlib.util import find_spec
from pathlib import Path

PACKAGE = "fleetcast"
ROOT = Path(__file__).parents[1]


def full_name(module: str) -> str | None:
    """Return the full name of a module of Fleetcast that a configuration names without `fleetcast.`.

    The module may have moved within its package. Returns None for any other module: a plugin may have a
    package such as `models` of its own.
    """
    parts = module.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return None
    exact = ROOT.joinpath(*parts).with_suffix(".py")
    found = [exact] if exact.exists() else sorted((ROOT / parts[0]).rglob(f"{parts[-1]}.py"))
    if len(found) != 1:
        return None
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and (spec.origin is None or Path(spec.origin).resolve() != found[0].resolve()):
        return None
    return ".".join((PACKAGE, *found[0].relative_to(ROOT).with_suffix("").parts))
