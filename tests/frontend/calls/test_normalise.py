"""Attention and BatchNorm in the form that the recorder gives them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import moe

from merakc.frontend.calls.normalise import KEPT, RENAMED, decomposes
from merakc.frontend.record import record
from merakc.ir.graph import Graph, OutputKind
from merakc.kernels.ops import resolve_op
from tests.frontend.against_eager import check, inputs_of, run_graph
from tests.frontend.small import Small, linear, randn

HEADS = 2


def heads(x: Tensor, number: int = HEADS) -> Tensor:
    """[b, s, 6] as [b, number, s, 6 / number]."""
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


Attend = Callable[[Any, Tensor], Tensor]
OURS: dict[str, Attend] = {
    "plain": lambda s, y: F.scaled_dot_product_attention(y, y, y),
    "causal": lambda s, y: F.scaled_dot_product_attention(y, y * 2, y, is_causal=True),
    "scale": lambda s, y: F.scaled_dot_product_attention(y, y, y, scale=0.3),
    "mask": lambda s, y: F.scaled_dot_product_attention(y, y, y, torch.ones(4, 4).tril().bool()),
    "bias": lambda s, y: F.scaled_dot_product_attention(y, y, y, s.bias.detach()),
    "groups": lambda s, y: F.scaled_dot_product_attention(y, y[:, :1], y[:, 1:], enable_gqa=True),
    "no dropout": lambda s, y: F.scaled_dot_product_attention(y, y, y, dropout_p=0.0),
}
WRITTEN_OUT: dict[str, Attend] = {
    "learned bias": lambda s, y: F.scaled_dot_product_attention(y, y, y, s.bias),
    "learned bias, groups": lambda s, y: F.scaled_dot_product_attention(
        y, y[:, :1], y[:, 1:], s.bias, enable_gqa=True
    ),
    "three dims": lambda s, y: F.scaled_dot_product_attention(y[0], y[0], y[0], is_causal=True),
    "five dims": lambda s, y: F.scaled_dot_product_attention(*[y[None]] * 3),
    "three dims, mask": lambda s, y: F.scaled_dot_product_attention(
        y[0], y[0], y[0], torch.ones(4, 4).tril().bool()
    ),
    "three dims, rows that see nothing": lambda s, y: F.scaled_dot_product_attention(
        y[0], y[0], y[0], torch.ones(4, 4).tril(-1).bool()
    ),
    "learned bias, rows that see nothing": lambda s, y: F.scaled_dot_product_attention(
        y, y, y, s.bias.masked_fill(torch.ones(4, 4).triu().bool(), -math.inf)
    ),
}


def attention_graph(attend: Attend, relative: float) -> Graph:
    torch.manual_seed(0)

    def forward(s: Any, x: Tensor) -> Tensor:
        return attend(s, heads(s.layer(x))).pow(2).sum()

    model = Small(forward, layer=linear(), bias=nn.Parameter(randn(4, 4)))
    return check(model, randn(2, 4, 6), relative=relative).graph


@pytest.mark.parametrize("name", OURS)
def test_attention_is_one_node_of_our_own(name: str) -> None:
    graph = attention_graph(OURS[name], 1e-14)
    assert sum(n.op == "merakc.attention.default" for n in graph.nodes) == 1


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_attention_is_written_out_where_our_op_cannot_be(name: str) -> None:
    graph = attention_graph(WRITTEN_OUT[name], 1e-13)
    assert all("attention" not in n.op for n in graph.nodes)


def test_dropout_of_attention_falls_on_the_weights() -> None:
    model = Small(
        lambda s, x: F.scaled_dot_product_attention(
            s.one * x, x, torch.ones_like(x), dropout_p=0.5
        ),
        one=nn.Parameter(torch.ones((), dtype=torch.float64)),
    )
    x = randn(2, 2, 40, 3)
    graph = record(model, (x,), {}).graph
    names = [n.op for n in graph.nodes if "dropout" in n.op or "softmax" in n.op]
    assert names == ["aten.softmax.int", "merakc.dropout.default"]
    (out,) = run_graph(graph, inputs_of(graph, model, (x,), {})).outputs.values()
    assert out.mean().item() == pytest.approx(1.0, abs=0.05)  # of values that are all one
    assert not torch.allclose(out, torch.ones_like(out))


def test_the_default_scale_is_rounded_as_torch_does() -> None:
    graph = attention_graph(OURS["plain"], 1e-14)
    (node,) = [n for n in graph.nodes if n.op == "merakc.attention.default"]
    assert node.args[-1] == 1 / math.sqrt(3)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(6), (4, 6)),
    "1d of sequences": (lambda: nn.BatchNorm1d(6), (4, 6, 5)),
    "2d": (lambda: nn.BatchNorm2d(6), (4, 6, 3, 3)),
    "without weights": (lambda: nn.BatchNorm1d(6, affine=False), (4, 6)),
    "momentum": (lambda: nn.BatchNorm1d(6, momentum=0.5, eps=0.1), (4, 6)),
    "synchronised": (lambda: nn.SyncBatchNorm(6), (4, 6)),
}


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_says_what_it_writes(name: str) -> None:
    build, shape = NORMS[name]
    torch.manual_seed(0)

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.norm(s.norm(s.scale * x)).pow(3).sum()  # twice: two updates

    model = Small(forward, norm=build().double(), scale=nn.Parameter(randn(*shape)))
    graph = check(model, randn(*shape), relative=1e-12).graph
    written = [o.name for o in graph.outputs if o.kind is OutputKind.BUFFER]
    assert written == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_batch_norm_of_half_precision_keeps_its_statistics() -> None:
    """They are of more bits than what is normalised, and may be larger than any number of it."""
    model, x = Small(lambda s, x: s.norm(x).sum(), norm=nn.BatchNorm1d(3)), randn(64, 3) * 500
    x = x.half()
    graph = record(model, (x,), {}).graph
    found = run_graph(graph, inputs_of(graph, model, (x,), {})).buffers
    model(x)
    for name in ("norm.running_mean", "norm.running_var"):
        wanted = model.get_buffer(name)
        assert wanted.isfinite().all()
        torch.testing.assert_close(found[name], wanted, rtol=1e-6, atol=1e-6)


def test_batch_norm_in_eval_mode_writes_nothing() -> None:
    model = Small(lambda s, x: s.norm(s.layer(x)).pow(3).sum(), layer=linear(),
                  norm=nn.BatchNorm1d(6).double())  # fmt: skip
    graph = check(model.eval(), randn(4, 6)).graph
    assert [o.kind for o in graph.outputs] == [OutputKind.LOSS]
    assert [n.op for n in graph.nodes][1] == "aten.batch_norm.default"


@pytest.mark.parametrize("experts", ["torch", "transformers"])
def test_products_of_groups_of_rows_are_one_op_of_our_own(experts: str) -> None:
    # Whichever a library calls, torch's is recorded on a GPU and computed on a CPU.
    call = {"torch": F.grouped_mm, "transformers": moe._grouped_mm}[experts]

    def forward(s: Any, x: Tensor, offs: Tensor) -> Tensor:
        return call(x, s.w, offs=offs).float().sum()

    model = Small(forward, w=nn.Parameter(torch.randn(2, 8, 16, dtype=torch.bfloat16)))
    for dtype in (torch.bfloat16, torch.float64)[: 1 + (experts == "transformers")]:
        args = torch.randn(4, 8, dtype=dtype), torch.tensor([1, 4], dtype=torch.int32)
        ops = [n.op for n in record(model.to(dtype), args, {}).graph.nodes]
        assert ops[0] == "merakc.grouped_mm.default"


def test_other_products_of_groups_stay_torchs() -> None:
    x = torch.randn(2, 8, 8, dtype=torch.bfloat16)
    model = Small(lambda s, x: F.grouped_mm(x, s.w), w=nn.Parameter(x))
    assert [n.op for n in record(model, (x,), {}).graph.nodes] == ["aten._grouped_mm.default"]


def test_views_of_whole_tensors_are_reshapes() -> None:
    graph = record(Small(lambda s, x: x.view(12).view(4, 3) * 1), (torch.ones(3, 4),), {}).graph
    assert [n.op for n in graph.nodes] == ["aten.reshape.default"] * 2 + ["aten.mul.Tensor"]


@pytest.mark.parametrize("op", [*sorted(KEPT), *RENAMED.values()])
def test_the_ops_named_exist(op: str) -> None:
    found = resolve_op(op)
    assert not decomposes(found)


def test_no_device_is_in_a_graph() -> None:
    class Moves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            here = x.to(torch.device("cpu"), torch.float32).to("cpu")
            return here + torch.zeros(3, device=x.device) + torch.zeros_like(x, device="cpu")

    graph = check(Moves(), torch.randn(2, 3, dtype=torch.float64), relative=1e-6).graph
    for node in graph.nodes:
        given = (*node.args, *(value for _, value in node.kwargs))
        assert not any(isinstance(value, torch.device) for value in given), node
