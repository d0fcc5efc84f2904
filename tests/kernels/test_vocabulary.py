"""A vocabulary split over forked gloo ranks, unevenly, against the full one in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.ranks import run_ranks
from merakc.kernels.vocabulary import vocab_parallel_cross_entropy, vocab_parallel_embedding
from tests.kernels.bound import bind

VOCAB, HIDDEN, TOKENS = 11, 3, 6
STARTS = (0, 4, 9, VOCAB)  # of three ranks
REDUCTIONS = ("none", "mean", "sum")  # in aten's order


def _bind(axis: str = "tp") -> slice:
    """Binds the axis and returns this rank's rows of the table."""
    rank = bind(axis)
    return slice(STARTS[rank], STARTS[rank + 1])


def _random(*shape: int) -> Tensor:
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return values.requires_grad_()


IDS = torch.tensor([[0, 3, 4], [8, 9, 10], [4, 4, 0]])


def _embed(padding_idx: int) -> tuple[Tensor, Tensor]:
    rows = _bind()
    weight = _random(VOCAB, HIDDEN).detach()[rows].clone().requires_grad_()
    out = vocab_parallel_embedding(weight, IDS, rows.start, padding_idx)
    (grad,) = torch.autograd.grad((out * _random(3, 3, HIDDEN).detach()).sum(), weight)
    return out.detach(), grad


@pytest.mark.parametrize("padding_idx", [-1, 0, 4, 10])
def test_embedding_equals_full_table(padding_idx: int) -> None:
    weight = _random(VOCAB, HIDDEN)
    expected = F.embedding(IDS, weight, padding_idx=None if padding_idx < 0 else padding_idx)
    (grad,) = torch.autograd.grad((expected * _random(3, 3, HIDDEN).detach()).sum(), weight)
    for rank, (out, local_grad) in enumerate(run_ranks(3, _embed, padding_idx)):
        assert torch.equal(out, expected.detach())
        assert torch.equal(local_grad, grad[STARTS[rank] : STARTS[rank + 1]])


def _targets(ignore_index: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, ignore_index, 4, 10, 3, ignore_index], dtype=dtype)


def _loss(
    logits: Tensor, target: Tensor, reduction: int, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    columns = _bind("vocab")
    local = logits.detach()[..., columns].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(
        local, target, columns.start, VOCAB, reduction, ignore_index, smoothing, "vocab"
    )
    (grad,) = torch.autograd.grad((loss * _weights(loss)).sum(), local)
    return loss.detach(), grad


def _weights(loss: Tensor) -> Tensor:
    """Gradients of the losses that differ from each other."""
    return torch.arange(1.0, loss.numel() + 1.0).view(loss.shape)


def _compare(
    logits: Tensor, target: Tensor, reduction: int, ignore_index: int, smoothing: float
) -> None:
    expected = F.cross_entropy(
        logits,
        target.long(),
        reduction=REDUCTIONS[reduction],
        ignore_index=ignore_index,
        label_smoothing=smoothing,
    )
    (grad,) = torch.autograd.grad((expected * _weights(expected)).sum(), logits)
    results = run_ranks(3, _loss, logits, target, reduction, ignore_index, smoothing)
    for rank, (loss, local_grad) in enumerate(results):
        columns = grad[..., STARTS[rank] : STARTS[rank + 1]]
        for ours, theirs in ((loss, expected.detach()), (local_grad, columns)):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("ignore_index", [-100, 5])  # 5: a class that exists
def test_cross_entropy_equals_full_logits(
    ignore_index: int, reduction: int, smoothing: float
) -> None:
    _compare(_random(TOKENS, VOCAB), _targets(ignore_index), reduction, ignore_index, smoothing)


def test_cross_entropy_of_one_token() -> None:
    _compare(_random(VOCAB), torch.tensor(9), 1, -100, 0.1)


def test_cross_entropy_of_huge_logits_is_stable() -> None:
    logits = (_random(TOKENS, VOCAB).detach() * 1e4).requires_grad_()
    _compare(logits, _targets(-100), 1, -100, 0.0)


def test_cross_entropy_without_valid_targets_is_nan() -> None:
    _compare(_random(2, VOCAB), torch.full((2,), -100), 1, -100, 0.0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_cross_entropy_of_narrow_targets(dtype: torch.dtype) -> None:
    _compare(_random(TOKENS, VOCAB), _targets(100, dtype), 0, 100, 0.0)


def _half_loss() -> Tensor:
    columns = _bind()
    logits = _random(TOKENS, VOCAB).detach()[:, columns].bfloat16()
    return vocab_parallel_cross_entropy(logits, _targets(-100), columns.start, VOCAB, 1, -100, 0.0)


def test_cross_entropy_of_half_precision() -> None:
    logits = _random(TOKENS, VOCAB).detach().bfloat16()
    expected = F.cross_entropy(logits.float(), _targets(-100))
    for loss in run_ranks(3, _half_loss):
        assert torch.equal(loss, expected.bfloat16())


def _traced() -> bool:
    """Both functions, one after the other as in a tied model, traced with the backward."""
    rows = _bind()

    def loss_grads(weight: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        hidden = vocab_parallel_embedding(weight, ids, rows.start)
        logits = hidden.view(-1, HIDDEN) @ weight.t()
        loss = vocab_parallel_cross_entropy(logits, ids.view(-1), rows.start, VOCAB, 1, -100, 0.1)
        return loss, *torch.autograd.grad(loss, (weight,))

    weight = _random(VOCAB, HIDDEN).detach()[rows].clone().requires_grad_()
    graph = make_fx(loss_grads, tracing_mode="fake")(weight, IDS)
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count("merakc.all_reduce.default") == 3  # lookup, maximum, sums
    pairs = zip(graph(weight.detach(), IDS), loss_grads(weight, IDS), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_trace_of_forward_and_backward_runs() -> None:
    assert all(run_ranks(3, _traced))


def _outside() -> str:
    columns = _bind()
    try:
        vocab_parallel_cross_entropy(
            _random(TOKENS, 5), _targets(-100), columns.start, 3, 1, -100, 0.0
        )
    except AssertionError:
        return "refused"
    return "taken"


def test_columns_outside_the_vocabulary_are_refused() -> None:
    assert run_ranks(1, _outside) == ["refused"]
