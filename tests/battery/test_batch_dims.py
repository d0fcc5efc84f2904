"""Batches whose samples stand elsewhere than in dim 0 of everything train as in one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import merakc
from benchmarks.ranks import RankError, run_ranks
from merakc.batches.dims import parse_batch_dims
from merakc.batches.split import split_batch
from merakc.equality.casts import lifted_casts
from merakc.errors import ConfigError, MerakError, RecordError
from merakc.frontend.record import record
from merakc.machines.cluster import NOMINAL_CPU
from tests.batch_models import CASES, DIMS, SAMPLES, Boxes, boxes, illustrated, made, reference

Found = tuple[float, dict[str, torch.Tensor], dict[str, Any]]


def trained(name: str, options: dict[str, Any]) -> Found:
    """The loss of a step, the gradients, and where the plan takes the samples to stand."""
    batch = CASES[name][1]
    dims, dp = DIMS.get(name, {}), options.get("dp", 1)
    if dp > 1:
        own = dist.get_rank() % dp if options.get("pp", 1) == 1 else 0
        batch = split_batch((), batch, dp, parse_batch_dims(dims))[own][1]
    model = merakc.auto_parallel(made(name), batch, cluster=NOMINAL_CPU, **options)
    loss = model(**batch)
    loss.backward()
    return loss.item(), model.full_gradients(), dict(model.plan.batch_dims)


def check(names: Iterable[str], options: dict[str, Any]) -> None:
    """All of these on one pair of ranks."""
    names = [*names]
    ranks = run_ranks(2, lambda: [trained(name, options) for name in names])
    for name, *found in zip(names, *ranks, strict=True):
        loss, gradients = reference(name)
        for own, parts, dims in found:
            assert own == pytest.approx(loss, rel=1e-10), name
            assert dims == parse_batch_dims(DIMS.get(name)), name
            if parts:
                torch.testing.assert_close(parts, gradients, rtol=1e-10, atol=1e-12)


def test_micro_batches_of_a_pipeline() -> None:
    check(CASES, {"pp": 2, "micro_batches": 4})


def test_data_parallel_ranks() -> None:
    check(["time first", "two images a text, by a mask"], {"dp": 2, "micro_batches": 2})


@pytest.mark.parametrize("given", [{"x": 1}, {"x*": 1, "y": 0}], ids=str)
def test_places_that_are_given_are_kept_in_the_plan(given: dict[str, Any]) -> None:
    """So that a later batch of other sizes is read alike, where they would say other things."""
    batch = CASES["time first"][1]
    model = merakc.auto_parallel(
        made("time first"), batch, batch_dims=given, micro_batches=2, cluster=NOMINAL_CPU
    )
    assert model.plan.batch_dims == parse_batch_dims(given)
    later = {"x": batch["x"][:, :4].repeat(2, 1, 1)[:4], "y": batch["y"][:4]}
    plain = made("time first")
    expected = plain(**later)
    assert model(**later).item() == pytest.approx(expected.item(), rel=1e-10)
    again = merakc.auto_parallel(made("time first"), batch, plan=model.plan, cluster=NOMINAL_CPU)
    assert again(**batch).item() == pytest.approx(plain(**batch).item(), rel=1e-10)
    with pytest.raises(ConfigError, match=r"batch_dims=\{'x': 0\} contradicts the plan's"):
        merakc.auto_parallel(made("time first"), batch, plan=model.plan, batch_dims={"x": 0})


def test_samples_that_take_the_images_of_others() -> None:
    """torch would put them there without a word."""
    name = "two images a text, by a mask"
    batch = CASES[name][1]
    model = merakc.auto_parallel(made(name), batch, micro_batches=4, cluster=NOMINAL_CPU)
    ids = illustrated()
    ids[0], ids[-1] = illustrated(1)[0], illustrated(3)[-1]
    with pytest.raises(MerakError, match=r"batch_models\.py:\d+"):
        model(**batch | {"ids": ids})


def test_lists_with_a_tensor_for_each_sample() -> None:
    """Samples that are gone through one by one: there is a form that takes all at once."""
    batch = boxes()
    model = Boxes().double()
    expected = model(**batch).item()
    with pytest.raises(RecordError, match=r"(?s)samples.*batch_dims=\{'x': 0, 'boxes.0': None"):
        merakc.auto_parallel(model, batch, micro_batches=4, cluster=NOMINAL_CPU)
    alone = merakc.auto_parallel(model, batch, micro_batches=1, cluster=NOMINAL_CPU)
    assert alone(**batch).item() == pytest.approx(expected, rel=1e-10)


def differing(name: str) -> None:
    """Of what is taken to be the same for all, each rank has its own."""
    batch = dict(CASES[name][1])
    batch["w"] = batch["w"] + dist.get_rank()
    model = merakc.auto_parallel(made(name), batch, dp=2, micro_batches=2, cluster=NOMINAL_CPU)
    model(**batch)


def test_what_is_the_same_for_all_is_compared() -> None:
    with pytest.raises(RankError) as found:
        run_ranks(2, differing, "one vector for all")
    assert "tensor 'w' of the batch, of shape [4]" in str(found.value.__cause__)
    assert "batch_dims={'w': (0, None)}" in str(found.value.__cause__)


def llava() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small one, with two images for each of 8 texts."""
    import transformers

    text = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=31, vision_feature_layer=-1
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).double()
    ids = torch.randint(1, 30, (SAMPLES, 14))
    for k in range(SAMPLES):
        ids[k, k % 3 : k % 3 + 4] = ids[k, 8:12] = 31
    images = torch.randn(2 * SAMPLES, 3, 8, 8, dtype=torch.float64)
    return model, {"pixel_values": images, "input_ids": ids, "labels": ids}


def trained_llava() -> Found:
    model, batch = llava()
    with lifted_casts():
        parallel = merakc.auto_parallel(model, batch, pp=2, micro_batches=4, cluster=NOMINAL_CPU)
    loss = parallel(**batch).loss
    loss.backward()
    return loss.item(), parallel.full_gradients(), dict(parallel.plan.batch_dims)


def test_llava_with_two_images_a_text() -> None:
    model, batch = llava()
    with lifted_casts():
        loss = model(**batch).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found, parts, dims = run_ranks(2, trained_llava)[0]
    assert found == pytest.approx(loss.item(), rel=1e-10)
    torch.testing.assert_close({n: parts[n] for n in gradients}, gradients, rtol=1e-10, atol=1e-12)
    assert dims == parse_batch_dims({"pixel_values": (0, None), "input_ids": 0, "labels": 0})


def test_the_usual_batch_is_recorded_no_more_than_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part and the whole: other readings are looked at where the first does not hold."""
    seen: list[int] = []

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(1)
        return record(*args, **options)

    monkeypatch.setattr("merakc.lowering.forwards.record", noted)
    batch = CASES["one vector for all"][1]
    model = made("one vector for all")
    merakc.auto_parallel(model, batch, micro_batches=4, cluster=NOMINAL_CPU)
    assert len(seen) == 2
