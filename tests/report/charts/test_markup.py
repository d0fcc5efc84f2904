"""HTML from values."""

from __future__ import annotations

from merakc.report.charts.markup import Markup, join, tag, void


def test_plain_text_is_escaped_and_markup_is_not() -> None:
    assert tag("p", "a < b & c", tag("b", "x")) == "<p>a &lt; b &amp; c<b>x</b></p>"
    assert join("<i>", Markup("<i>")) == "&lt;i&gt;<i>"


def test_attributes_are_escaped() -> None:
    found = tag("td", class_="a", data_x='"><script>', style="width:5%")
    assert found == '<td class="a" data-x="&quot;&gt;&lt;script&gt;" style="width:5%"></td>'


def test_numbers_are_short() -> None:
    assert tag("rect", x=1 / 3, y=2) == '<rect x="0.333333" y="2"></rect>'


def test_none_is_nothing() -> None:
    assert tag("p", None, "x") == "<p>x</p>"
    assert void("br") == "<br>"
