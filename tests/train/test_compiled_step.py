from __future__ import annotations

import gc
import math

import pytest
import torch

import merakc
from benchmarks.models import MODELS
from merakc.ir.graph import InputKind, Node
from merakc.train.compiled_step import CompiledStep
from tests.battery.small_models import Words, parallel, words


def compiled(name: str) -> CompiledStep:
    case = MODELS[name]
    batch = case.batch(4, torch.float64)
    model = merakc.auto_parallel(case.model(torch.float64), batch, micro_batches=2)
    model(**batch)
    (step,) = model._own("_steps").compiled.values()
    assert isinstance(step, CompiledStep)
    return step


def test_what_a_run_asks_of_it() -> None:
    step = compiled("gpt2")
    assert step.has_loss
    assert step.loss_spec is not None
    assert step.loss_spec.dtype == torch.float32  # transformers casts the logits
    brought = {i.target for i in step.brought[InputKind.BATCH]}
    assert brought >= {"input_ids", "labels", "known.cross_entropy_loss.count"}
    assert step.knowledge is not None
    assert not step.brought[InputKind.SCALAR]  # nothing is drawn
    assert step.written == frozenset()
    assert "transformer.wte.weight" in step.trained


def test_the_buffers_that_are_written() -> None:
    written = compiled("resnet").written
    assert written
    assert all("running" in name or "num_batches" in name for name in written)


@pytest.mark.filterwarnings("ignore:merakc has compiled this model for 8")
def test_a_step_for_another_shape_keeps_no_stage_and_can_be_looked_into() -> None:
    model = parallel(lambda: Words(), words(0), micro_batches=2)
    for length in (5, 7, 8, 9, 11):
        model(**words(1, 8, length))["loss"].backward()
    gc.collect()
    before = sum(type(x) is Node for x in gc.get_objects())
    for length in range(12, 18):
        model(**words(1, 8, length))["loss"].backward()
    gc.collect()
    grown = sum(type(x) is Node for x in gc.get_objects()) - before
    assert grown < 6 * 8  # of what is known before the step, a few; the graphs have a hundred
    _, *steps = model._own("_steps").compiled.values()  # the first is that of the plan
    assert len(steps) == 11
    stages = [s.executor.stages[0] for s in steps]
    kept = [[(p.keys, p.returned, p.routes) for p in s.pieces.values()] for s in stages]
    assert len({tuple(id(x) for own in pieces for x in own) for pieces in kept}) == 1
    assert len({id(s.targets) for s in stages}) == 1
    with torch.no_grad():
        model.embedding.weight.fill_(math.inf)
    assert "embedding" in str(model.find_nonfinite(**words(1, 8, 12)))
