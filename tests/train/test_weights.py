from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError, MerakWarning, MismatchError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.parameters.initial import initialise
from tests.battery.small_models import WIDTH, Tensors, Words, build, parallel, part, warm_up, words


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


LAYOUTS: list[dict[str, int]] = [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}]


class Net(nn.Module):
    """Of stock layers only, so that it can be initialised on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, WIDTH)
        )
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of something that depends on every parameter."""
        y = self.layers(x)[:, None]
        return self.head(self.attention(y, y, y)[0]).square().mean()


LLAMA = transformers.LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, initializer_range=0.05, tie_word_embeddings=True, use_cache=False,
)  # fmt: skip


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(LLAMA)


def meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def initialised(make: Callable[[], nn.Module], batch: object, layout: dict[str, int]) -> Tensors:
    model = merakc.auto_parallel(meta(make), batch, seed=7, cluster=NOMINAL_CPU, **layout)
    return model.full_state_dict()


@pytest.mark.parametrize("make", [Net, llama])
def test_meta_models_are_initialised_alike_on_every_layout(make: Callable[[], nn.Module]) -> None:
    ids = torch.zeros(4, 5, dtype=torch.long)
    batch = torch.zeros(16, WIDTH) if make is Net else {"input_ids": ids, "labels": ids}
    plain = meta(make)
    random_state = torch.get_rng_state()
    initialise(plain, seed=7)
    assert torch.equal(torch.get_rng_state(), random_state)
    wanted = plain.state_dict()
    for layout in LAYOUTS if make is Net else [{"tp": 2}]:
        full, *_ = run_ranks(2 if layout else 1, initialised, make, batch, layout)
        assert full.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(full[name], value), (layout, name)


def differently_seeded(layout: dict[str, int]) -> Tensors:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    told = "'embedding.weight' of rank 1 is not as rank 0's, and 16 tensors more; all ranks train"
    with nullcontext() if rank else pytest.warns(MerakWarning, match=told):
        model = merakc.auto_parallel(Words().double(), words(0, 4), cluster=NOMINAL_CPU, **layout)
    return model.full_state_dict()


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_rank_0_gives_the_weights(layout: dict[str, int]) -> None:
    full, *_ = run_ranks(2, differently_seeded, layout)
    torch.manual_seed(0)
    for name, value in Words().double().state_dict().items():
        assert torch.equal(full[name], value)


class Partly(nn.Module):
    """Frozen and unread parameters; one that only the results need; one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.b.requires_grad_(False)
        self.unread = nn.Linear(2, 2)
        self.shown = nn.Linear(WIDTH, 3)
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.seen: torch.Tensor

    def forward(self, x: torch.Tensor) -> Tensors:
        """Reads every parameter but one, and differentiates by fewer."""
        y = torch.tanh(self.b(torch.tanh(self.a(x)))) * self.gate.detach()
        with torch.no_grad():
            self.seen.copy_(y.mean(0))
        y = torch.tanh(self.c(y))
        return {"loss": y.square().mean(), "shown": self.shown(y)}


def train_partly(layout: dict[str, int]) -> tuple[Tensors, Tensors, torch.Tensor, list[str]]:
    batch = {"x": torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).double()}
    model = parallel(Partly, batch, micro_batches=1, **layout)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    shown = model.predict(**part(batch, model))["shown"]
    model(**part(batch, model))["loss"].backward()
    optimizer.step()
    without = [n for n, p in model.named_parameters() if p.grad is None]
    return model.full_state_dict(), model.full_gradients(), shown, without


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_frozen_unread_and_undifferentiated_parameters(layout: dict[str, int]) -> None:
    full, grads, shown, without = run_ranks(2 if layout else 1, train_partly, layout)[0]
    plain = build(Partly)
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.1)
    out = plain(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).double())
    out["loss"].backward()
    optimizer.step()
    dp = layout.get("dp", 1)
    torch.testing.assert_close(shown, out["shown"].chunk(dp)[0])
    assert full.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-12, atol=1e-14, msg=name)
    assert grads.keys() == {n for n, p in plain.named_parameters() if p.grad is not None}
    if "pp" not in layout:
        assert set(without) == {n for n, p in plain.named_parameters() if p.grad is None}


def test_a_model_whose_weights_were_taken_is_refused() -> None:
    model = Words()
    merakc.auto_parallel(model, words(0), cluster=NOMINAL_CPU)
    outer = nn.Sequential(model)
    for again in (model, outer):
        with pytest.raises(ConfigError, match="was given to auto_parallel before, which took its"):
            merakc.auto_parallel(again, words(0), cluster=NOMINAL_CPU)
    model.to_empty(device="cpu").load_state_dict(Words().state_dict())
    merakc.auto_parallel(model, words(0), cluster=NOMINAL_CPU)


class Listed(nn.Module):
    """Layers and buffers that are registered in another order on rank 1, as sets have one."""

    def __init__(self, *, layers: bool, buffers: bool) -> None:
        super().__init__()
        names = ["one", "two", "three"]
        turned = names[::-1] if dist.is_initialized() and dist.get_rank() else names
        self.names = set(names)
        self.layers = nn.ModuleDict({n: nn.Linear(4, 4) for n in (turned if layers else names)})
        for name in turned if buffers else names:
            self.register_buffer(name, torch.full((4,), float(len(name))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("one", "two", "three"):
            x = self.layers[name](x) * getattr(self, name)
        return x.square().mean()


def listed_otherwise(layout: dict[str, int], layers: bool) -> float | str:
    torch.manual_seed(dist.get_rank())  # so that rank 0's weights are taken
    model = Listed(layers=layers, buffers=True)
    with pytest.warns(MerakWarning) if not layers and dist.get_rank() == 0 else nullcontext():
        try:
            model = merakc.auto_parallel(model, torch.ones(4, 4), cluster=NOMINAL_CPU, **layout)
        except MismatchError as error:
            return str(error)
    loss = model(torch.ones(4 // layout.get("dp", 1), 4))
    loss.backward()
    full = model.full_state_dict()
    wanted = {"one": 3.0, "two": 3.0, "three": 5.0}
    assert all((full[n] == value).all() for n, value in wanted.items() if full)
    return loss.item()


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_buffers_may_stand_in_any_order_and_parameters_in_one(layout: dict[str, int]) -> None:
    torch.manual_seed(0)
    alone = Listed(layers=False, buffers=False)(torch.ones(4, 4)).item()
    assert run_ranks(2, listed_otherwise, layout, False) == pytest.approx([alone] * 2)
    for text in run_ranks(2, listed_otherwise, layout, True):
        assert "the ranks differ in names, order and shapes of parameters" in str(text)
        assert "PYTHONHASHSEED" in str(text)


class Named(nn.Module):
    """Its batch has the names of a parameter and of a buffer, and a parameter that of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.loss, self.w = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.ones(2))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.full((2,), 0.5))

    def forward(self, x: torch.Tensor, w: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """The loss, weighed by samples."""
        y = (self.layers(x) * self.w.sum() * self.seen.sum()).square().mean(1)
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean(), alpha=0.1)
        return (y * w).sum() / w.sum() * seen + self.loss.square()


def train_named(options: dict[str, object]) -> list[object]:
    """Losses, gradients and state of two steps."""
    batch = {"x": torch.arange(8.0 * WIDTH).view(8, WIDTH).sin().double()}
    batch |= {"w": torch.arange(1.0, 9.0).double(), "seen": torch.tensor(2.0).double()}
    model, found = build(Named), list[object]()
    if options:
        example = {k: v.chunk(2)[0] if v.dim() and "dp" in options else v for k, v in batch.items()}
        model = merakc.auto_parallel(model, example, cluster=NOMINAL_CPU, **options)
        shared = {"seen": batch.pop("seen")}
        batch = {**part(batch, model), **shared}
    for _ in range(2):
        model.zero_grad()
        loss = model(**batch)
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        found += [loss.detach(), model.full_gradients() if options else grads]
    return [*found, {**(model.full_state_dict() if options else model.state_dict())}]


@pytest.mark.parametrize(
    "options", [{"pp": 2, "micro_batches": 2}, {"dp": 2, "state_shards": "zero-3"}]
)
def test_names_are_those_of_their_kind(options: dict[str, object]) -> None:
    """A batch, the state and the loss may share names."""
    found, wanted = run_ranks(2, train_named, options)[0], train_named({})
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
