"""Forwards that go through sets are one recording in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch import Tensor, nn

from merakc.frontend.python.fingerprint import fingerprint
from merakc.frontend.python.sets import goes_through_sets, in_needed_order
from merakc.frontend.record import record
from merakc.ir.graph import Graph
from merakc.passes.autodiff.interpret import interpret

KINDS = ("full", "sliding", "chunked", "linear")


class Kinds(nn.Module):
    """Of each kind of layers it makes a table first, one after the other."""

    def __init__(self, *, held: bool) -> None:
        super().__init__()
        if held:
            self.kinds = set(KINDS)
        for kind in self._all():
            self.register_buffer(f"{kind}_scale", torch.full((4,), 1.0 + len(kind)))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in KINDS)

    def _all(self) -> set[str]:
        return self.kinds if hasattr(self, "kinds") else set(KINDS)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        tables = {
            kind: (getattr(self, f"{kind}_scale") * x.mean() + 0.5).cos() for kind in self._all()
        }
        for layer, kind in zip(self.layers, KINDS, strict=True):
            x = layer(x) * tables[kind]
        return x.square().mean()


class Plain(nn.Module):
    """No set anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        late = self.layer(x)  # needed behind what is computed next
        return (x.sin() * 2 - late).square().mean()


def recorded(model: nn.Module) -> Graph:
    return record(model, (torch.ones(2, 4),), {}).graph


def told() -> str:
    return " ".join(fingerprint(recorded(Kinds(held=held))).hash for held in (True, False))


def test_every_process_records_the_same() -> None:
    code = f"from {__name__} import told; print(told())"
    for seed in ("1", "2", "3"):
        own = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        run = [sys.executable, "-c", code]
        found = subprocess.run(run, env=own, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == told()


def test_only_forwards_that_go_through_sets_are_reordered() -> None:
    assert goes_through_sets(Kinds(held=True))
    assert goes_through_sets(nn.Sequential(Kinds(held=False)))
    assert not goes_through_sets(Plain())
    assert [n.op.split(".")[1] for n in recorded(Plain()).nodes][:2] == ["linear", "sin"]


def test_another_order_computes_the_same() -> None:
    torch.manual_seed(0)
    model = Plain()
    graph = recorded(model)
    other = in_needed_order(graph)
    other.verify()
    assert [n.op.split(".")[1] for n in other.nodes][:3] == ["sin", "mul", "linear"]
    given = {"0": torch.randn(2, 4)} | dict(model.named_parameters())
    values = {i.name: given[i.target] for i in graph.inputs}
    assert torch.equal(*interpret(graph, values), *interpret(other, values))


class Gated(nn.Module):
    """A block whose result is gated by what is computed of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        return self.gate(step).sigmoid() * self.layer(x) + x


def test_blocks_stay_together() -> None:
    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Gated() for _ in range(4))

        def forward(self, x: Tensor, step: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, step)
            return x.square().mean()

    graph = in_needed_order(record(Gates(), (torch.ones(2, 4), torch.ones(2, 4)), {}).graph)
    blocks = [n.module.split(".")[1] for n in graph.nodes if n.module.startswith("blocks.")]
    assert blocks == sorted(blocks)
