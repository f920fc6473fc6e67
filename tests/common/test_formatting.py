"""Formatting of numbers and addresses."""

from math import nan

from raytrec.common.formatting import format_address, format_percent


def test_percent_shows_100_only_for_the_whole():
    shares = {0.708: "71 %", 0.0123: "1.2 %", 0.0004: "0.04 %", 0.0: "0 %", 0.994: "99 %", 0.996: "99.6 %"}
    shares |= {0.9996: "99.96 %", 0.99999: "99.999 %", 1.0: "100 %", 1 - 1e-12: "100 %", 1.7: "170 %", nan: "–"}
    assert {share: format_percent(share) for share in shares} == shares


def test_ipv6_addresses_have_brackets():
    assert [format_address(host, 80) for host in ("10.0.0.1", "node", "::1")] == ["10.0.0.1:80", "node:80", "[::1]:80"]
