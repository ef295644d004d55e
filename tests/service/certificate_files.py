"""Certificates as `openssl` makes them, for tests: authorities, and what they sign."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.programs import needed

DAY = "-days"
EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(*arguments: str | Path) -> str:
    done = subprocess.run(
        [needed("openssl"), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True)
class Pair:
    cert: Path
    key: Path


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.cert, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        made = ("-keyout", self._key, "-out", self.cert, "-days", "3650", "-subj", f"/CN={name}")
        openssl("req", "-x509", *EC, *made)

    def sign(self, name: str, alternatives: str = "DNS:localhost,IP:127.0.0.1", until: str = "20991231235959Z") -> Pair:
        """A certificate with the common name and the alternative ones, valid from 2020 on."""
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        request, more = self.folder / f"{name}.csr", self.folder / f"{name}.cnf"
        openssl("req", *EC, "-keyout", pair.key, "-out", request, "-subj", f"/CN={name}")
        more.write_text(
            f"[ca]\ndefault_ca=own\n[own]\ndatabase={more}.db\nserial={more}.serial\nnew_certs_dir={self.folder}\n"
            "default_md=sha256\npolicy=any\nunique_subject=no\nx509_extensions=more\n[any]\ncommonName=supplied\n"
            f"[more]\nbasicConstraints=CA:FALSE\nsubjectAltName={alternatives}\n"
        )
        Path(f"{more}.db").write_text("")
        signed = ("-config", more, "-cert", self.cert, "-keyfile", self._key, "-in", request, "-out", pair.cert)
        openssl("ca", "-batch", "-notext", "-rand_serial", *signed, "-startdate", "20200101000000Z", "-enddate", until)
        pair.key.chmod(0o600)
        return pair
