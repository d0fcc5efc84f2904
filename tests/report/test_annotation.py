"""Lines of the user's source, and what they became."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import models
from merakc.lowering.predict import planned_costs
from merakc.report.annotation import short_path, short_source, source_files, top_nodes
from merakc.report.attribution import Attribution, attribute
from tests import small_source
from tests.report.made import SLOW, lowered


@pytest.fixture(scope="module")
def found() -> Attribution:
    return attribute(lowered(), SLOW, planned_costs(lowered(), SLOW))


def test_shares_of_all_lines_are_one(found: Attribution) -> None:
    files = source_files(found)
    assert sum(line.share for f in files for line in f.lines) == pytest.approx(1.0)
    assert sum(line.count for f in files for line in f.lines) == sum(found.counts.values())


def test_shares_of_all_nodes_are_one_and_fall(found: Attribution) -> None:
    nodes = top_nodes(found, len(found.counts))
    assert sum(n.share for n in nodes) == pytest.approx(1.0)
    assert [n.share for n in nodes] == sorted((n.share for n in nodes), reverse=True)
    assert top_nodes(found, 3) == nodes[:3]


def test_lines_are_shown_as_they_are_written(found: Attribution) -> None:
    files = {f.path: f for f in source_files(found)}
    gpt2 = files["transformers/models/gpt2/modeling_gpt2.py"]
    residual = [x for x in gpt2.lines if x.text == "hidden_states = attn_output + residual"]
    assert [x.function for x in residual] == ["GPT2Block.forward"]
    assert all(x.layouts and x.number for x in gpt2.lines)


def test_paths_are_what_an_import_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert short_path(str(small_source.__file__)) == "tests/small_source.py"
    assert short_source(f"{models.__file__}:12") == "benchmarks/models.py:12"
    outside = tmp_path / "deep" / "model.py"
    assert short_path(str(outside)) == str(outside)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(tmp_path / "deep")])
    assert short_path(str(outside)) == "model.py"
    assert short_source("") == ""
