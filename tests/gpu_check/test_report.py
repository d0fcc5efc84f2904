"""The report of a machine's GPUs: what failed first, on a page and as JSON."""

from __future__ import annotations

import json

from merakc.gpu_check.checks import Found
from merakc.gpu_check.report import as_json, in_order, machine, page, speeds
from tests.report.test_page import Reader

EAGER = {"step_s": 0.2, "pass_s": 0.19, "tokens_per_s": 4e4, "peak_bytes": 2**34, "kernels": 1472,
         "idle_s": 0.04, "ready_s": 0.8, "parameters": 1_235_814_400, "samples": 2,
         "length": 4096}  # fmt: skip
OURS = {**EAGER, "step_s": 0.16, "predicted_s": 0.15, "predicted_bytes": 2**33}
FOUND = [
    Found("speed", "eager", ok=True, text="200.0 ms a step", figures=EAGER),
    Found("speed", "merakc", ok=True, text="160.0 ms a step", figures=OURS),
    Found("equality", "llama", ok=True, text="1e-15 of loss"),
    Found("kernels", "attention", ok=False, text="<b> is wrong", figures={"wrong": ["<b>", "c"]}),
]


def test_what_failed_comes_first() -> None:
    assert [f.name for f in in_order(FOUND)] == ["attention", "llama", "eager", "merakc"]


def test_a_page_stands_alone() -> None:
    reader = Reader()
    text = page(FOUND, machine())
    reader.feed(text)
    assert not reader.open
    assert "3 of 4 checks passed" in reader.text
    assert text.index("What failed") < text.index("Equality with one process")
    assert "&lt;b&gt; is wrong" in text


def test_steps_stand_beside_each_other() -> None:
    section = speeds(FOUND)
    rows = {row[0]: row for row in section.rows}
    assert rows["merakc"][2] == "1.25 x"
    assert rows["merakc"][5] == "150.00 ms"
    assert rows["eager"][5] == ""
    assert "1.24" in section.note


def test_json_has_all() -> None:
    told = json.loads(as_json(FOUND, machine()))
    assert told["machine"].keys() == {"merakc", "torch", "CUDA", "Python", "GPUs"}
    assert len(told["checks"]) == len(FOUND)
