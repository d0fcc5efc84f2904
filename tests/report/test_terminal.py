"""Nothing that is printed steers the terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.table import Table
from rich.text import Text

from merakc.report.charts.markup import tag
from merakc.report.terminal import Terminal, changing_line


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


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_nothing_is_said_where_nobody_reads_on(stream: str) -> None:
    code = (
        "import sys; from merakc.report.terminal import Terminal; "
        f"Terminal(stderr={stream == 'stderr'}).print('a' * 100); sys.stderr.write('went on')"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: closed}
        done = subprocess.run([sys.executable, "-c", code], check=False, **pipes)
    assert (done.returncode, done.stdout or b"", done.stderr or b"") == (141, b"", b"")


def test_a_narrow_line_cuts_what_is_being_done_and_not_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Terminal, "is_terminal", True)
    page = io.StringIO()
    with changing_line(Terminal(file=page, width=40), "reading [/red]") as line:
        line.refresh()
        line.update(line.task_ids[0], description="planning dp=2 tp=1 pp=2, 4 micro-batches")
        line.refresh()
    assert "reading [/red] 0:00:00" in page.getvalue()
    assert "planning dp=2 tp=1 pp=2, 4 mi… 0:00:00" in page.getvalue()
