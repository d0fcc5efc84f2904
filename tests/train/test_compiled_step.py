from __future__ import annotations

import torch

import merakc
from benchmarks.models import MODELS
from merakc.ir.graph import InputKind
from merakc.train.compiled_step import CompiledStep


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
    assert step.loss_dtype == torch.float32  # transformers casts the logits
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
