"""Training with products of float8 is the same on any ranks, and that of plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import merakc
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from benchmarks.reference import lifted_casts
from merakc.errors import NonfiniteError
from merakc.machines.cluster import NOMINAL_CPU
from tests.kernels.float8.test_scaled import Recipe

WORDS, WIDTH, HEADS, LENGTH, SAMPLES, STEPS = 24, 32, 4, 6, 8, 3
EXACT = merakc.Precision("float64", "float64", "float64", products="float8")
Found = tuple[list[float], dict[str, Tensor]]


class Float8Linear(nn.Linear):
    """What a user would write by hand."""

    def forward(self, x: Tensor) -> Tensor:
        """The product of rounded numbers, and the bias."""
        found: Tensor = Recipe.apply(x, self.weight)
        return found if self.bias is None else found + self.bias


class Block(nn.Module):
    """Attention and two layers, of which `linear` is the kind."""

    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = (linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.value, self.out = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Each behind a norm, added to what it is given."""
        y = self.first(x)
        heads = [
            part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Words(nn.Module):
    """A small language model; its last product is of the numbers as they are."""

    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(linear) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """The loss of each next word."""
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))[:, :-1]
        return {"loss": F.cross_entropy(scores.flatten(0, 1).float(), ids[:, 1:].flatten())}


class Exact(Words):
    """The same with a loss in float64."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """The loss of each next word."""
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))[:, :-1]
        return {"loss": F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())}


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)


def steps_of(model: Any, share: slice = slice(None)) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(ids=batch(step)[share])["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_hand() -> Found:
    model = Exact(Float8Linear).double()
    return steps_of(model), {n: p.detach() for n, p in model.named_parameters()}


def trained(**options: Any) -> Found:
    options = {"precision": EXACT, "cluster": NOMINAL_CPU, "dp": 1} | options
    each = SAMPLES // options["dp"]
    model = merakc.auto_parallel(Exact().double(), {"ids": batch(0)[:each]}, **options)
    start = model.data_parallel_rank * each
    return steps_of(model, slice(start, start + each)), model.full_state_dict()


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "micro-batches": {"micro_batches": 4},
    "recompute": {"micro_batches": 2, "recompute": "selective"},
    "dp": {"dp": 2, "state_shards": "zero-2"},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2, "micro_batches": 2},
    "zb": {"pp": 2, "micro_batches": 2, "schedule": "zb-h1"},
    "cp": {"cp": 2},
    "tp, pp": {"tp": 2, "pp": 2, "micro_batches": 2},
    "cp, tp": {"cp": 2, "tp": 2},
    "parts": {"tp": 2, "overlap": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_ranks_train_as_plain_pytorch_does(layout: str) -> None:
    options = LAYOUTS[layout]
    world = 1
    for axis in ("dp", "tp", "cp", "pp"):
        world *= options.get(axis, 1)
    losses, state = by_hand()
    run = partial(trained, **options)
    found, full = run_ranks(world, run)[0] if world > 1 else run()
    assert found == pytest.approx(losses, rel=1e-10)
    for name, value in state.items():
        assert (full[name] - value).abs().max() <= 1e-9 * value.abs().max(), name


def chunked() -> Found:
    """With all products of layers in two chunks of rows."""
    options: dict[str, Any] = {"dp": 1, "tp": 2, "micro_batches": 8, "overlap": 2}
    options |= {"precision": EXACT, "cluster": NOMINAL_CPU}
    plan = merakc.plan_for(Exact().double(), {"ids": batch(0)}, **options)
    names = [n for n, _ in Exact().named_parameters() if n.startswith("blocks") and "weight" in n]
    chunks = {n: 2 for n in names if "first" not in n and "second" not in n}
    plan = replace(plan, row_chunks=chunks, sub_batches=())
    model = merakc.auto_parallel(
        Exact().double(), {"ids": batch(0)}, plan=plan, cluster=NOMINAL_CPU
    )
    return steps_of(model), model.full_state_dict()


def test_products_in_chunks_of_rows() -> None:
    (losses, state), (found, full) = by_hand(), run_ranks(2, chunked)[0]
    assert found == pytest.approx(losses, rel=1e-10)
    for name, value in state.items():
        assert (full[name] - value).abs().max() <= 1e-9 * value.abs().max(), name


def curve(precision: str) -> list[float]:
    """The losses of thirty steps on four batches in turns."""
    model = merakc.auto_parallel(
        Words(), {"ids": batch(0)}, dp=1, cluster=NOMINAL_CPU, precision=precision
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        loss = model(ids=batch(step % 4))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_it_learns_as_bfloat16_does() -> None:
    rounded, plain = curve("fp8-mixed"), curve("bf16-mixed")
    assert rounded != plain
    assert plain[-1] < 0.6 * plain[0]
    assert rounded == pytest.approx(plain, rel=0.05)


def test_what_is_not_finite_is_found_beside_numbers_of_eight_bits() -> None:
    model = merakc.auto_parallel(
        Words(), {"ids": batch(0)}, dp=1, cluster=NOMINAL_CPU, precision="fp8-mixed"
    )
    with torch.no_grad():
        model.get_parameter("blocks.0.up.weight")[3, 4] = torch.nan
    with pytest.raises(NonfiniteError, match=r"the first .* of parameter 'blocks.0.up.weight'"):
        model(ids=batch(0))["loss"].backward()


def mixture(**options: Any) -> list[float]:
    case = MODELS["mixtral"]
    with lifted_casts():
        given = case.batch(4)
        model = merakc.auto_parallel(
            case.model(torch.float64), given, dp=1, cluster=NOMINAL_CPU, precision=EXACT, **options
        )
        loss = model(**given)["loss"]
        loss.backward()
        norms = [g.norm().item() for _, g in sorted(model.full_gradients().items())]
    return [loss.item(), *norms] if torch.distributed.get_rank() == 0 else []


@pytest.mark.parametrize("options", [{"ep": 2}, {"tp": 2}])
def test_with_experts(options: dict[str, int]) -> None:
    wanted = run_ranks(1, mixture)[0]
    assert run_ranks(2, partial(mixture, **options))[0] == pytest.approx(wanted, rel=1e-10)
