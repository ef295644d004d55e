"""A writer of the bill of materials: the packages that the lock files install, as CycloneDX JSON.

Run `python -m fleetcast.cli.sbom` or `make sbom`. Licences are those that installed packages
declare. The document has no timestamp, so the same locks and packages make the same bytes.
"""

import hashlib
import json
import re
import tomllib
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetcast.cli.kit.screen import echo

SPEC_VERSION = "1.5"
PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;\\]+)\s*(?:;\s*([^\\]*?))?\s*\\?$")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")

# What packages write into their field `License`, where it is no SPDX expression.
SPELLINGS = {
    "2-clause bsd": "BSD-2-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "bsd": "BSD License",  # of which there are several, so it stays a name
    "bsd 3-clause license": "BSD-3-Clause",
    "isc license": "ISC",
    "mit license": "MIT",
} | {
    name.lower(): name
    for name in (
        *("Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "GPL-3.0", "ISC", "LGPL-2.1-or-later", "MIT", "MPL-2.0"),
        "PSF-2.0",
    )
}
CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD License",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# Of what declares none, or is for other systems and so never installed beside the rest: from its licence file.
READ_IN_THE_FILE = {"appnope": "BSD-2-Clause", "atheris": "Apache-2.0", "colorama": "BSD-3-Clause"}
NO_SPDX_ID = frozenset({"BSD License", "unknown"})


@dataclass(frozen=True, slots=True)
class Pin:
    """A package that a lock file pins.

    marker: the systems on which it is installed, "" for all. hashes: the SHA-256 of its files.
    """

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{re.sub(r'[-_.]+', '-', self.name).lower()}@{self.version}"


def parse_pins(lock: str) -> Iterator[Pin]:
    """Yield the pinned packages of a lock file in its order, with their hashes."""
    for block in re.split(r"\n(?=\S)", lock):
        first, _, _ = block.partition("\n")
        if found := PIN.match(first):
            name, version, marker = found.groups()
            yield Pin(name, version, marker or "", tuple(sorted(set(HASH.findall(block)))))


def find_licence(name: str) -> str:
    """Return the licence of a package as an SPDX expression.

    Returns "BSD License" if the package declares no version of that licence. Returns "unknown" if the package is not
    installed or declares none.
    """
    try:
        return READ_IN_THE_FILE.get(name) or _read_declared_licence(metadata(name))
    except PackageNotFoundError:
        return "unknown"


def _read_declared_licence(declared: PackageMetadata) -> str:
    """Return the licence that a package's metadata declares, or "unknown".

    The SPDX expression has priority, then the first line of the old free text, then the classifiers.
    """
    expression = declared.json.get("license_expression")
    if expression:
        return str(expression)
    text = str(declared.json.get("license") or "").strip().partition("\n")[0].strip().lower()
    if text in SPELLINGS:
        return SPELLINGS[text]
    names = (
        line.rpartition(" :: ")[2] for line in declared.get_all("Classifier") or () if line.startswith("License ::")
    )
    return next((CLASSIFIERS[name] for name in names if name in CLASSIFIERS), "unknown")


def make_document(runtime: Iterable[Pin], development: Iterable[Pin], project: dict[str, Any]) -> dict[str, Any]:
    """Build the bill of materials. A package that only development needs has the scope "excluded"."""
    needed = {pin.purl: pin for pin in runtime}
    every = needed | {pin.purl: pin for pin in development if pin.purl not in needed}
    components = [_make_component(every[purl], purl in needed) for purl in sorted(every)]
    body = {
        "metadata": {
            "lifecycles": [{"phase": "pre-build"}],
            "component": {
                "type": "application",
                "bom-ref": project["name"],
                "name": project["name"],
                "version": project["version"],
                "licenses": _make_licences(project["license"]),
            },
        },
        "components": components,
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    serial = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}"
    return {"bomFormat": "CycloneDX", "specVersion": SPEC_VERSION, "serialNumber": serial, "version": 1, **body}


def _make_component(pin: Pin, is_needed: bool) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": pin.purl,
        "name": pin.name,
        "version": pin.version,
        "scope": "required" if is_needed else "excluded",
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in pin.hashes],
        "licenses": _make_licences(find_licence(pin.name)),
        "purl": pin.purl,
    } | ({"properties": [{"name": "fleetcast:marker", "value": pin.marker}]} if pin.marker else {})


def _make_licences(licence: str) -> list[dict[str, Any]]:
    if licence in NO_SPDX_ID:
        return [{"license": {"name": licence}}]
    return [{"expression": licence}] if " " in licence else [{"license": {"id": licence}}]


def make_folder_sbom(root: Path) -> dict[str, Any]:
    """Build the bill of materials of a checkout, from its two lock files and its pyproject.toml."""
    runtime, development = (
        parse_pins((root / name).read_text(encoding="utf-8")) for name in ("requirements.lock", "requirements-dev.lock")
    )
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return make_document(runtime, development, project)


def write_sbom(
    out: Annotated[Path, typer.Option(help="Where the document goes.")] = Path("var/sbom.cdx.json"),
    root: Annotated[Path, typer.Option(help="The checkout with the lock files.")] = Path(),
) -> None:
    """Write the bill of materials of a checkout to a file."""
    found = make_folder_sbom(root)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    echo(f"{out}: {len(found['components'])} packages")


if __name__ == "__main__":
    typer.run(write_sbom)
