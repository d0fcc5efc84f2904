"""A small GPT-2's steps with Muon and AdamW."""

from __future__ import annotations

import pytest

from benchmarks.whole_updates import LAYOUTS, Row, gpt2, measured, optimizers, table


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_has_the_steps_of_both(name: str) -> None:
    row = measured(name, (2, 64), 4, 2)
    assert row.layout == name
    assert len(row.adamw_s) == len(row.muon_s) == 2
    assert min(*row.adamw_s, *row.muon_s, *row.adamw_cpu_s, *row.muon_cpu_s) > 0


def test_a_ratio_is_of_medians() -> None:
    row = Row("tp 2", (1.0, 2.0, 9.0), (4.0, 4.0, 1.0), (3.0, 3.0, 1.0), (5.0, 4.0, 1.0))
    assert row.ratio == 0.5
    assert table([row])[1] == ("tp 2", "2.00", "4.00", "0.50", "0.75")


def test_muon_has_the_matrices_of_the_blocks() -> None:
    model = gpt2(2, 64)
    muon, adamw = optimizers(model, "muon")
    assert len(muon.param_groups[0]["params"]) == 8
    own = [*muon.param_groups[0]["params"], *adamw.param_groups[0]["params"]]
    assert {id(p) for p in own} == {id(p) for p in model.parameters()}
