"""Mixed precision trains as a loop with float32 masters does, written by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError, MerakWarning, RecordError
from merakc.machines.cluster import NOMINAL_CPU

STEPS, SAMPLES = 4, 8
DTYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
Tensors = dict[str, torch.Tensor]


class Small(nn.Module):
    """Integers and floats in, a buffer and a frozen parameter inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(13, 12)
        self.up, self.norm, self.down = nn.Linear(12, 31), nn.LayerNorm(31), nn.Linear(31, 13)
        self.up.bias.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(0, 1, 12))

    def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cross-entropy, a sample."""
        hidden = self.table(ids) * weight[:, None] + self.shift.to(weight.dtype)
        logits = self.down(self.norm(torch.tanh(self.up(hidden))))
        return {"loss": nn.functional.cross_entropy(logits.float(), ids)}


class Rounded(nn.Module):
    """Values in eight bits, the loss too where it is asked for."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w, self.dtype = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4)), dtype

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """A sum."""
        y = (x @ self.w).to(torch.float8_e4m3fn).float()
        return {"loss": (y * y).sum().to(self.dtype)}


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_values_in_eight_bits(micro_batches: int) -> None:
    x = torch.linspace(-3, 3, 16).view(4, 4)
    plain = Rounded()
    wanted = plain(x)["loss"]
    wanted.backward()
    model = merakc.auto_parallel(Rounded(), {"x": x}, micro_batches=micro_batches)
    loss = model(x=x)["loss"]
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert plain.w.grad is not None
    assert torch.allclose(model.w.grad, plain.w.grad, rtol=1e-6)
    with pytest.raises(RecordError, match=r"its loss as torch.float8_e4m3fn.*as float32"):
        merakc.auto_parallel(Rounded(torch.float8_e4m3fn), {"x": x})


def batch(step: int, part: int = 0, parts: int = 1) -> Tensors:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 13, (SAMPLES,), generator=generator)
    weight = torch.rand(SAMPLES, generator=generator)
    return {"ids": ids.chunk(parts)[part], "weight": weight.chunk(parts)[part]}


def by_hand(parts: int, dtype: torch.dtype) -> tuple[list[float], Tensors]:
    """Gradients of `parts` parts of the batch in `dtype`, added up in float32."""
    masters, model = Small(), Small().to(dtype)
    model.shift = masters.shift
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        with torch.no_grad():
            for own, master in zip(model.parameters(), masters.parameters(), strict=True):
                own.copy_(master)
        masters.zero_grad()
        losses.append(0.0)
        for part in range(parts):
            given = batch(step, part, parts)
            loss = model(given["ids"], given["weight"].to(dtype))["loss"] / parts
            model.zero_grad()
            loss.backward()
            losses[-1] += loss.item()
            for own, master in zip(model.parameters(), masters.parameters(), strict=True):
                if own.grad is not None:
                    before = 0 if master.grad is None else master.grad
                    master.grad = before + own.grad.float()
        optimizer.step()
    state = masters.state_dict()
    return losses, state | {"up.bias": state["up.bias"].to(dtype)}


def trained(precision: Any, **options: Any) -> tuple[list[float], Tensors, set[torch.dtype]]:
    dp = options.get("dp", 1)
    model = merakc.auto_parallel(
        Small(), batch(0, 0, dp), cluster=NOMINAL_CPU, precision=precision, **options
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step, model.data_parallel_rank, dp))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    assert model.skipped_steps == 0
    return losses, model.full_state_dict(), dtypes


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bf16-mixed", {}),
        ("fp16-mixed", {}),
        ("fp16-mixed", {"dp": 2, "state_shards": "zero-1"}),
        ("bf16-mixed", {"dp": 2, "state_shards": "zero-3"}),
        (
            "bf16-mixed",
            {"dp": 2, "pp": 2, "state_shards": ["zero-2", "zero-0"], "micro_batches": 1},
        ),
    ],
    ids=str,
)
def test_equals_a_loop_with_masters(precision: str, options: dict[str, Any]) -> None:
    dp = options.get("dp", 1)
    losses, state = by_hand(dp, DTYPES[precision])
    run = partial(trained, precision, **options)
    world = dp * options.get("pp", 1)
    found, full, dtypes = run_ranks(world, run)[0] if world > 1 else run()
    assert found == pytest.approx(losses, rel=1e-6)
    assert dtypes == {torch.float32}
    for name, value in state.items():
        assert full[name].dtype == value.dtype
        torch.testing.assert_close(full[name], value, rtol=1e-5, atol=2e-6)


def test_many_micro_batches_in_any_dtypes() -> None:
    """Accumulators of bfloat16 lose digits that those of float32 keep; float64 is exact."""
    options = {"dp": 2, "micro_batches": 4, "state_shards": "zero-2"}
    losses, state = by_hand(1, torch.float64)
    precisions = [merakc.Precision("float64", "float64", "float64")]
    precisions += [merakc.Precision("bfloat16", gradients) for gradients in ("bfloat16", "float32")]
    every = run_ranks(2, lambda: [trained(precision, **options) for precision in precisions])[0]
    found, full, _ = every[0]
    assert found == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(full["down.weight"].float(), state["down.weight"])
    exact = by_hand(8, torch.bfloat16)[1]["down.weight"]
    errors = [(full["down.weight"] - exact).abs().mean().item() for _, full, _ in every[1:]]
    assert errors[1] < 0.1 * errors[0]


class Overflows(nn.Module):
    """A gradient of 1e30 for one of the batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A mean of squares."""
        return (self.b(torch.tanh(self.a(x))) * x.amax(1, keepdim=True)).float().mean()


def skipped(precision: str, pp: int) -> list[Tensors]:
    def given(step: int, dp: int) -> torch.Tensor:
        x = torch.full((2, 4), 0.5)
        return x * float("inf") if (step, dp) == (1, 1) else x

    model = merakc.auto_parallel(
        Overflows(), given(0, 0), dp=2, pp=pp, micro_batches=1, cluster=NOMINAL_CPU,
        precision=precision, on_nonfinite="skip",
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scale, found = model.loss_scale, [model.full_state_dict()]
    for step in range(3):
        model(given(step, model.data_parallel_rank)).backward()
        assert model.skipped_steps == int(step >= 1)
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.full_state_dict())
    halved = 0.5 if precision == "fp16-mixed" else 1.0
    assert model.loss_scale == scale * halved
    return found


@pytest.mark.parametrize(("precision", "pp"), [("bf16-mixed", 1), ("fp16-mixed", 2)])
@pytest.mark.filterwarnings("ignore::merakc.MerakWarning")
def test_a_step_that_overflows_on_one_rank_is_no_rank_s(precision: str, pp: int) -> None:
    start, first, second, third = run_ranks(2 * pp, skipped, precision, pp)[0]
    for name in start:
        assert not torch.equal(start[name], first[name])
        assert torch.equal(first[name], second[name])
        assert not torch.equal(second[name], third[name])


def test_a_skipped_step_is_warned_of() -> None:
    x = torch.full((2, 4), 0.5)
    model = merakc.auto_parallel(
        Overflows(), x, cluster=NOMINAL_CPU, precision="bf16-mixed", on_nonfinite="skip"
    )
    with pytest.warns(MerakWarning, match="all ranks skip this step"):
        model(x * float("nan"))


def test_whole_matrices_are_there_for_optimizers_that_want_them() -> None:
    x = torch.full((2, 4), 0.5)
    model = merakc.auto_parallel(Overflows(), x, cluster=NOMINAL_CPU, precision="bf16-mixed")
    before = model.full_state_dict()["a.weight"].clone()
    model(x).backward()
    torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1).step()
    assert not torch.equal(model.full_state_dict()["a.weight"], before)


def test_wrong_use() -> None:
    x = torch.full((2, 4), 0.5)
    with pytest.raises(ConfigError, match="'bf16' is not known; choose one of bf16-mixed"):
        merakc.auto_parallel(Overflows(), x, precision="bf16")
    model = merakc.auto_parallel(
        Overflows(), x, cluster=NOMINAL_CPU, precision="bf16-mixed", on_nonfinite="skip"
    )
    with pytest.raises(ConfigError, match="this model's loss is not scaled"):
        model.loss_scale = 2.0
    model = merakc.auto_parallel(Overflows(), x, cluster=NOMINAL_CPU, precision="fp16-mixed")
    model.loss_scale = 2.0
    assert model.loss_scale == 2.0
