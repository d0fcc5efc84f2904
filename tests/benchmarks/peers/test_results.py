from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.plans import TORCHS
from benchmarks.peers.results import (
    Result,
    complaints,
    document,
    failures,
    plot,
    reason,
    summary,
    verdict,
)
from benchmarks.peers.rounds import Entry, Row
from benchmarks.peers.training import Training

FAILURE = """rank 1 of torch_tracer ended:
  File "/some/where/site-packages/torch/x.py", line 3, in f
ValueError: no such /some/where/x.py
Exception ignored in: y"""


def row(label: str, step_s: float, *, alone: bool = False, **fields: Any) -> Row:
    made = Row("loopback", Entry(label, "form", label, alone), steps_s=(step_s, step_s * 1.2))
    return replace(
        made, **{"error": 1e-5, "gradient_error": 1e-6, "peaks_bytes": (2**20,)} | fields
    )


def result(*rows: Row) -> Result:
    return Result("pp2", "loopback", Training(), rows, (3,) * len(rows))


OWN, PEER = row("merakc", 1.0), row("other", 1.5)


def test_a_peer_that_is_wrong_is_not_compared_with() -> None:
    wrong = row("wrong", 0.5, gradient_error=0.5)
    found = result(OWN, PEER, wrong, row("one process", 0.1, alone=True))
    assert complaints([found]) == []
    assert summary([found]) == {"pp2, loopback": 1.5}
    assert verdict(found).startswith("other takes 1.50 (1.50 to 1.50) of the time of merakc")
    assert verdict(result(OWN, wrong)) == "no peer is right"
    alike = result(OWN, row(TORCHS, 1.2), PEER)
    assert verdict(alike).endswith("; 1.25 of the time of merakc, torch's products")


def test_complains_where_merakc_is_behind_or_wrong() -> None:
    assert "takes 0.90" in complaints([result(OWN, row("other", 0.9))])[0]
    assert complaints([result(OWN, row("other", 0.985))]) == []
    # A form of merakc's that is faster than the first counts.
    assert complaints([result(OWN, row("merakc, overlap=2", 0.8), row("other", 0.9))]) == []
    bad = replace(OWN, error=float("nan"))
    assert "are not those of one process" in complaints([result(bad, PEER)])[0]
    assert verdict(result(bad, PEER)) == "merakc is not right"
    gone = replace(OWN, steps_s=(), failure=FAILURE)
    assert complaints([result(gone)]) == ["pp2, loopback: merakc: ValueError: no such x.py"]


def test_failures_are_told_without_folders() -> None:
    assert reason(FAILURE) == "ValueError: no such x.py"
    wrapped = "a.b.FirstError: the cause\n\nRuntimeError:\n stage 0 failed\n args: 3"
    assert reason(wrapped) == "FirstError: the cause"
    assert reason("nothing said") == "nothing said"
    of_rank = "[rank0]: RuntimeError: \n[rank0]:     stage 0 failed\n[rank0]:    \n"
    assert reason(of_rank) == "stage 0 failed"
    assert len(reason("E" * 1000)) == 200
    gone = replace(PEER, steps_s=(), failure=FAILURE)
    assert failures([result(OWN, gone), result(OWN, gone)]) == [
        "pp2, other: ValueError: no such x.py"
    ]


def test_the_page_holds_the_figures() -> None:
    wrong = row("wrong", 0.5, gradient_error=0.5)
    gone = replace(PEER, steps_s=(), failure=FAILURE)
    page = document([result(OWN, PEER, wrong, replace(gone))], ["a note"], "about")
    assert "| merakc | 1100 ms | 931 |  | 1 MiB | 3 | 1e-06 | 1e-05 |" in page
    assert "| other | 1650 ms | 621 | 1.50 (1.50 to 1.50) | 1 MiB | 3 | 1e-06 | 1e-05 |" in page
    assert "| wrong, 5e-01 |" in page
    assert "| other | missing |" in page
    assert "- a note\n" in page
    assert "merakc is behind\n\nNone." in page
    assert "](" not in page
    assert "](steps.png)\n\n## pp2" in document([result(OWN, PEER)], [], "about", "steps.png")


def test_draws(tmp_path: Path) -> None:
    plot(tmp_path / "steps.png", [result(OWN, PEER), result(OWN)])
    assert (tmp_path / "steps.png").stat().st_size > 1000
