"""Ledgers that ranks write, beside what is known of their steps."""

from __future__ import annotations

import gc
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.errors import LedgerError, MerakWarning
from merakc.ir.ledger import Ledger, read_ledger
from merakc.ir.plan_file import load_plan
from merakc.machines.cluster import NOMINAL_CPU, Factors
from merakc.train.expectations.bookkeeping import COUNTED_STEP, _Optimizers, modelled
from merakc.train.model import ParallelModel
from tests.battery.small_models import Words, parallel, part, warm_up, words

STEPS = 3
TP, PP = {"tp": 2, "pp": 1}, {"pp": 2, "tp": 1}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def trained(path: Path, options: dict[str, Any], save: Path | None = None) -> ParallelModel:
    """The model after some steps, the evaluation of a batch among them."""
    options = {"dp": 1, "micro_batches": 2, "ledger": path, **options}
    model = parallel(Words, words(0), **options)
    if save is not None and model.rank == 0:
        model.plan_file.save(save)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**part(words(step), model))["loss"].backward()
        optimizer.step()
        if step == 1:
            model.predict(**part(words(step), model))
    return model


def run(path: Path, options: dict[str, Any], save: Path | None = None) -> tuple[int, ...]:
    prediction = trained(path, options, save).plan_file.prediction
    assert prediction is not None
    return prediction.peak_bytes


def ledger_of(folder: Path, options: dict[str, Any], ranks: int = 2) -> tuple[Ledger, Any]:
    path, save = folder / "run.jsonl", folder / "plan.json"
    peaks = run_ranks(ranks, run, path, options, save)
    return read_ledger(path), peaks[0]


def test_a_pipeline_tells_of_both_ranks_and_its_plan_file_is_its_plan(tmp_path: Path) -> None:
    found, peak_bytes = ledger_of(tmp_path, {**PP, "schedule": "zb-h1"})
    header = found.header
    assert header.plan == load_plan(tmp_path / "plan.json").hash
    assert (header.degrees, header.micro_batches) == ({"dp": 1, "tp": 1, "pp": 2}, 2)
    assert header.origin == "modelled"
    assert header.prediction.peak_bytes == peak_bytes
    assert [m.stage for m in header.modelled] == [0, 1]
    assert header.optimizer_s > 0
    assert [step.step for step in found.steps] == list(range(STEPS))
    expected = {(own.stage, own.kind, own.count) for own in header.expected}
    for step in found.steps:
        kinds = {(own.stage, own.kind, own.count) for own in step.spent}
        assert kinds == expected
        assert {(0, "I", 2), (0, "W", 2), (1, "F", 2)} <= kinds
        assert {(0, "recv"), (1, "recv")} <= {(own.stage, own.kind) for own in step.spent}
        assert all(0 <= own.waited_s <= own.seconds <= own.most_s for own in step.spent)
        assert max(own.seconds for own in step.spent) <= step.step_s
        assert (step.optimizer_s is None) == (step.step == 0)
        assert step.counted == (step.step == COUNTED_STEP) == bool(step.peak_bytes)
    measured = found.steps[COUNTED_STEP].peak_bytes
    for ours, counted in zip(header.prediction.peak_bytes, measured, strict=True):
        assert counted == pytest.approx(ours, rel=0.3)  # so small, messages on the way count
    _goes_by_the_plan_file(tmp_path)


def _goes_by_the_plan_file(folder: Path) -> None:
    plan, given = load_plan(folder / "plan.json"), folder / "given.json"
    plan.save(given)
    again, _ = ledger_of(folder, {"plan": given})
    assert again.header.plan == plan.hash


def test_tp_tells_what_is_waited_for_inside_of_graphs(tmp_path: Path) -> None:
    found, _ = ledger_of(tmp_path, TP)
    forward = next(own for own in found.steps[-1].spent if own.kind == "F")
    assert 0 < forward.waited_s < forward.seconds
    assert forward.seconds < forward.most_s  # two ranks are never equally fast
    assert found.header.modelled[0].wire_s > 0
    assert any(own.waited_s > 0 for own in found.header.expected)


def test_dp_tells_what_is_waited_for_over_dp(tmp_path: Path) -> None:
    found, _ = ledger_of(tmp_path, {"dp": 2, "tp": 1, "pp": 1, "micro_batches": 1})
    assert all(len(step.exposed_s) == 1 for step in found.steps)
    assert max(step.exposed_s[0] for step in found.steps) > 0


def test_one_process_keeps_a_ledger_too(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(path, {})
    assert len(read_ledger(path).steps) == STEPS
    assert json.loads(path.read_text().splitlines()[1])["step"] == 0


def test_without_a_ledger_nothing_is_recorded() -> None:
    model = parallel(Words, words(0))
    model(**words(0))["loss"].backward()
    assert model._own("_book") is None
    assert not model._own("_steps").recording


def test_a_run_goes_on_where_its_ledger_cannot(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = parallel(Words, words(0), ledger=path)
    path.unlink()
    path.mkdir()
    with pytest.warns(MerakWarning, match="the ledger ends here"):
        model(**words(0))["loss"].backward()
    model(**words(0))["loss"].backward()  # said once


def test_optimizers_of_others_are_not_timed() -> None:
    mine, other = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    timed = _Optimizers([mine], torch.device("cpu"))
    for tensor in (mine, other):
        tensor.grad = torch.ones(2)
    torch.optim.SGD([other], 0.1).step()
    assert math.isnan(timed.take_s())
    assert not list(timed.state())
    own = torch.optim.Adam([mine])
    own.step()
    first_s = timed.take_s()
    assert first_s > 0
    assert math.isnan(timed.take_s())
    assert sum(t.numel() for t in timed.state() if t.ndim) == 4
    own.step()
    own.step()
    assert timed.take_s() > 0


def test_hooks_keep_no_model_alive() -> None:
    timed = _Optimizers([torch.zeros(2, requires_grad=True)], torch.device("cpu"))
    gone = weakref.ref(timed)
    del timed
    gc.collect()
    assert gone() is None
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], 0.1).step()


def test_what_formulas_say_of_each_stage_and_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    def of_rank() -> tuple[list[tuple[float, float, float]], str]:
        planned = parallel(Words, words(0), **PP, dp=1)._own("_steps").planned
        assert dist.get_world_size() == 2
        found = modelled(planned, NOMINAL_CPU)
        slow = replace(NOMINAL_CPU.described(2), factors=Factors(forward=3.0))
        corrected = modelled(planned, slow.flat("float32"))
        assert corrected[0].forward_s == pytest.approx(3 * found[0].forward_s)
        assert corrected[0].backward_s == pytest.approx(found[0].backward_s)
        with pytest.raises(LedgerError) as caught:
            run(tmp_path / "no" / "run.jsonl", PP)
        return [(m.forward_s, m.backward_s, m.wire_s) for m in found], str(caught.value)

    (one, told), (other, told_too) = run_ranks(2, of_rank)
    assert one == other
    assert all(0 < forward_s < backward_s and wire_s == 0 for forward_s, backward_s, wire_s in one)
    for text in (told, told_too):  # an error of all ranks
        assert "give another path" in text
