"""Loops over experts compute the same as sorted rows; what is not known to be one stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import merakc.kernels.experts  # noqa: F401  registers the ops
from merakc.ir.graph import InputKind
from merakc.kernels.opaque import OPAQUE
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.sharding.experts.loops import sorted_loops, with_sorted_loops
from tests.passes.sharding.experts.looped import (
    EXPERTS,
    FORMS,
    WORDS,
    B,
    Expert,
    Form,
    Looped,
    Normed,
    S,
    added,
    graph_of,
    model_of,
    without_the_last,
)
from tests.passes.sharding.experts.mixtures import problem_of


@pytest.mark.parametrize(
    ("form", "kind"),
    [*((form, Expert) for form in FORMS), (added, Normed), (without_the_last, Normed)],
)
def test_loops_are_found_and_compute_the_same(form: Form, kind: type[Expert]) -> None:
    graph = graph_of(form, kind=kind)
    found = with_sorted_loops(graph)
    found.verify()
    assert not any(n.op == OPAQUE for n in found.nodes)
    (block,) = problem_of(found).experts
    assert len(block.grouped) == 2
    for seed in range(3):
        torch.manual_seed(seed)
        words, model = torch.randint(WORDS, (B, S)), model_of(form, kind=kind)
        wanted = model(words, words)
        wanted.backward()
        weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        given = {
            i.name: weights.get(i.target, words) for i in found.inputs
            if i.name not in found.constants
        }  # fmt: skip
        loss = interpret(found, given)[0]
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
        loss.backward()
        for name, parameter in model.named_parameters():
            one, other = (
                torch.zeros_like(p) if p.grad is None else p.grad
                for p in (weights[name], parameter)
            )
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def _other_expert(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    m.experts[1].between = torch.tanh
    return added(m, x, chances)


def _one_expert_twice(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    chosen, out = chances.argmax(-1), torch.zeros_like(x)
    for k, expert in enumerate([m.experts[0], *m.experts]):
        (rows,) = torch.where(chosen == k)
        out.index_add_(0, rows, expert(x[rows]))
    return out


def _read_beside(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    return added(m, x, chances) + m.experts[0].up.bias.sum()


def _several_at_once(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    chosen, out = (chances.topk(2, -1).values * EXPERTS).long(), torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        (rows,) = torch.where((chosen == k).any(-1))
        out.index_add_(0, rows, expert(x[rows]))
    return out


def _last_wins(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    chosen, out = chances.topk(2, -1).indices, torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        rows, _ = torch.where(chosen == k)
        out[rows] = expert(x[rows])
    return out


def _last_of_any(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    chosen, out = chances.topk(2, -1).indices, torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        mask = (chosen == k).any(-1)
        out[mask] = expert(x[mask])
    return out


def _own_tensor(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    chosen, out = chances.argmax(-1), torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        (rows,) = torch.where(chosen == k)
        out.index_add_(0, rows, expert((x * (k + 1))[rows]))
    return out


def _rows_perhaps_twice(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    chosen, out = (chances.topk(2, -1).values * EXPERTS).long(), torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        rows, _ = torch.where(chosen == k)
        out[rows] += expert(x[rows])
    return out


def _one_after_the_other(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    chosen, out = chances.argmax(-1), x.clone()
    for k, expert in enumerate(m.experts):
        (rows,) = torch.where(chosen >= k)
        out[rows] = expert(out[rows])
    return out


def _by_all_rows(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    chosen, out = chances.argmax(-1), torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        (rows,) = torch.where(chosen == k)
        out.index_add_(0, rows, expert(x[rows]) - x[rows].sum())
    return out


OTHERS: list[tuple[Form, dict[str, Any], str]] = [
    (_other_expert, {}, "not the same for every expert"),
    (_one_expert_twice, {}, "no parameters of their own"),
    (_read_beside, {}, "parameters of an expert are read here, too"),
    (_several_at_once, {}, "two experts may have the same row"),
    (_last_wins, {}, "what the last one writes"),
    (_last_of_any, {}, "what the last one writes"),
    (_own_tensor, {}, "each expert reads rows of a tensor of its own"),
    (_rows_perhaps_twice, {}, "one expert has twice"),
    (_one_after_the_other, {}, "'clone' and what the other experts read there"),
    (_by_all_rows, {}, "aten.sum.default"),
    (added, {"between": lambda x: x - x.mean(0)}, "aten.mean.dim"),
    (added, {"between": lambda x: x.softmax(0)}, "aten.softmax.int is not known to compute each"),
    (added, {"between": lambda x: x.cumsum(0)}, "aten.cumsum.default is not known to compute each"),
    (added, {"between": lambda x: x.flip(0)}, "aten.flip.default is not known to compute each"),
    (without_the_last, {"between": lambda x: x.exp()}, "rows that no expert has"),
]


@pytest.mark.parametrize(("form", "how", "said"), OTHERS)
def test_what_is_not_known_to_be_a_mixture_stays(
    form: Form, how: dict[str, Any], said: str
) -> None:
    graph = graph_of(form, **how)
    found = sorted_loops(graph)
    assert found.graph == graph
    assert any(said in fault and ".py:" in fault for fault in found.faults), found.faults


def test_a_graph_without_loops_is_itself() -> None:
    graph = graph_of(lambda m, x, chances: x * chances.amax(-1, keepdim=True))
    found = sorted_loops(graph)
    assert found.graph is graph
    assert not found.faults
    assert any(i.kind is InputKind.PARAMETER for i in graph.inputs)
