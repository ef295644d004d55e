"""Reading of certificates: their validity, and the names of a client's certificate."""

import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

NAMES = "fleetcast.names"  # in the scope of a request: whom the client's certificate names
UTC_TIME, VERSION_TAG = 0x17, 0xA0
BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
ALTERNATIVES = frozenset({"DNS", "URI", "email", "IP Address"})


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """The names and the expiry of a client's certificate.

    `all_names`: the common name, then the alternative names. `until_s`: the expiry in Unix seconds.
    """

    all_names: tuple[str, ...]
    until_s: float

    def list_valid_names(self) -> tuple[str, ...]:
        """Return the names of the certificate, or no names once the certificate has expired.

        A connection may outlive its certificate.
        """
        return self.all_names if time.time() <= self.until_s else ()


def read_client_certificate(tls: Any) -> ClientCertificate | None:
    """Return the client's certificate, which the TLS handshake has verified.

    Returns None without TLS, or if the client sent no certificate.
    """
    peer = tls.getpeercert() if tls is not None else None
    if not peer:
        return None
    common = [value for part in peer.get("subject", ()) for name, value in part if name == "commonName"]
    others = [value for kind, value in peer.get("subjectAltName", ()) if kind in ALTERNATIVES]
    return ClientCertificate((*common, *others), ssl.cert_time_to_seconds(peer["notAfter"]))


def read_certificate_validity_s(pem: str) -> tuple[float, float]:
    """Return the validity period of a PEM file's first certificate: its start and end in Unix seconds.

    Raises ValueError if there is no certificate.
    """
    begin, end = pem.find(BEGIN), pem.find(END)
    if not 0 <= begin < end:
        raise ValueError("there is no certificate in it")
    try:
        return _parse_der_validity_s(ssl.PEM_cert_to_DER_cert(pem[begin : end + len(END)]))
    except IndexError:
        raise ValueError("the certificate in it is cut off") from None


def _parse_der_validity_s(der: bytes) -> tuple[float, float]:
    """Return the validity period of a DER certificate: its start and end in Unix seconds.

    A certificate and its first part are sequences: [version,] serial, algorithm, issuer, validity (RFC
    5280, 4.1).
    """
    _, at, _ = _parse_der_element(der, _parse_der_element(der, 0)[1])
    for _ in range(4 if der[at] == VERSION_TAG else 3):
        at = _parse_der_element(der, at)[2]
    _, first, _ = _parse_der_element(der, at)
    return _parse_der_time_s(der, first), _parse_der_time_s(der, _parse_der_element(der, first)[2])


def _parse_der_element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the element at index `at`, and the indices where its content starts and ends."""
    tag, size, at = der[at], der[at + 1], at + 2
    if size & 0x80:
        bytes_of_size = size & 0x7F
        size, at = int.from_bytes(der[at : at + bytes_of_size], "big"), at + bytes_of_size
    return tag, at, at + size


def _parse_der_time_s(der: bytes, at: int) -> float:
    """Return the DER time at index `at`, in Unix seconds.

    UTCTime has a year of two digits, from 1950 on. GeneralizedTime has a year of four digits.
    """
    tag, begin, end = _parse_der_element(der, at)
    text = der[begin:end].decode("ascii")
    if tag == UTC_TIME:
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
