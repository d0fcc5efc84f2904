"""A plan and its report as one HTML page that needs nothing else: no network, no scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from merakc.errors import PlanError
from merakc.files.printable import count_of
from merakc.ir.plan_file import PlanFile
from merakc.ir.report import Report, SourceFile
from merakc.report.charts.markup import Markup, join, tag, void
from merakc.report.charts.picture import memory_picture, schedule_picture
from merakc.report.decisions import Section, plan_facts, plan_sections
from merakc.report.findings import LEAST_SHARE, NO_LINE, report_sections, throughput, verdict
from merakc.report.units import format_bytes, format_seconds

STYLE = Path(__file__).with_name("page.css")
LONG = 48  # letters of a cell that is broken into lines
# The page may load nothing and run nothing, whatever stands in it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def require_report(file: PlanFile, where: str) -> Report:
    """The report of a plan. Raises `PlanError` where it was made without one."""
    if file.report is None:
        raise PlanError(
            f"{where}: the plan was made without a report; make it with `merakc plan`, which "
            "simulates a step and writes what it finds into the plan's file"
        )
    return file.report


def write_page(file: PlanFile, path: str | Path) -> None:
    """Writes the page: what the plan decides and, where it has a report, what it should cost."""
    Path(path).write_text(page(file), encoding="utf-8")


def page(file: PlanFile) -> str:
    """The page's text."""
    plan, report = file.decisions, file.report
    world = plan.mesh.world_size
    title = f"{plan.model} on " + (
        f"{world} x {report.cluster}" if report else count_of(world, "rank")
    )
    first = (tag("p", verdict(report.verdict)), _cards(report)) if report else ()
    foot = f"merakc {file.merakc_version}, plan {plan.hash[:12]}. Predicted, not measured."
    return document(title, first, _body(file), foot)


def document(title: str, first: Iterable[Markup], parts: Iterable[Markup], foot: str) -> str:
    """The text of a page: what stands first, under its title, its parts, and a last line."""
    head = tag(
        "head",
        void("meta", charset="utf-8"),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", title),
        tag("style", Markup(STYLE.read_text(encoding="utf-8"))),
    )
    body = tag(
        "body", tag("header", tag("h1", title), *first), tag("main", *parts), tag("footer", foot)
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def section_of(section: Section) -> Markup:
    """A table under its title."""
    return _titled(section, _table(section))


def _cards(report: Report) -> Markup:
    found = report.verdict
    share = found.peak_bytes / max(found.memory_bytes, 1)
    peak = f"{share:.0%} of {format_bytes(found.memory_bytes)}"
    rate, _, unit = throughput(found).removesuffix("/device").rpartition(" ")
    cards = [
        ("step", format_seconds(found.step_s), count_of(found.samples, "sample")),
        ("MFU", f"{found.mfu:.1%}", f"of {found.peak_source}"),
        ("bubble", f"{found.bubble_share:.1%}", "idle, of all ranks"),
        ("peak", format_bytes(found.peak_bytes), f"{peak}, rank {found.peak_rank}"),
        (unit, rate, "of a device"),
    ]
    return tag(
        "div",
        *(
            tag("div", tag("b", value), tag("span", name), tag("small", note))
            for name, value, note in cards
        ),
        class_="cards" if found.fits else "cards over",
    )


def _body(file: PlanFile) -> Iterator[Markup]:
    found = plan_facts(file, predicted=file.report is None)
    facts = [join(tag("dt", name), tag("dd", value)) for name, value in found]
    yield tag("section", tag("h2", "The plan"), tag("dl", *facts))
    if file.report is not None:
        yield from _costs(file.report)
    for section in plan_sections(file):
        yield section_of(section)


def _costs(report: Report) -> Iterator[Markup]:
    sections, source = report_sections(report), Markup()
    most = max((line.share for f in report.files for line in f.lines), default=0.0) or 1.0
    for name, section in sections.items():
        if name == "stages":
            yield tag("section", tag("h2", "Schedule"), schedule_picture(report))
        if name == "memory":
            yield _titled(section, memory_picture(report), _table(section))
        elif name.startswith("file "):
            if not source:
                source = tag("h2", "The source, line by line")
                yield source
            yield _source(section, report.files[int(name.removeprefix("file "))], most)
        else:
            yield section_of(section)


def _titled(section: Section, *inside: Markup, level: str = "h2") -> Markup:
    note = tag("p", section.note) if section.note else None
    return tag("section", tag(level, section.title), note, *inside)


def _table(section: Section) -> Markup:
    kinds = [
        "number" if is_number else "long" if any(_is_long(row[k]) for row in section.rows) else ""
        for k, is_number in enumerate(section.columns.values())
    ]
    head = tag("tr", *_cells("th", list(section.columns), kinds))
    rows = (tag("tr", *_cells("td", row, kinds)) for row in section.rows)
    return _scrolled(head, rows, "")


def _is_long(cell: str) -> bool:
    return max(map(len, cell.split("\n"))) > LONG


def _cells(name: str, row: Sequence[str], kinds: Iterable[str]) -> Iterator[Markup]:
    """Cells of these classes, by column: all of a column are broken into lines, or none."""
    for cell, kind in zip(row, kinds, strict=True):
        yield tag(name, *_lines(cell), class_=kind) if kind else tag(name, *_lines(cell))


def _lines(cell: str) -> Iterator[str]:
    for k, line in enumerate(cell.split("\n")):
        if k:
            yield void("br")
        yield line


def _source(section: Section, file: SourceFile, most: float) -> Markup:
    """The lines of a file, each as far underlaid as it takes time, `most` of all on the page."""
    rows, function = [], ""
    for line in file.lines:
        if line.share < LEAST_SHARE:
            continue
        if line.function != function:
            function = line.function
            rows.append(tag("tr", tag("th", function, colspan="4"), class_="function"))
        share = tag("td", f"{line.share:.1%}", class_="number")
        number = tag("td", str(line.number or ""), class_="number quiet")
        code = tag("td", tag("code", line.text or NO_LINE), class_="code",
                   style=f"--share:{line.share / most:.1%}")  # fmt: skip
        layouts = tag("td", *_lines("\n".join(line.layouts)), class_="quiet")
        rows.append(tag("tr", number, share, code, layouts))
    head = tag("tr", *_cells("th", ["line", "share", "source", "results (* is split)"],
                             ["number", "number", "", ""]))  # fmt: skip
    return _titled(section, _scrolled(head, rows, "source"), level="h3")


def _scrolled(head: Markup, rows: Iterable[Markup], of: str) -> Markup:
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_=of)
    return tag("div", table, class_="scroll")
