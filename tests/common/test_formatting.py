"""Formatting of numbers."""

from math import nan

from raytrec.common.formatting import format_percent


def test_percent_shows_100_only_for_the_whole():
    shares = {0.708: "71 %", 0.0123: "1.2 %", 0.0004: "0.04 %", 0.0: "0 %", 0.994: "99 %", 0.996: "99.6 %"}
    shares |= {0.9996: "99.96 %", 0.99999: "99.999 %", 1.0: "100 %", 1 - 1e-12: "100 %", 1.7: "170 %", nan: "–"}
    assert {share: format_percent(share) for share in shares} == shares
