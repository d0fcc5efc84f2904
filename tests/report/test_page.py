"""A page that stands alone: well-formed, safe, and with all that it is to tell."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from merakc.errors import PlanError
from merakc.ir.plan_file import PlanFile
from merakc.ir.report import SourceFile, SourceLine
from merakc.report.page import page, require_report, write_page
from tests.ir.test_report import OTHERS
from tests.report.made import BUSY, lowered, plan_with_report, report

VOID = ("meta", "br")


class Reader(HTMLParser):
    """Checks that elements end where they should, and keeps what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [(k, v or "") for k, v in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader


def test_it_is_well_formed_and_complete() -> None:
    plan = plan_with_report()
    plan = replace(plan, report=replace(report(cluster=BUSY), alternatives=OTHERS))
    found = read(page(plan))
    assert (found.seen.count("html"), found.seen.count("main")) == (1, 1)
    for wanted in (
        "Schedule", "Memory at the peak", "Communication in a step", "What takes longest",
        "The source, line by line", "the next best", "Refused", "Where the figures are from",
        "transformer.h.*.mlp.c_fc", "GPT2Block.forward", plan.hash[:12], "12 heads do not divide",
    ):  # fmt: skip
        assert wanted in found.text, wanted


def test_it_needs_nothing_else() -> None:
    text = page(plan_with_report())
    found = read(text)
    assert "http://" not in text
    assert "https://" not in text
    assert not {"script", "link", "img", "iframe", "object"} & {*found.seen}
    assert not [k for k, _ in found.attributes if k in ("src", "href") or k.startswith("on")]
    assert "url(" not in text
    assert "@import" not in text
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in found.attributes


def test_names_do_no_harm() -> None:
    evil = "<script>alert(1)</script>"
    line = SourceLine(1, evil, evil, (evil,), 1, 1.0)
    bad = replace(report(), files=(SourceFile(evil, (line,)),), cluster=evil)
    plan = replace(plan_with_report(evil), report=bad)
    found = read(page(plan))
    assert "script" not in found.seen
    assert found.text.count(evil) >= 5


def test_all_stages_and_ranks_are_there() -> None:
    found = read(page(plan_with_report())).text
    for rank in range(lowered().plan.pp):
        assert f"rank {rank}" in found


def test_a_column_with_a_long_cell_is_broken_into_lines_as_a_whole() -> None:
    (short,) = OTHERS.runners_up
    wide = replace(short, loses="waits for collectives over dp, and then for messages, +20 ms")
    others = replace(OTHERS, runners_up=(short, wide))
    plan = plan_with_report()
    assert plan.report is not None
    text = page(replace(plan, report=replace(plan.report, alternatives=others)))
    assert f'<td class="long">{short.loses}</td>' in text
    assert f'<td class="long">{wide.loses}</td>' in text
    assert '<th class="long">what loses</th>' in text


def test_a_page_of_a_plan_without_a_report_tells_the_decisions(tmp_path: Path) -> None:
    plan = PlanFile(lowered().plan, lowered().prediction)
    with pytest.raises(PlanError, match=r"x\.json: the plan was made without a report; make it"):
        require_report(plan, "x.json")
    write_page(plan, tmp_path / "page.html")
    found = read((tmp_path / "page.html").read_text(encoding="utf-8")).text
    assert "GPT2LMHeadModel on 8 ranks" in found or "on 8 ranks" in found
    assert "Schedule" not in found


def test_a_page_is_written_as_utf_8(tmp_path: Path) -> None:
    write_page(plan_with_report("Modèle ×"), tmp_path / "page.html")
    assert "Modèle ×" in (tmp_path / "page.html").read_text(encoding="utf-8")
