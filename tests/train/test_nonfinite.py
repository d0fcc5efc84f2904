"""Steps that are not finite, on every layout: all ranks see them, and name the first module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError, MerakError, MerakWarning, NonfiniteError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.head import HeadRunner

LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "dp": 1, "pp": 1},
    {"pp": 2, "dp": 1, "tp": 1, "micro_batches": 2},
    {"dp": 2, "tp": 1, "pp": 1, "state_shards": "zero-3", "micro_batches": 2},
]
MARK = 7.0  # of a sample that makes what is not finite


class Root(nn.Module):
    """Its result is finite at 0, where its gradient is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """|x|, in a bad way."""
        return (x * x).sqrt()


class Odd(nn.Module):
    """A loss of log(0) for a marked sample where `of_loss`; otherwise a gradient of one row alone
    of `up`, which is one tp rank's, is NaN wherever its weight is zero.
    """

    def __init__(self, of_loss: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.root, self.down = nn.Linear(4, 8), Root(), nn.Linear(8, 4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.of_loss = of_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A mean of squares, with a mask that is infinite on purpose."""
        h = self.down(self.root(self.up(x)))
        mask = torch.zeros(4, dtype=h.dtype).masked_fill(torch.arange(4) == 3, float("-inf"))
        h = self.frozen(torch.softmax(h + mask, -1)) + h
        if self.of_loss:
            h = h + torch.log((x.amax(1, keepdim=True) != MARK).to(h.dtype))
        return F.mse_loss(h, torch.zeros_like(h))


def model_of(of_loss: bool, dtype: torch.dtype, **options: Any) -> Any:
    x = torch.linspace(-1, 1, 16, dtype=dtype).view(4, 4)
    plain = Odd(of_loss).to(dtype)
    return merakc.auto_parallel(plain, x, cluster=NOMINAL_CPU, **options), x


def raised(of_loss: bool, dtype: torch.dtype, options: dict[str, Any]) -> tuple[str, Any, float]:
    """What a bad step raises, what is found on demand, and a good step's loss behind it."""
    model, x = model_of(of_loss, dtype, **options)
    model(x).backward()
    assert model.find_nonfinite(x) is None
    bad = x.clone()
    if of_loss:
        bad[0, 0] = MARK if model.data_parallel_rank == model.data_parallel_size - 1 else 0.0
    else:
        state = model.full_state_dict()
        sent = [state]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(sent)
        zeroed = {n: t.clone() for n, t in sent[0].items()}
        zeroed["up.weight"][1] = 0
        zeroed["up.bias"][1] = 0
        model.load_state_dict(zeroed)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NonfiniteError) as found:
        model(bad)
    asked = model.find_nonfinite(bad)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    good = float("nan") if not of_loss else model(x).item()
    return str(found.value), asked, good


def skipped(precision: str | None, layout: dict[str, Any]) -> tuple[bool, int, bool]:
    model, x = model_of(
        of_loss=True, dtype=torch.float32, precision=precision, on_nonfinite="skip", **layout
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bad = x.clone()
    bad[0, 0] = MARK if model.data_parallel_rank == 0 else 0.0
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(bad)
    loss.backward()
    optimizer.step()
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model(x).backward()
    some = any(p.grad is not None for p in model.parameters() if p.requires_grad)
    return same and not loss.isfinite(), model.skipped_steps, some


Raised = list[tuple[str, Any, float]]


def on_layout(dtype: torch.dtype, layout: dict[str, Any]) -> tuple[Raised, list[Any]]:
    """What bad steps raise, and what they change where they are skipped."""
    found = [raised(of_loss, dtype, layout) for of_loss in (True, False)]
    precisions = (None, "bf16-mixed", "fp16-mixed") if layout["pp"] == 1 else ()
    return found, [skipped(precision, layout) for precision in precisions]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.filterwarnings("ignore::merakc.MerakWarning")
def test_all_ranks_raise_and_name_one_module_or_skip_and_change_nothing(
    layout: dict[str, Any],
) -> None:
    dtype = torch.float64 if layout["dp"] == 1 else torch.float32
    (first, skips), (second, others) = run_ranks(2, on_layout, dtype, layout)
    assert skips == others == [(True, 1, True)] * (3 if layout["pp"] == 1 else 0)
    for (message, asked, _), other in zip(first, second, strict=True):
        assert (message, asked) == other[:2]
        assert "step 1: " in message
        assert asked in message
        assert "test_nonfinite.py" in asked
    message, asked, good = first[0]
    assert "the loss is inf, and no rank gets" in message
    assert "the model's own forward, log at" in asked
    assert "in the forward of micro-batch" in asked
    assert good == second[0][2]
    assert good < 10
    message, asked, _ = first[1]
    assert "gradients are not finite" in message
    assert "module 'root', " in asked
    assert "in the backward of micro-batch" in asked


def test_several_losses_add_up_but_those_that_are_skipped() -> None:
    model, x = model_of(of_loss=True, dtype=torch.float64, on_nonfinite="skip")
    bad = x.clone()
    bad[0, 0] = MARK
    model(x).backward()
    once = model.full_gradients()
    with pytest.warns(MerakWarning, match=r"all ranks skip this step \(1 so far\)"):
        model(bad).backward()
    for name, value in model.full_gradients().items():
        assert torch.equal(value, once[name])


def test_what_is_ignored_is_handed_out() -> None:
    model, x = model_of(of_loss=True, dtype=torch.float32, on_nonfinite="ignore")
    x[0, 0] = MARK
    model(x).backward()
    assert not model.up.weight.grad.isfinite().all()
    assert model.skipped_steps == 0


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.filterwarnings("ignore::merakc.MerakWarning")
def test_mixed_precision_raises_where_it_is_asked_to(precision: str) -> None:
    """Float16's only once no smaller scale can help."""
    model, x = model_of(
        of_loss=True, dtype=torch.float32, precision=precision, on_nonfinite="raise"
    )
    x[0, 0] = MARK
    for _ in range(16 if precision == "fp16-mixed" else 0):
        model(x)
    with pytest.raises(NonfiniteError, match="the model's own forward, log"):
        model(x)


class Coupled(nn.Module):
    """A loss that couples the samples, and is log(0) where all are marked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A logarithm of the spread of the batch."""
        h = self.up(x)
        return torch.log((h - h.mean(0)).square().sum()) * 2


def coupled() -> str | None:
    x = torch.linspace(-1, 1, 16).view(4, 4) ** 2
    model = merakc.auto_parallel(Coupled(), x, cluster=NOMINAL_CPU, dp=2, micro_batches=2)
    (executor,) = [step.executor for step in model._own("_steps").compiled.values()]
    assert isinstance(executor.head, HeadRunner)
    assert model.find_nonfinite(x) is None
    return model.find_nonfinite(torch.zeros_like(x))


def test_what_couples_the_samples_is_looked_at() -> None:
    first, second = run_ranks(2, coupled)
    assert first == second
    assert first is not None
    assert "the model's own forward, log at" in first


def test_what_the_ranks_hold_is_named() -> None:
    model, x = model_of(of_loss=False, dtype=torch.float32)
    with torch.no_grad():
        model.down.weight[0, 0] = float("nan")
    assert "parameter 'down.weight', which holds NaN" in str(model.find_nonfinite(x))


@pytest.mark.parametrize("given", ["stop", "", 1])
def test_wrong_use(given: Any) -> None:
    with pytest.raises(ConfigError, match="is one of 'raise', 'skip', 'ignore'"):
        model_of(of_loss=False, dtype=torch.float32, on_nonfinite=given)
    assert issubclass(NonfiniteError, MerakError)


def test_scaled_losses_are_not_ignored() -> None:
    with pytest.raises(ConfigError, match="the scale of float16's losses is found by"):
        model_of(False, torch.float32, precision="fp16-mixed", on_nonfinite="ignore")
