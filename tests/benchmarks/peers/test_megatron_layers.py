"""The layers on one rank, against those of transformers; on several, see `test_megatron_style`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.peers.megatron_layers import Part, TensorParallel, _VocabularyLoss
from benchmarks.ranks import run_ranks
from tests.benchmarks.peers.comparing import TINY

GROUP: Any = None  # of one rank, which no collective is asked of
ALONE = TensorParallel(GROUP, 0, 1)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_loss_and_gradients_are_those_of_the_model(recompute: str) -> None:
    plain, source, batch = TINY.model(), TINY.model(), TINY.batch(0)
    part = Part(source, range(2), ALONE, recompute, first=True, last=True)
    loss = part(batch["input_ids"], batch["labels"])
    loss.backward()
    wanted = plain(**batch).loss
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    torch.testing.assert_close(part.head.grad, gradients["lm_head.weight"])
    torch.testing.assert_close(part.words.grad, gradients["model.embed_tokens.weight"])
    packed = [gradients[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"]
    layer: Any = part.layers[1]
    torch.testing.assert_close(layer.attention.qkv.grad, torch.cat(packed))
    norm = gradients["model.layers.0.input_layernorm.weight"]
    torch.testing.assert_close(part.layers[0].norm_1.weight.grad, norm)


def _vocabulary_loss() -> tuple[torch.Tensor, torch.Tensor]:
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(8, (5,), generator=generator)
    own = logits.chunk(2, -1)[rank].clone().requires_grad_()
    loss = _VocabularyLoss.apply(own, labels, TensorParallel(group, rank, 2))
    loss.mean().backward()
    whole = logits.requires_grad_()
    wanted = torch.nn.functional.cross_entropy(whole, labels, reduction="none")
    wanted.mean().backward()
    assert own.grad is not None
    assert whole.grad is not None
    return loss.detach() - wanted.detach(), own.grad - whole.grad.chunk(2, -1)[rank]


def test_the_loss_needs_no_whole_logits() -> None:
    for errors in run_ranks(2, _vocabulary_loss):
        assert all(float(error.abs().max()) < 1e-12 for error in errors)
