from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.costs.stages import stage_parameters
from merakc.errors import ConfigError
from merakc.ir.batches import BatchLayout
from merakc.ir.strategy import Form
from merakc.lowering.recording import record_part, with_loss
from merakc.machines.cluster import NOMINAL_CPU
from merakc.planner.piece_table import PieceTable
from merakc.runtime.part import plain
from tests.battery.small_models import Words, build, parallel, part, warm_up, words


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


class Experts(nn.Module):
    """A layer with a list of its own; `wide` ones are another size."""

    def __init__(self, wide: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, wide) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.again = self.norm  # the same twice


class Tower(nn.Module):
    """Two lists of layers, of which the second has one that is not like the others."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Sequential(Experts(), nn.Tanh(), Experts())
        self.upper = nn.ModuleDict({"list": nn.ModuleList([Experts(8), Experts(), Experts()])})
        self.alone = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])


def test_the_outermost_layers_that_are_alike_share() -> None:
    model = Tower()
    buffers = dict(model.named_buffers())
    lower, upper = merakc.share_layers(model)
    assert lower.layers == ("lower.0", "lower.2")
    assert upper.layers == ("upper.list.1", "upper.list.2")
    assert lower.names[0] == "experts.0.weight"
    assert lower.numel == 2 * (16 + 4) + 8
    assert str(lower) == "lower.2 with lower.0: 8 parameters of 48 elements"
    layers: Any = model.lower
    assert layers[2].experts[1].weight is layers[0].experts[1].weight
    assert layers[0].experts[1].weight is not layers[0].experts[0].weight
    assert layers[2].again.weight is layers[0].norm.weight
    assert all(model.get_buffer(name) is buffer for name, buffer in buffers.items())
    inside = merakc.untie_layers(nn.Sequential(model))  # a module around it, since then
    assert inside[0].layers == ("0.lower.0", "0.lower.2")
    assert layers[2].again.weight is layers[2].norm.weight
    assert layers[2].norm.weight is not layers[0].norm.weight


def test_named_layers_share_and_what_is_not_alike_is_refused() -> None:
    model: Any = Tower()
    for layers, message in (
        (["upper.list.0", "upper.list.1"], r"'upper.list.1' is not as 'upper.list.0', which has"),
        (["lower.0"], "are not two modules or more"),
        ("middle", "Tower has no module 'middle'"),
        ("alone", "no layers of Tower repeat"),
    ):
        with pytest.raises(ConfigError, match=message):
            merakc.share_layers(model, layers)
    assert len(list(model.parameters())) == 5 * 6 + 2
    model.alone.append(nn.Linear(4, 4))
    model.alone[2].weight = model.lower[0].experts[0].weight
    with pytest.raises(ConfigError, match=r"'alone.2.weight' is 'lower.0.experts.0.weight' too"):
        merakc.share_layers(model, "alone")
    old = model.upper["list"][2].norm.weight
    (found,) = merakc.share_layers(model, "upper.list")
    assert found.layers == ("upper.list.1", "upper.list.2")
    with pytest.raises(ConfigError, match=r"'upper.list.2.norm.weight' is used as it was before"):
        torch.optim.SGD([old], lr=0.1)
    with pytest.raises(ConfigError, match="share all of their parameters already"):
        merakc.share_layers(model, "upper.list")


def held(**layout: Any) -> list[int]:
    """Elements of the parameters, gradients and optimizer's state of this rank."""
    model = parallel(shared, words(0), **layout)
    optimizer = torch.optim.AdamW(model.parameters())
    model(**part(words(0), model))["loss"].backward()
    optimizer.step()
    own = [p for p in model._own("_steps").state.values() if p.requires_grad]
    state = [t for values in optimizer.state.values() for t in values.values() if t.dim()]
    return [sum(plain(t).numel() for t in of) for of in (own, [p.grad for p in own], state)]


def shared() -> nn.Module:
    model = Words()
    merakc.share_layers(model)
    return model


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        ({"dp": 1, "pp": 2, "micro_batches": 2}, 16 * 8 + 296 + 16),
        ({"dp": 2, "state_shards": "zero-3"}, (16 * 8 + 296 + 16) // 2),
    ],
)
def test_a_rank_holds_one_layer(layout: dict[str, Any], most: int) -> None:
    for own, gradients, state in run_ranks(2, partial(held, **layout)):
        assert own <= most
        assert (gradients, state) == (own, 2 * own)
    assert sum(p.numel() for p in build(Words).parameters()) > 16 * 8 + 4 * 296


def test_the_planner_counts_what_layers_share_once() -> None:
    def record(model: nn.Module, samples: int) -> Any:
        ids = torch.zeros(samples, 6, dtype=torch.long)
        layout = BatchLayout((samples, samples), 1)
        return with_loss(record_part(model, (ids, ids), {}, layout, torch.device("cpu")))

    for model, elements in ((shared(), 296), (Words(), 4 * 296)):
        pieces = PieceTable(partial(record, model), NOMINAL_CPU).pieces(Form(1), 4)
        assert stage_parameters(pieces) == 16 * 8 + elements + 16
