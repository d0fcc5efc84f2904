"""Nothing that is printed steers the terminal."""

from __future__ import annotations

import io

from rich.table import Table
from rich.text import Text

from merakc.report.charts.markup import tag
from merakc.report.terminal import Terminal


def test_texts_are_neither_markup_nor_escape_sequences() -> None:
    page = io.StringIO()
    table = Table(title="\x1b[2Jtitle")
    table.add_column("[/red]")
    table.add_row("\x9b31m[link=https://example.org]name[/link]")
    console = Terminal(file=page, width=100)
    for shown in (table, Text("\x1b]0;owned"), "a :smile: [bold]b"):
        console.print(shown)
    text = page.getvalue()
    assert text.replace("\n", "").isprintable()
    for part in ("\\u001b[2Jtitle", "[/red]", "[link=https://example.org]", ":smile: [bold]b"):
        assert part in text


def test_a_page_shows_what_would_steer() -> None:
    assert tag("p", "\x1b<\ud800", title="\x00") == '<p title="\\u0000">\\u001b&lt;\\ud800</p>'
