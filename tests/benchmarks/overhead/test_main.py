from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.overhead import __main__ as overhead
from benchmarks.overhead.__main__ import (
    LARGER,
    SMALL,
    Extent,
    Found,
    complaints,
    crowds_table,
    document,
    draw,
    growth_table,
    measure,
)
from benchmarks.overhead.runs import Crowd, Duel, First
from benchmarks.overlap_steps import Size

GOOD = Duel("gpt2", SMALL, 1, (0.1, 0.2, 0.1), (0.08, 0.16, 0.09), 1e-6, 0.01)
LARGE = replace(GOOD, size=LARGER[0], ours_s=(0.1, 0.19, 0.1))
CROWDS = [Crowd(1, 0.5, 32), Crowd(4, 0.6, 224)]
FIRSTS = [First(False, 1.0, 0.5, 3.0, 0.5), First(True, 1.0, 0.5, 2.0, 0.5)]
FOUND = Found([GOOD, LARGE], [LARGE], [GOOD], [GOOD], [GOOD], CROWDS, FIRSTS)


def test_nothing_is_complained_of_where_all_is_met() -> None:
    assert GOOD.ratio == pytest.approx(0.8)
    assert complaints(FOUND) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (replace(FOUND, eager=[replace(GOOD, ours_s=(0.1, 0.2, 0.1))]), "at most 0.9"),
        (replace(FOUND, eager=[replace(LARGE, ours_s=(0.11, 0.22, 0.11))]), "at most 1"),
        (replace(FOUND, compiled=[replace(GOOD, ours_s=(0.2,) * 3)]), "torch.compile's"),
        (replace(FOUND, watched=[replace(GOOD, ours_s=(0.2,) * 3)]), "looks for nothing"),
        (replace(FOUND, layers=[replace(GOOD, error=float("nan"))]), "differ by nan"),
        (replace(FOUND, firsts=[replace(FIRSTS[0], plan_s=9.6)]), "without a plan: 10.1 s"),
        (replace(FOUND, firsts=[replace(FIRSTS[1], plan_s=2.6)]), "with a plan: 3.1 s"),
    ],
)
def test_what_falls_short_is_named(found: Found, words: str) -> None:
    (line,) = complaints(found)
    assert words in line


def test_the_tables_say_what_one_more_costs() -> None:
    assert "| 1.000 ms | 0.900 ms |" in growth_table([GOOD], "layers", lambda d: d.size.layers)
    # 0.1 s more for 192 actions more
    assert crowds_table(CROWDS).splitlines()[-1] == "| 4 | 224 | 600 ms | 521 µs |"


def test_the_page_and_its_picture(tmp_path: Path) -> None:
    page = document(FOUND, Extent(), "`the command`")
    assert "All is met." in page
    assert (
        "| gpt2, 100 layers of 64 | 128 | 100.0 ms | 90.0 ms | 0.80 | 0.80 to 0.90 | 1e-06 |"
        in page
    )
    assert "{" not in page
    missed = replace(FOUND, firsts=[replace(FIRSTS[0], plan_s=20)])
    assert "- first step without a plan" in document(missed, Extent(), "")
    draw(FOUND, tmp_path / "overhead.png")
    assert (tmp_path / "overhead.png").read_bytes().startswith(b"\x89PNG")


def test_everything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Size, dict[str, object]]] = []

    def duel(model: str, size: Size, **options: object) -> Duel:
        asked.append((model, size, options))
        return replace(GOOD, model=model, size=size)

    monkeypatch.setattr(overhead, "duel", duel)
    monkeypatch.setattr(overhead, "crowd", lambda size, ranks, m, steps: Crowd(ranks, 1, 2))
    monkeypatch.setattr(overhead, "first", lambda model, size, plan: FIRSTS[plan is not None])
    told: list[str] = []
    extent = Extent(layers=(4, 8), micro_batches=(1, 2), ranks=(1, 2))
    found = measure(extent, told.append)
    assert [d.size.layers for d in found.layers] == [4, 8]
    assert [options.get("micro_batches") for *_, options in asked].count(2) == 1
    rivals = [options.get("rival") for *_, options in asked]
    assert rivals.count("torch.compile") == len(found.compiled) == 2
    assert rivals.count("unwatched") == len(found.watched) == 1 + len(extent.larger)
    assert [c.ranks for c in found.crowds] == [1, 2]
    assert [f.cached for f in found.firsts] == [False, True]
    assert len(found.eager) == 2 * (1 + len(extent.larger))
    assert "2 ranks" in told
