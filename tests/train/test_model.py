from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.utils import ModelOutput

import merakc
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from merakc.errors import RecordError
from merakc.frontend.values.absent import Absent
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import (
    WIDTH,
    Tensors,
    Words,
    assert_close,
    build,
    gradients,
    parallel,
    warm_up,
    words,
)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


@dataclass
class Answer(ModelOutput):
    loss: torch.Tensor | None = None
    out: torch.Tensor | None = None
    note: str | None = None


class Pair(NamedTuple):
    loss: torch.Tensor
    out: torch.Tensor


class Regression(nn.Module):
    """Returns its loss, its output and a word in one of many forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> Any:
        """The mean squared error; rows of `out` belong to rows of `x`."""
        out = self.layers(x) * scale
        loss = F.mse_loss(out, y)
        match self.form:
            case "alone":
                return loss
            case "tuple":
                return loss, out, None, "word"
            case "named tuple":
                return Pair(loss, out)
            case "dict":
                return {"loss": loss, "more": {"out": [out]}, "note": "word"}
            case "dataclass":
                return Answer(loss, out, "word")
        raise AssertionError


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(8, 2, generator=generator, dtype=torch.float64)


def loss_of(out: Any) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return out
    loss: torch.Tensor = out["loss"] if isinstance(out, dict) else out[0]
    return loss


def out_of(out: Any) -> torch.Tensor:
    if isinstance(out, dict) and "more" in out:
        out = [None, out["more"]["out"][0]]
    found: torch.Tensor = out[1]
    return found


FORMS = ["alone", "tuple", "named tuple", "dict", "dataclass"]


def answers(form: str, layout: dict[str, int]) -> tuple[float, Any, Tensors]:
    x, y = data()
    dp = layout.get("dp", 1)
    model = merakc.auto_parallel(
        build(lambda: Regression(form)), (x.chunk(dp)[0], y.chunk(dp)[0]),
        micro_batches=2, cluster=NOMINAL_CPU, **layout,
    )  # fmt: skip
    given = [t.chunk(dp)[model.data_parallel_rank] for t in (x, y)]
    out = model(*given)
    predicted = model.predict(given[0], y=given[1])  # keywords where there were positions
    assert type(out) is type(predicted)
    if form == "tuple":
        _, read, nothing, word = out
        assert (nothing, word) == (None, "word")
        torch.testing.assert_close(read.detach(), out_of(predicted))
    loss_of(out).backward()
    return loss_of(out).item(), predicted, model.full_gradients()


def of_forms(layout: dict[str, int], forms: list[str]) -> dict[str, tuple[float, Any, Tensors]]:
    return {form: answers(form, layout) for form in forms}


@pytest.mark.parametrize(
    ("layout", "forms"), [({}, FORMS), ({"dp": 2}, ["tuple", "dict"]), ({"pp": 2}, ["tuple"])]
)
def test_outputs_have_the_models_own_form(layout: dict[str, int], forms: list[str]) -> None:
    ranks = run_ranks(2, of_forms, layout, forms) if layout else [of_forms(layout, forms)]
    for form in forms:
        plain = build(lambda: Regression(form))  # noqa: B023
        wanted = plain(*data())
        loss_of(wanted).backward()
        for rank, found in enumerate(ranks):
            loss, predicted, _ = found[form]
            assert loss == pytest.approx(loss_of(wanted).item(), rel=1e-12), form
            assert type(predicted) is type(wanted)
            torch.testing.assert_close(loss_of(predicted), loss_of(wanted).detach())
            if form != "alone":
                rows = out_of(wanted).detach()
                if "dp" in layout:
                    rows = rows.chunk(2)[rank]
                torch.testing.assert_close(out_of(predicted), rows)
        assert_close(ranks[0][form][2], gradients(plain))


def test_values_that_are_no_tensors_tell_steps_apart() -> None:
    x, y = data()
    plain = build(lambda: Regression("alone"))
    model = merakc.auto_parallel(
        copy.deepcopy(plain), {"x": x, "y": y, "scale": 1.0}, cluster=NOMINAL_CPU
    )
    for scale in (2.0, 1.0):
        assert model(x, y, scale=scale).item() == pytest.approx(plain(x, y, scale).item())


class OnTensor(nn.Module):
    """Takes one tensor and returns the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A scalar of one dim."""
        return self.layer(x).square().mean().reshape(1)


def test_a_batch_that_is_a_tensor() -> None:
    x, _ = data()
    model = merakc.auto_parallel(build(OnTensor), x, cluster=NOMINAL_CPU)
    plain = build(OnTensor)
    loss = model(x)
    loss.backward()
    plain(x).backward()
    assert loss.item() == pytest.approx(plain(x).item())
    assert_close(model.full_gradients(), gradients(plain))


def names_and_weights() -> tuple[set[str], Tensors, float]:
    case = MODELS["gpt2"]
    model = merakc.auto_parallel(
        case.model(), case.batch(4), pp=2, schedule="1f1b", cluster=NOMINAL_CPU
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**case.batch(4)).loss.backward()
    optimizer.step()
    model.eval()
    with torch.inference_mode():  # of a form that is recorded here, and then used elsewhere
        inside = model(**case.batch(4)).loss.item()
    loss = model(**case.batch(4)).loss.item()
    assert loss == inside
    return set(model.state_dict()), model.full_state_dict(), loss


def test_state_dicts_have_the_stock_models_names() -> None:
    (first, full, loss), (second, nothing, other) = run_ranks(2, names_and_weights)
    stock = MODELS["gpt2"].model()
    assert first | second == set(stock.state_dict())
    assert "transformer.wpe.weight" in first - second
    assert "transformer.ln_f.weight" in second - first
    assert nothing == {}
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.zero_()
    assert stock.load_state_dict(full, strict=True).missing_keys == []
    assert stock.eval()(**MODELS["gpt2"].batch(4)).loss.item() == pytest.approx(loss, rel=1e-5)
    assert loss == other


def test_coordinates() -> None:
    def where() -> tuple[int, int, int]:
        model = parallel(lambda: Words(blocks=1), words(0), dp=2, pp=2)
        return model.rank, model.data_parallel_rank, model.data_parallel_size

    assert run_ranks(4, where) == [(0, 0, 2), (1, 0, 2), (2, 1, 2), (3, 1, 2)]


def test_gradients_are_handed_over_and_not_copied() -> None:
    model = parallel(Words, words(0))
    loss = model(**words(0))["loss"]
    handed = {id(g): g.data_ptr() for g in loss.grad_fn.gradients}
    loss.backward()
    assert {p.grad.data_ptr() for p in model.parameters()} == set(handed.values())


def test_modes_of_single_modules_are_kept() -> None:
    def frozen_norm() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), OnTensor())
        model[1].eval()
        return model

    x, _ = data()
    plain = build(frozen_norm)
    model = merakc.auto_parallel(build(frozen_norm), x, cluster=NOMINAL_CPU)
    for batch in (x, x[:4]):  # the second is recorded later
        assert model(batch).item() == pytest.approx(plain(batch).item())
    plain.train()
    model.train()
    assert model(x).item() == pytest.approx(plain(x).item())
    torch.testing.assert_close(model.full_state_dict()["1.running_mean"], plain[1].running_mean)


def test_caches_are_left_out_of_predictions() -> None:
    case = MODELS["llama"]
    model = case.model()
    model.config.use_cache = True
    stock = copy.deepcopy(model)
    batch = case.batch(4)
    out = merakc.auto_parallel(model, batch, cluster=NOMINAL_CPU).predict(**batch)
    assert isinstance(out, transformers.modeling_outputs.CausalLMOutputWithPast)
    assert isinstance(out.past_key_values, Absent)
    torch.testing.assert_close(out.logits, stock(**batch).logits.detach())


def test_a_child_may_be_named_as_a_property() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plan = nn.Linear(WIDTH, WIDTH)
            self.rank = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rank(self.plan(x)).mean()

    x, _ = data()
    model = merakc.auto_parallel(build(Names), x, cluster=NOMINAL_CPU)
    assert model.rank == 0
    assert set(model.state_dict()) == {"plan.weight", "plan.bias", "rank.weight", "rank.bias"}


class LateWork(nn.Module):
    """All parameters in front of all the work."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.first(x)
        for _ in range(20):
            y = torch.sin(y @ y.mT @ y)
        return {"loss": y.square().mean()}


def test_a_stage_without_parameters_has_an_optimizer_all_the_same() -> None:
    batch = {"x": torch.randn(4, 6, WIDTH)}

    def step() -> tuple[set[str], Tensors]:
        torch.manual_seed(0)
        model = merakc.auto_parallel(LateWork(), batch, pp=2, cluster=NOMINAL_CPU)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(**batch)["loss"].backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        assert set(model.state_dict()) <= {"first.weight", "first.bias"}
        return {n for n, _ in model.named_parameters()}, model.full_state_dict()

    (first, full), (second, _) = run_ranks(2, step)  # empty ones on the second
    assert first == second == {"first.weight", "first.bias"}
    assert full.keys() == first


class Guarded(nn.Module):
    """Gives up where its loss is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss = self.layer(x).square().mean()
        if not torch.isfinite(loss):
            return loss.detach() * 0
        return loss


def test_a_loss_that_is_not_finite_where_the_forward_asks_for_that() -> None:
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    model = parallel(Guarded, {"x": x}, micro_batches=2)
    assert model(x=x).isfinite()
    with pytest.raises(RecordError, match=r"the loss is nan, .*test_model.py:\d+: what it does"):
        model(x=x * torch.nan)
    with pytest.raises(RecordError, match="the loss is nan"):
        model.eval()(x=x * torch.nan)
