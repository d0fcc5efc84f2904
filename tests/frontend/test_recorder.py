"""Single calls: layers of torch, custom functions, and what is refused, with the user's line."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: F401

from merakc.errors import RecordError
from merakc.frontend.record import record
from merakc.ir.graph import Graph, Ref
from tests.frontend.against_eager import check, inputs_of, run_graph
from tests.frontend.small import Small, here, linear, randn

F64 = {"dtype": torch.float64}


def recorded(forward: Callable[..., Any], *args: Any, **parts: Any) -> Graph:
    return record(Small(forward, **parts), args, {}).graph


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


# ------------------------------------------------------------------ layers of torch

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding="same", **F64), (2, 3, 8)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2, dilation=2, **F64), (2, 4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1, padding_mode="circular", **F64),
               (2, 2, 3, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose1d(3, 5, 3, stride=2, **F64), (2, 3, 5)),
    "unbatched": (lambda: nn.Conv2d(3, 4, 3, **F64), (3, 6, 6)),
    "lstm": (lambda: nn.LSTM(6, 5, 2, batch_first=True, **F64), (2, 4, 6)),
    "bidirectional": (lambda: nn.LSTM(6, 5, bidirectional=True, **F64), (2, 4, 6)),
    "lstm cell": (lambda: nn.LSTMCell(6, 5, **F64), (2, 6)),
    "gru": (lambda: nn.GRU(6, 5, **F64), (2, 4, 6)),
    "rnn": (lambda: nn.RNN(6, 5, **F64), (2, 4, 6)),
    "layer norm": (lambda: nn.LayerNorm(6, **F64), (2, 4, 6)),
    "rms norm": (lambda: nn.RMSNorm(6, **F64), (2, 4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4, **F64), (2, 4, 5)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True, **F64), (2, 4, 5)),
    "instance norm, statistics": (
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True, **F64), (2, 4, 5)),
    "batch norm without statistics": (
        lambda: nn.BatchNorm1d(6, track_running_stats=False, **F64), (4, 6)),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, **F64),
                    (2, 4, 6)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(linear()), (4, 6)),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(linear()), (4, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    build, shape = LAYERS[name]
    torch.manual_seed(0)

    def forward(s: Any, x: Tensor) -> Tensor:
        out = s.layer(s.scale * x)
        loss: Tensor = (out[0] if isinstance(out, tuple) else out).pow(3).sum()
        return loss

    scale = nn.Parameter(torch.ones((), **F64))
    check(Small(forward, layer=build(), scale=scale), randn(*shape), relative=1e-13)


@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}])
@pytest.mark.parametrize("layer", [{}, {"kdim": 4, "vdim": 4}, {"add_bias_kv": True}])
def test_multi_head_attention(options: dict[str, bool], layer: dict[str, Any]) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(6, 2, batch_first=True, **layer, **F64)
    keys = randn(2, 7, layer.get("kdim", 6))
    mask = torch.ones(5, 7, dtype=torch.bool).triu(1)

    def forward(s: Any, x: Tensor, y: Tensor) -> Tensor:
        out, weights = s.attention(x, y, y, attn_mask=mask, **options)
        loss: Tensor = out.pow(2).sum()
        return loss if weights is None else loss + weights.pow(2).sum()

    graph = check(Small(forward, attention=attention), randn(2, 5, 6), keys, relative=1e-13).graph
    assert "aten.linear.default" in ops(graph)  # opened up, not one node


EXPRESSIONS = """
torch.einsum("ij,kj->ik", y, y)
torch.einsum("ij,jk,kl->il", y, y.t(), y)
torch.linalg.vector_norm(y, dim=-1)
F.normalize(y, dim=-1)
torch.fft.irfft(torch.fft.rfft(y) * torch.view_as_complex(y.view(4, 3, 2)).sum())
torch.view_as_real(torch.view_as_complex(y.view(4, 3, 2)) ** 2)
y.sort(-1).values + y.topk(6).indices
F.fold(F.unfold(y.view(1, 1, 4, 6), 2), (4, 6), 2)
F.interpolate(y.view(1, 1, 4, 6), scale_factor=2, mode="bilinear")
F.adaptive_avg_pool1d(y, 3) + F.max_pool1d(y, 2)
torch.vmap(lambda row: row * 2)(y)
y * torch.func.grad(lambda z: (z ** 3).sum())(y)
torch.cat([y[:2], y[2:] * 2]).roll(1, 0)
y * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
y * torch.tensor(3.0).item() * int(OUTSIDE) * OUTSIDE
F.dropout(y, 0.0) + F.dropout(y, 0.5, training=False)
y.masked_fill(torch.ones(4, 6, dtype=torch.bool).tril(), -torch.inf).softmax(-1)[1:]
F.embedding(torch.tensor([[1, 2], [3, 1]]), y, padding_idx=1)
checkpoint(lambda z: s.layer(z).relu(), y, use_reentrant=False)
checkpoint(lambda z: s.layer(z).relu(), y, use_reentrant=True)
checkpoint_sequential(nn.Sequential(s.layer, nn.ReLU()), 2, y, use_reentrant=False)
""".strip().splitlines()

OUTSIDE = torch.tensor(2)


def program(expression: str, before: str = "") -> Callable[[Any, Tensor], Tensor]:
    body = textwrap.indent(before or "pass", "    ")
    source = (
        "def forward(s, x):\n    y = s.layer(x)\n"
        f"{body}\n    y = {expression}\n    return y.abs().pow(2).sum()\n"
    )
    found: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), globals(), found)
    forward: Callable[[Any, Tensor], Tensor] = found["forward"]
    return forward


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions(expression: str) -> None:
    torch.manual_seed(0)
    check(Small(program(expression), layer=linear()), randn(4, 6), relative=1e-13)


def test_a_reentrant_checkpoint_without_a_gradient_gives_none_inside() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        inside = checkpoint(s.inner, x, use_reentrant=True)
        out: Tensor = (inside + s.layer(x)).square().sum()
        return out

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        check(Small(forward, inner=linear(), layer=linear()), randn(4, 6))


def test_a_model_in_bfloat16() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(s.layer(x).float(), torch.tensor([1, 2, 3, 0]))

    check(Small(forward, layer=nn.Linear(6, 6)).bfloat16(), randn(4, 6).bfloat16())


@pytest.mark.parametrize("outside", [False, True])
def test_the_casts_of_autocast_are_nodes(outside: bool) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = s.layers(x)
        with torch.autocast("cpu", enabled=False):
            return F.mse_loss(y.float() @ s.last.weight, x)

    layers = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6))
    model = Small(forward, layers=layers, last=nn.Linear(6, 6))
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        graph = recorded(forward, torch.ones(4, 6), layers=layers, last=model.last)
    assert [n.args[1] for n in graph.nodes if n.op.startswith("aten._to_copy")] or any(
        n.spec.dtype is torch.bfloat16 for n in graph.nodes
    )
    check(model, torch.randn(4, 6))


# ------------------------------------------------------------------ ops of users


def test_an_op_of_the_user_keeps_its_backward() -> None:
    @torch.library.custom_op("merakc_tests::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_fake(torch.empty_like)
    double.register_autograd(lambda ctx, grad: grad * 7)
    check(Small(lambda s, x: double(s.layer(x)).square().sum(), layer=linear()), randn(4, 6))


def test_an_op_of_the_user_that_gives_nothing_is_not_left_out() -> None:
    @torch.library.custom_op("merakc_tests::small_enough", mutates_args=())
    def small_enough(x: Tensor) -> None:
        if x.abs().max() > 100:
            raise ValueError

    small_enough.register_fake(lambda x: None)

    def forward(s: Any, x: Tensor) -> Any:
        y = s.layer(x)
        small_enough(y)
        return y.square().sum()

    with pytest.raises(RecordError, match=rf"{here(forward, 2)}.*small_enough.*gives nothing"):
        recorded(forward, randn(4, 6), layer=linear())
    inner = Small(forward, layer=linear())
    graph = recorded(lambda s, x: s.inner(x) + 1, randn(4, 6), inner=inner)
    assert ops(graph)[0] == "merakc.opaque.default"


# ------------------------------------------------------------------ dropout


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_is_our_op_with_a_seed(inplace: bool) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = F.dropout(s.layer(x), 0.25, inplace=inplace)
        out: Tensor = F.dropout(y * 2, 0.5).sum()
        return out

    graph = recorded(forward, randn(4, 6), layer=linear())
    first, second = [n for n in graph.nodes if n.op == "merakc.dropout.default"]
    scalars = Ref("seed"), Ref("first_sample")
    assert first.args[1:] == (*scalars, 0.25, 1, 0, (1, 24), (0, 0), (1, 24))
    assert second.args[1:5] == (*scalars, 0.5, 2)
    assert not any(n.op.startswith("aten.bernoulli") for n in graph.nodes)


def test_dropout_drops_and_scales() -> None:
    model, x = Small(lambda s, x: F.dropout(s.scale * x, 0.25)), torch.ones(100, 100)
    model.scale = nn.Parameter(torch.ones(()))
    graph = record(model, (x,), {}).graph
    (out,) = run_graph(graph, inputs_of(graph, model, (x,), {})).outputs.values()
    assert out.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert out.mean().item() == pytest.approx(1.0, abs=0.03)


# ------------------------------------------------------------------ refusals

REFUSED = {
    "y * int(y.sum())": "control flow depends on the data",
    "y * 2 if y.sum() > 0 else y": "control flow depends on the data",
    "y * (2 if y.max().item() > 1 else 3)": "control flow depends on the data",
    "y * len(y[y > 0])": "control flow depends on the data",
    "y * float(y[0].tolist()[0])": "control flow depends on the data",
    "y * torch.poisson(y.abs())": "random op aten.poisson.default",
    "y * torch.rand(6, generator=torch.Generator())": "with a generator of its own",
    "y * torch.randint(4, 4, (6,))": "random integers from 4 to 4",
    "y if torch.rand([]) < 0.5 else y * 2": "depends on a random number",
    "y * torch.rand(1).item()": "depends on a random number",
    "torch.cond(y.sum() > 0, lambda z: z * 2, lambda z: z * 3, (y,))": "higher-order op cond",
    "F.embedding(torch.tensor([1, 2]), s.layer.weight, sparse=True)": "sparse gradients",
    "OUTSIDE.add_(1) * y": "write to a tensor that is no part of the model",
    "OUTSIDE.view(1)[0].add_(1) * y": "write to a tensor that is no part of the model",
    "OUTSIDE.data.view(1).fill_(3) * y": "write to a tensor that is no part of the model",
    "OUTSIDE.expand(6).detach().copy_(y) * y": "write to a tensor that is no part of the model",
    "y * [torch.manual_seed(5), torch.rand(6)][1]": "of numbers that the forward seeds",
}


@pytest.mark.parametrize("expression", REFUSED)
def test_refusals_name_the_line_and_the_module(expression: str) -> None:
    forward = program(expression)
    inner = Small(forward, layer=linear())
    # What depends on the data is refused in the model itself; an inner module runs as it is.
    alone = "depends on the data" in REFUSED[expression]
    model = inner if alone else Small(lambda s, x: s.inner(x), inner=inner)
    with pytest.raises(RecordError) as caught:
        record(model, (randn(4, 6),), {})
    message = str(caught.value)
    assert message.startswith(here(forward, 3) + ": ")
    assert REFUSED[expression] in message
    assert ("module ''" if alone else "module 'inner") in message
    assert int(OUTSIDE) == 2


def test_a_parameter_may_not_be_replaced() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.weight = nn.Parameter(s.weight * 2)
        out: Tensor = (s.weight * x).sum()
        return out

    with pytest.raises(RecordError, match="in the place of 'weight'"):
        recorded(forward, randn(4, 6), weight=nn.Parameter(torch.ones(6)))


def test_a_buffer_may_not_change_its_shape() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.cache = torch.cat([s.cache, x.sum(0)])
        out: Tensor = s.layer(x).sum()
        return out

    with pytest.raises(RecordError, match=r"in the place of 'cache' \(float64\[6\]\)"):
        recorded(forward, randn(4, 6), layer=linear(), cache=torch.zeros(6, **F64))


def test_nodes_carry_the_line_and_the_module() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.inner(x)
        out: Tensor = y.sum()
        return out

    graph = recorded(forward, randn(4, 6), inner=linear())
    assert [(n.op, n.module) for n in graph.nodes] == [
        ("aten.linear.default", "inner"),
        ("aten.sum.default", ""),
    ]
    assert graph.nodes[1].source == here(forward, 2)
