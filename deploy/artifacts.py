"""The files of a release: wheels, source distributions, image context, chart, site, and their hashes.

Two builds of one tree with the same SOURCE_DATE_EPOCH are equal, byte for byte. A build needs the
development dependencies, but no network.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from deploy.changelog import ReleaseError

NOT_IN_IMAGE = (".ci", ".github", "changes", "dashboards", "deploy", "docs", "examples", "tests")
SUMS = "SHA256SUMS"


def list_release_files(version: str) -> tuple[str, ...]:
    """Return the names of a release's files, in the order in which they are built."""
    return (
        f"fleetcast-{version}-py3-none-any.whl",
        f"fleetcast-{version}.tar.gz",
        f"fleetcast_client-{version}-py3-none-any.whl",
        f"fleetcast_client-{version}.tar.gz",
        f"fleetcast-image-{version}.tar.gz",
        f"fleetcast-chart-{version}.tgz",
        f"fleetcast-site-{version}.tar.gz",
        SUMS,
    )


def build_release_files(root: Path, out: Path, version: str, epoch: int) -> None:
    """Build every file of a release into `out`.

    Raises ReleaseError with the output of the step that failed. epoch: the SOURCE_DATE_EPOCH, in Unix
    seconds.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for folder in (root, root / "sdk"):
        for target in ("wheel", "sdist"):
            build_distribution(folder, out, target, epoch)
    _, _, _, _, image, chart, site, _ = list_release_files(version)
    tracked = _list_tracked_files(root)
    write_archive(out / image, "", root, (path for path in tracked if path.split("/")[0] not in NOT_IN_IMAGE), epoch)
    within = "deploy/helm/fleetcast/"
    files = [path.removeprefix(within) for path in tracked if path.startswith(within)]
    write_archive(out / chart, "fleetcast/", root / within, files, epoch)
    with tempfile.TemporaryDirectory() as temporary:
        pages = Path(temporary)
        build_site(root, pages, epoch)
        files = [path.relative_to(pages).as_posix() for path in pages.rglob("*") if path.is_file()]
        write_archive(out / site, "", pages, files, epoch)
    built = [out / name for name in list_release_files(version) if name != SUMS]
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in built]
    (out / SUMS).write_text("".join(sums), encoding="utf-8")
    print("".join(sums), end="")


def build_distribution(folder: Path, out: Path, target: str, epoch: int) -> None:
    """Build the wheel or the sdist (`target`) of the project in `folder`."""
    _run_command([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)], folder, epoch)


def build_site(root: Path, out: Path, epoch: int) -> None:
    """Build the documentation site into `out`."""
    _run_command([sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(out)], root, epoch)


def write_archive(target: Path, prefix: str, folder: Path, files: Iterable[str], epoch: int) -> None:
    """Write a reproducible .tar.gz.

    Its bytes depend only on the files' names, contents, links and executable bits, and on `epoch`.
    """
    with (
        target.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for name in sorted(files):
            path = folder / name
            member = archive.gettarinfo(path, arcname=prefix + name)
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            if member.isreg():
                with path.open("rb") as data:
                    archive.addfile(member, data)
            else:
                archive.addfile(member)


def _list_tracked_files(root: Path) -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]


def _run_command(command: list[str], folder: Path, epoch: int) -> None:
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command[1:])}\n{done.stdout}{done.stderr}")
