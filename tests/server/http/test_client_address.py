"""Which connections count as those of one client."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.server.http.client_address import client_address, is_from_here


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("192.0.2.1", 5000), "192.0.2.1"),
        (("2001:db8:1:2:3:4:5:6", 5000, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::1", 5000, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5000, 0, 2), "fe80::/64"),
        (("::ffff:192.0.2.1", 5000, 0, 0), "192.0.2.1"),
        ("", ""),
        (None, ""),
    ],
)
def test_an_address_is_one_client_and_so_is_a_network_of_ipv6(peer: Any, address: str) -> None:
    assert client_address(peer) == address


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [
        (("127.0.0.1", 5), True),
        (("::1", 5, 0, 0), True),
        (("::ffff:127.0.0.1", 5, 0, 0), True),
        (("10.1.2.3", 5), False),
        (("2001:db8::1", 5, 0, 0), False),
        (None, False),
    ],
)
def test_loopback_addresses_are_of_this_machine(peer: Any, is_here: bool) -> None:
    assert is_from_here(peer) == is_here
