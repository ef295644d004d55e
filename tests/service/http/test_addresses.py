"""Addresses of clients: which count as one, and which are trusted."""

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.service.http.addresses import LOOPBACK, Networks, normalise_client_address


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.7", "10.0.0.7", True),
        ("10.0.0.7", "10.0.0.8", False),
        ("10.0.0.7", "::ffff:10.0.0.7", True),
        ("2001:db8::1", "2001:db8::ffff:1:2:3", True),  # all of a network are one who has it
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("x" * 9000, "nonsense", True),  # what a proxy forwards may be anything, and takes up no more
    ],
)
def test_an_address_counts_with_what_belongs_to_it(one: str, other: str, same: bool) -> None:
    assert (normalise_client_address(one) == normalise_client_address(other)) == same
    assert len(normalise_client_address(one)) < 40


def test_loopback_is_trusted_and_nobody_else() -> None:
    trusted = Networks(LOOPBACK)
    assert all(host in trusted for host in ("127.0.0.1", "127.9.0.1", "::1", "::ffff:127.0.0.1"))
    assert not any(host in trusted for host in ("10.0.0.1", "::2", "", "localhost", "nonsense"))


def test_what_is_no_network_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"api\.trusted_proxies: 10\.0\.0\.1/8 has host bits set"):
        Networks(["10.0.0.1/8"], "api.trusted_proxies")
