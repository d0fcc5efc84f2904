"""Ops that are taken apart by formulas of our own: their values, and what the graph holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merakc.frontend.calls import composites
from merakc.frontend.record import record
from tests.frontend.against_eager import check
from tests.frontend.small import Small, randn

F64 = {"dtype": torch.float64}
POOLS = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}


@pytest.mark.parametrize("dims", POOLS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_pooling_to_one_is_a_mean(dims: int, channels_last: bool) -> None:
    torch.manual_seed(0)
    x = randn(2, *range(3, 3 + dims), 4)
    if channels_last:
        x = x.transpose(1, -1)

    def forward(s: Any, x: Tensor) -> Tensor:
        out: Tensor = s.pool(s.scale * x).pow(2).sum()
        return out

    model = Small(forward, pool=POOLS[dims](1), scale=nn.Parameter(torch.ones((), **F64)))
    graph = check(model, x, relative=1e-13).graph
    assert [n.op for n in graph.nodes][1] == "aten.mean.dim"
    assert graph.nodes[1].spec.shape == (*x.shape[:2], *[1] * dims)


def test_pooling_to_other_sizes_stays() -> None:
    assert composites.part_by_part("aten.adaptive_avg_pool2d.default", (None, (1, 2))) is None


RESIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "nearest": (2, {}),
    "nearest-exact": (1, {}),
    "linear": (1, {"align_corners": True}),
    "bilinear": (2, {"align_corners": False}),
    "bicubic": (2, {}),
    "antialiased": (2, {"mode": "bilinear", "antialias": True}),
    "trilinear": (3, {}),
}


@pytest.mark.parametrize("by", [{"size": 7}, {"scale_factor": 1.7}], ids=str)
@pytest.mark.parametrize("mode", RESIZES)
def test_resizing_is_one_call(mode: str, by: dict[str, Any]) -> None:
    """As in eager: torch's decomposition gathers pixels by indices, and takes several times as
    long.
    """
    dims, options = RESIZES[mode]

    def forward(s: Any, x: Tensor) -> Tensor:
        out = nn.functional.interpolate(s.scale * x, **{"mode": mode, **options}, **by)
        return out.pow(2).sum()

    model = Small(forward, scale=nn.Parameter(torch.ones((), **F64)))
    graph = check(model, randn(2, 3, *range(4, 4 + dims)), relative=1e-13).graph
    assert [n.op for n in graph.nodes if "index" in n.op] == []
    assert len([n.op for n in graph.nodes if "upsample" in n.op]) == 1


def forward(s: Any, x: Tensor) -> Tensor:
    out, states = s.layer(s.scale * x)
    states = states if isinstance(states, tuple) else (states,)
    total: Tensor = out.pow(3).sum() + sum(h.pow(2).sum() for h in states)
    return total


LAYERS: dict[str, Any] = {
    "lstm": lambda **o: nn.LSTM(6, 5, **o),
    "gru": lambda **o: nn.GRU(6, 5, **o),
    "tanh": lambda **o: nn.RNN(6, 5, **o),
    "relu": lambda **o: nn.RNN(6, 5, nonlinearity="relu", **o),
    "both ways": lambda **o: nn.LSTM(6, 5, bidirectional=True, **o),
    "no biases": lambda **o: nn.GRU(6, 5, bias=False, bidirectional=True, **o),
    "projected": lambda **o: nn.LSTM(6, 5, proj_size=3, **o),
}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_dropout_between(name: str, batch_first: bool) -> None:
    """With dropout that drops nothing, the layers one by one are the whole stack."""
    torch.manual_seed(0)
    layer = LAYERS[name](num_layers=3, dropout=1e-300, batch_first=batch_first, **F64)
    model = Small(forward, layer=layer, scale=nn.Parameter(torch.ones((), **F64)))
    recording = check(model, randn(3, 2, 6), relative=1e-12)
    drops = [n for n in recording.graph.nodes if n.op == "merakc.dropout.default"]
    assert len(drops) == 2
    assert all(n.args[3] == 1e-300 for n in drops)


def test_without_dropout_or_in_evaluation_torch_takes_them_apart() -> None:
    layer = nn.LSTM(6, 5, 2, dropout=0.5).eval()
    model = Small(lambda s, x: s.layer(x)[0].sum(), layer=layer)
    graph = record(model, (torch.ones(3, 2, 6),), {}).graph
    assert not any("dropout" in n.op for n in graph.nodes)


def test_an_lstm_in_float32_is_the_same_on_every_device() -> None:
    model = Small(lambda s, x: s.layer(x)[0].sum(), layer=nn.LSTM(6, 5))
    graph = record(model, (torch.ones(3, 2, 6),), {}).graph
    assert not any("mkldnn" in n.op for n in graph.nodes)


@pytest.mark.parametrize("dim", [-1, 1])
def test_cosine_similarity(dim: int) -> None:
    torch.manual_seed(0)
    x, y = randn(2, 4, 6), randn(2, 1, 6)
    x[0, 1] = 0.0  # shorter than eps

    def forward(s: Any, x: Tensor, y: Tensor) -> Tensor:
        found = torch.nn.functional.cosine_similarity(s.scale * x, s.scale + y, dim, 0.5)
        total: Tensor = found.pow(2).sum()
        return total

    check(Small(forward, scale=nn.Parameter(randn(6))), x, y, relative=1e-13)
