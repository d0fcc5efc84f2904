"""What was found on a machine's GPUs, as one page and as JSON; what failed comes first."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from merakc.gpu_check.checks import Found
from merakc.report.charts.markup import Markup, tag
from merakc.report.decisions import Section
from merakc.report.page import document, section_of
from merakc.report.units import format_bytes, format_count, format_seconds
from merakc.version import __version__

TITLES = {"kernels": "Kernels", "equality": "Equality with one process, eager", "speed": "Speed"}


def machine() -> dict[str, str]:
    """What this was found on."""
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return {
        "merakc": __version__, "torch": torch.__version__, "CUDA": str(torch.version.cuda),
        "Python": platform.python_version(), "GPUs": ", ".join(gpus) or "none",
    }  # fmt: skip


def as_json(found: Sequence[Found], where: dict[str, str]) -> str:
    """All of it."""
    return json.dumps({"machine": where, "checks": [asdict(f) for f in found]}, indent=1)


def in_order(found: Sequence[Found]) -> list[Found]:
    """What failed first, then by room."""
    return sorted(found, key=lambda f: (f.ok, [*TITLES].index(f.room)))


def page(found: Sequence[Found], where: dict[str, str]) -> str:
    """The page's text."""
    bad = sum(not f.ok for f in found)
    first = f"{len(found) - bad} of {len(found)} checks passed"
    facts = tag("p", ", ".join(f"{name} {value}" for name, value in where.items()))
    return document(first, [facts], _sections(found), f"merakc {__version__}. Measured here.")


def _sections(found: Sequence[Found]) -> Iterator[Markup]:
    bad = [f for f in found if not f.ok]
    if bad:
        ends = [(f.name, f.text, "\n".join(_tail(f))) for f in bad]
        yield section_of(
            Section("What failed", dict.fromkeys(("check", "how", "end"), False), ends)
        )
    for room, title in TITLES.items():
        own = [f for f in found if f.room == room]
        if room == "speed" and own:
            yield section_of(speeds(own))
        elif own:
            rows = [
                ("passed" if f.ok else "failed", f.name, f.text, f"{f.seconds:.0f}") for f in own
            ]
            columns = {"": False, "check": False, "found": False, "seconds": True}
            yield section_of(Section(title, columns, rows))


def _tail(found: Found) -> list[str]:
    text = found.figures.get("traceback") or found.figures.get("log") or ""
    lines = [*found.figures.get("wrong", ()), *text.splitlines()[-12:]]
    return [str(line)[:160] for line in lines[:20]]


def speeds(found: Sequence[Found]) -> Section:
    """Steps of one model, beside each other."""
    steps = {f.name: f.figures for f in found if "step_s" in f.figures}
    eager_s = steps.get("eager", {}).get("step_s")
    rows = [_speed_row(name, of, eager_s) for name, of in steps.items()]
    names = ("", "step", "of eager", "tokens/s", "before the optimizer", "predicted", "peak",
             "predicted peak", "kernels", "GPU idle", "first step after")  # fmt: skip
    one = next(iter(steps.values()), {})
    note = (
        f"Llama of {format_count(one['parameters'])} parameters, bfloat16, {one['samples']} x "
        f"{one['length']} tokens, fused AdamW; medians." if one else ""
    )  # fmt: skip
    return Section(TITLES["speed"], {n: bool(n) for n in names}, rows, note)


def _speed_row(name: str, of: dict[str, Any], eager_s: float | None) -> tuple[str, ...]:
    def told(key: str, form: Any = format_seconds) -> str:
        return form(of[key]) if of.get(key) else ""

    times = f"{eager_s / of['step_s']:.2f} x" if eager_s else ""
    return (
        name, told("step_s"), times, told("tokens_per_s", lambda x: f"{x:,.0f}"), told("pass_s"),
        told("predicted_s"), told("peak_bytes", format_bytes),
        told("predicted_bytes", format_bytes), told("kernels", str), told("idle_s"),
        told("ready_s"),
    )  # fmt: skip
