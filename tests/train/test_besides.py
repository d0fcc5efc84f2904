"""What steps do beside computing, three of them on one batch, and what the plain model does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError, ForwardError, MerakError, MerakWarning
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import WIDTH, assert_close, build, gradients, warm_up

Batch = dict[str, Any]
Act = Callable[[Any, Batch], float]
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


class Acts(nn.Module):
    """A classifier over a mapping, to which `act` does something before."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.act, self.size, self.warned, self.aux = act, 0, False, None

    def forward(self, b: Batch) -> Tensor:
        """A loss."""
        weight = self.act(self, b)
        y = self.layers(b["x"]).tanh()
        self.size, self.warned, self.aux = len(y), True, y.mean()
        return F.cross_entropy(y, b["y"]) * weight


def batch(samples: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, WIDTH, (samples,), generator=generator), "n": [1, 2]}


def scaled(s: Any, b: Batch) -> float:
    b["x"].mul_(1.5)
    return 1.0


def centred(s: Any, b: Batch) -> float:
    b["x"].sub_(b["x"].mean(0) * 0.5)
    return 1.0


def through_views(s: Any, b: Batch) -> float:
    b["x"].t()[1:3].add_(1)
    b["y"][b["y"] == 2] = -100
    return 1.0


def replaced(s: Any, b: Batch) -> float:
    b["x"] = b["x"] * 1.5
    return 1.0


def popped(s: Any, b: Batch) -> float:
    return 2.0 if b.pop("n", None) else 1.0


def counted(s: Any, b: Batch) -> float:
    b["n"].append(len(b["x"]))
    return float(len(b["n"]))


def checked(s: Any, b: Batch) -> float:
    assert b["x"].abs().mean() < 2
    b["x"].mul_(2)
    return 1.0


ACTS = [scaled, centred, through_views, replaced, popped, counted]


def plain(act: Act, steps: int = STEPS) -> list[Any]:
    model, given, found = build(lambda: Acts(act)), batch(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(given)
        loss.backward()
        found.append((loss.item(), copy.deepcopy((gradients(model), given))))
        optimizer.step()
    return found


def parallel(act: Act, steps: int, options: dict[str, Any], first: int = 0) -> list[Any]:
    """The same on these ranks; of uneven batches dp rank 0 has so many samples."""
    whole, found = batch(), list[Any]()
    cut = first or 8 // options.get("dp", 1)
    parts = [{n: v[:cut] if n != "n" else v for n, v in whole.items()},
             {n: v[cut:] if n != "n" else list(v) for n, v in whole.items()}]  # fmt: skip
    example = {
        n: v[: 8 // options.get("dp", 1)] if n != "n" else list(v) for n, v in batch().items()
    }
    model = merakc.auto_parallel(
        build(lambda: Acts(act)), (example,), cluster=NOMINAL_CPU, **options
    )
    given = parts[model.data_parallel_rank]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(given)
        loss.backward()
        found.append((loss.item(), copy.deepcopy((model.full_gradients(), given))))
        optimizer.step()
    return found


def same(ours: list[Any], wanted: list[Any], rows: slice) -> None:
    for (loss, (grads, given)), (other, (others, batched)) in zip(ours, wanted, strict=True):
        assert loss == pytest.approx(other, rel=1e-10)
        if grads:  # of rank 0
            assert_close(grads, others)
        assert list(given) == list(batched)
        for name, value in batched.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(given[name], value[rows], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("act", ACTS)
def test_one_rank(act: Act) -> None:
    ours, wanted = parallel(act, STEPS, {"micro_batches": 4}), plain(act)
    same(ours, wanted, slice(None))
    assert ours[-1][1][1].get("n") == wanted[-1][1][1].get("n")


SOME = [centred, through_views, replaced]


def on_two(options: dict[str, Any], first: int) -> tuple[list[list[Any]], str]:
    """What some acts give on these ranks, and what is said of a check that fails."""
    found, said = [parallel(act, STEPS, options, first) for act in SOME], ""
    if "dp" in options:
        with pytest.raises(MerakError) as failed:
            parallel(checked, STEPS, {"dp": 2, "micro_batches": 2})
        said = str(failed.value)
    return found, said


@pytest.mark.parametrize("options", [{"pp": 2, "micro_batches": 2}, {"dp": 2, "micro_batches": 1}])
def test_two_ranks(options: dict[str, Any]) -> None:
    """Uneven batches where there are two; what crosses samples crosses ranks too, and checks hold
    of the batch of all.
    """
    first = 3 if "dp" in options else 0
    ranks = run_ranks(2, on_two, options, first)
    for k, act in enumerate(SOME):
        wanted = plain(act)
        for rank, (found, _) in enumerate(ranks):
            rows = slice(0, None) if not first else (slice(0, first), slice(first, None))[rank]
            same(found[k], wanted, rows)
    told = ["this check of the forward's fails for the batch" in said for _, said in ranks]
    assert any(told) == ("dp" in options)


def test_checks_hold_in_every_step() -> None:
    """Of the whole batch: its mean is too large in the third step, that of a part before."""
    with pytest.raises(AssertionError):
        plain(checked)
    same(parallel(checked, 2, {"micro_batches": 4}), plain(checked, 2), slice(None))
    with pytest.raises(ForwardError, match=r"test_besides.py:\d+: this check of the forward's"):
        parallel(checked, STEPS, {"micro_batches": 4})


def test_what_a_forward_leaves() -> None:
    source = build(lambda: Acts(scaled))
    model: Any = merakc.auto_parallel(source, (batch(),), micro_batches=4, cluster=NOMINAL_CPU)
    model(batch())
    assert (model.size, model.warned, source.size, source.warned) == (8, True, 8, True)
    with pytest.raises(ConfigError, match="sets 'aux' to a tensor"):
        float(model.aux)
    compiled = len(model._own("_steps").compiled)
    for _ in range(2):
        model(batch())
    assert len(model._own("_steps").compiled) == compiled == 1
    model(batch(4))  # recorded again, with what was there before
    assert model.size == 4


def test_checks_that_do_not_run_are_in_the_plan() -> None:
    def act(s: Any, b: Batch) -> float:
        assert (s.layers[0].weight.abs() < 1e3).all()
        return 1.0

    source, given = build(lambda: Acts(act)), (batch(),)
    with pytest.warns(MerakWarning, match=r"does not run, at .*test_besides.py:\d+"):
        model = merakc.auto_parallel(source, given, micro_batches=4, cluster=NOMINAL_CPU)
    assert any("does not run, at" in line for line in model.plan.conventions)
