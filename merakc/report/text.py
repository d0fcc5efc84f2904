"""A plan as text: what it decides and, where it was made with a report, what it should cost."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from merakc.ir.plan_file import PlanFile
from merakc.ir.report import Report
from merakc.report.charts.chart import memory_chart, schedule_chart
from merakc.report.decisions import Section, plan_facts, plan_sections
from merakc.report.findings import report_sections
from merakc.report.tables import Fitted


def plan_table(file: PlanFile) -> Group:
    """The decisions of a plan for `rich` to print: a panel, then a table for each kind.

    Parameter names appear as patterns in which `*` stands for a layer's index.
    """
    return Group(_header(file), *map(_table, plan_sections(file)))


def report_table(report: Report, width: int = 100) -> Group:
    """What a plan should cost for `rich` to print: tables, and two charts of at most `width`."""
    parts: list[RenderableType] = []
    for name, section in report_sections(report).items():
        parts.append(_table(section))
        if name == "memory":
            parts.append(_chart("Memory at the peak", memory_chart(report, width)))
        if name == "ranks":
            parts.append(_chart("Schedule", schedule_chart(report, width)))
    return Group(*parts)


def _chart(title: str, lines: list[str]) -> Group:
    return Group(Text(title, style="bold"), Text("\n".join(["", *lines, ""]), no_wrap=True))


def _table(section: Section) -> Group:
    """A titled table of plain cells."""
    title = Text(section.title, style="bold")  # a table's own title is folded to its width
    note = [Text(section.note, style="dim")] if section.note else []
    return Group(title, *note, Fitted(section.columns, section.rows))


def _header(file: PlanFile) -> Panel:
    grid = Table.grid(padding=(0, 2))
    for name, value in plan_facts(file, predicted=file.report is None):
        grid.add_row(Text(name, style="dim"), Text(value))
    return Panel(grid, title=Text(file.decisions.model), title_align="left", expand=False)
