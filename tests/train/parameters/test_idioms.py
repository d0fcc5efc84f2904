"""What people do with parameters between steps: as in one process, or refused, on every plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from merakc.equality.ranks import run_ranks
from merakc.errors import ConfigError, PlanError
from merakc.machines.cluster import NOMINAL_CPU


class Net(nn.Module):
    """Linear layers and a norm, of which tp splits some parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.c, self.d = nn.Linear(8, 12), nn.Linear(12, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """A loss."""
        h = torch.tanh(self.b(torch.tanh(self.norm(self.a(x)))))
        return {"loss": self.d(torch.tanh(self.c(h))).square().mean()}


def loss_of(model: Any) -> torch.Tensor:
    x = torch.linspace(-1, 2, 64, dtype=torch.float64).view(8, 8)
    rank, size = getattr(model, "data_parallel_rank", 0), getattr(model, "data_parallel_size", 1)
    return model(x.chunk(size)[rank])["loss"]  # type: ignore[no-any-return]


def trained(
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    penalty: Callable[[], Any] = lambda: 0.0,
    update: Callable[[nn.Parameter], object] | None = None,
    steps: int = 1,
) -> float:
    """The loss after a step or more, of an optimizer or by hand."""
    for _ in range(steps):
        (loss_of(model) + penalty()).backward()
        if optimizer is not None:
            optimizer.step()
        for p in model.parameters() if update is not None else ():
            with torch.no_grad():
                update(p)
        model.zero_grad()
    return loss_of(model).item()


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(groups: list[tuple[list[nn.Parameter], dict[str, float]]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": p, **o} for p, o in groups if p], lr=0.05)


def by_type(model: Any) -> float:
    decayed = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    rest = [p for p in model.parameters() if p not in decayed]
    first = [p for p in model.parameters() if p in decayed]
    return trained(model, adamw([(first, {"weight_decay": 0.5}), (rest, {"weight_decay": 0.0})]))


def by_size(model: Any) -> float:
    every = list(model.parameters())
    large = [p for p in every if p.numel() > 100]
    small = [p for p in every if p.numel() <= 100]
    return trained(model, adamw([(large, {"weight_decay": 0.5}), (small, {"weight_decay": 0.0})]))


def averaged(model: Any) -> float:
    """Evaluates with an average of the weights, whose memory takes the place of theirs."""
    averages = [p.detach().clone() for p in model.parameters()]

    def add(p: nn.Parameter) -> None:
        k = next(k for k, q in enumerate(model.parameters()) if q is p)
        p.sub_(0.1 * p.grad)
        averages[k].lerp_(p.detach(), 0.1)

    trained(model, update=add, steps=2)
    for p, average in zip(model.parameters(), averages, strict=True):
        p.data = average
    return loss_of(model).item()


def hooked(model: Any) -> float:
    for p in model.parameters():
        p.register_hook(lambda g: g / (g.norm() + 1))
    return trained(model, sgd(model))


def given(model: Any) -> float:
    """Takes whole gradients that were computed elsewhere."""
    optimizer = sgd(model)
    for p in model.parameters():
        p.grad = torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape)
    optimizer.step()
    model.zero_grad()
    return loss_of(model).item()


def replaced(model: Any) -> float:
    """Whole weights take the place of the own ones."""
    for p in model.parameters():
        p.data = torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape)
    return trained(model, sgd(model))


def constant(model: Any) -> float:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.01)
    return trained(model, sgd(model))


def differentiated(model: Any) -> float:
    found = torch.autograd.grad(loss_of(model), list(model.parameters()))
    return float(sum(g.norm() ** 2 for g in found))


def in_place(model: Any) -> float:
    """A number that is changed where it lies, and read then."""
    found = next(iter(model.parameters())).detach().norm()
    found.clamp_(min=100.0)
    return float(found)


def clipped_by_hook(model: Any) -> float:
    """A user's hook before the step is none of it."""

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    optimizer = sgd(model)
    optimizer.register_step_pre_hook(clip)
    return trained(model, optimizer)


def clipped_by_closure(model: Any) -> float:
    """Nor is what it calls back."""

    def closure() -> float:
        model.zero_grad()
        loss = loss_of(model) + sum(p.norm() for p in model.parameters())
        loss.backward()
        return float(loss.detach() + torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))

    optimizer = sgd(model)
    return sum(float(optimizer.step(closure)) for _ in range(2))  # type: ignore[arg-type]


def frozen(model: Any) -> float:
    """Whether there is anything to differentiate."""
    model.requires_grad_(False)
    found = loss_of(model).requires_grad
    model.requires_grad_(True)
    return float(found)


def state_of_optimizer(model: Any) -> float:
    """What is kept of each parameter, of the whole: behind the first step, too."""
    optimizer, found = adamw([(list(model.parameters()), {})]), list[float]()

    def look(*_: Any) -> None:
        states = [optimizer.state[p] for p in model.parameters()]
        found.extend(s["exp_avg"].norm().item() + float(s["exp_avg_sq"].max()) for s in states)

    optimizer.register_step_post_hook(look)
    return trained(model, optimizer, steps=2) + sum(found)


def matrices(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


RIGHT: dict[str, Callable[[Any], float]] = {
    "count": lambda m: sum(p.numel() for p in m.parameters()),
    "shapes": lambda m: sum(p.shape.numel() / p.shape[-1] for p in m.parameters()),
    "norm": lambda m: float(torch.norm(torch.stack([p.detach().norm() for p in m.parameters()]))),
    "total norm": lambda m: float(torch.nn.utils.get_total_norm(list(m.parameters()))),
    "largest": lambda m: max(p.abs().max().item() for p in m.parameters()),
    "equal": lambda m: all(torch.equal(p, p.detach().clone()) for p in m.parameters()),
    "differentiated": differentiated,
    "penalty": lambda m: trained(
        m, sgd(m), lambda: 0.1 * sum(p.pow(2).sum() for p in m.parameters())),
    "penalty of norms": lambda m: trained(
        m, sgd(m), lambda: 0.1 * sum(p.norm() for p in m.parameters())),
    "by hand": lambda m: trained(m, update=lambda p: p.sub_(0.1 * p.grad)),
    "LARS by hand": lambda m: trained(
        m, update=lambda p: p.sub_(0.1 * p.norm() * p.grad / p.grad.norm()), steps=2),  # type: ignore[union-attr]
    "rates by width": lambda m: trained(
        m, adamw([([p], {"lr": 0.1 / p.shape[-1]}) for p in m.parameters()])),
    "decay by type": by_type,
    "decay by size": by_size,
    "averages": averaged,
    "constant": constant,
    "moved": lambda m: trained(m.to("cpu:0").double(), sgd(m)),
    "numbers of numbers": lambda m: float(
        sum(torch.tensor([p.detach().norm() for p in m.parameters()]))),
    "a copied number": lambda m: float(
        torch.as_tensor(matrices(m)[-1].detach().norm(), dtype=torch.float32)),
    "a number in place": in_place,
    "closures": clipped_by_closure,
    "hooks of steps": clipped_by_hook,
    "Frobenius": lambda m: sum(float(torch.linalg.norm(p.detach().T)) for p in matrices(m)),
    "sums of float32": lambda m: sum(
        p.detach().float().sum(dtype=torch.float64).item() for p in m.parameters()),
    "flat": lambda m: sum(float((p.view(-1) * p.flatten()).detach().sum()) for p in m.parameters()),
    "lists": lambda m: sum(
        float(p.detach().norm()) for p in torch._foreach_mul([*m.parameters()], [*m.parameters()])),
    "all frozen": frozen,
    "state of optimizers": state_of_optimizer,
    "given gradients": given,
    "given weights": replaced,
    "hooks": hooked,  # these stay
}  # fmt: skip


def noisy(model: Any) -> float:
    return trained(model, update=lambda p: p.sub_(0.1 * torch.randn_like(p)))


def vector(model: Any) -> object:
    return torch.nn.utils.parameters_to_vector(model.parameters())


def from_vector(model: Any) -> None:
    values = torch.zeros(sum(p.numel() for p in model.parameters())).double()
    torch.nn.utils.vector_to_parameters(values, model.parameters())


def evaluated(model: Any) -> None:
    model.eval()
    try:
        loss_of(model).backward()
    finally:
        model.train()


def joined(model: Any) -> object:
    loss_of(model).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


REFUSED: dict[str, Callable[[Any], object]] = {
    "vector": vector,
    "from a vector": from_vector,
    "joined gradients": joined,
    "spectral norm": lambda m: [torch.linalg.svdvals(p) for p in m.parameters() if p.dim() == 2],
    "rows": lambda m: trained(m, update=lambda p: p.copy_(p / p.norm(dim=-1, keepdim=True))),
    "a vector of columns": lambda m: trained(m, update=lambda p: p.mul_(torch.ones(p.shape[-1]))),
    "elements": lambda m: [p.tolist() for p in m.parameters()],
    "a row": lambda m: [p[0].norm() for p in m.parameters()],
    "some rows": lambda m: [p[: p.shape[0] // 2].norm() for p in m.parameters()],
    "one column": lambda m: [p.narrow(-1, 0, 1).norm() for p in m.parameters()],
    "spectral": lambda m: [torch.linalg.norm(p, 2) for p in matrices(m)],
    "itself turned": lambda m: [p.flatten() + p.T.flatten() for p in matrices(m)],
    "lists of columns": lambda m: torch._foreach_mul(
        matrices(m), [torch.ones(p.shape[-1]).double() for p in matrices(m)]),
    "largest of lists": lambda m: torch._foreach_max([*m.parameters()]),
    "into another": lambda m: [
        torch.add(p.detach(), 1, out=torch.zeros(p.shape).double()) for p in m.parameters()],
    "below": lambda m: [torch.ops.aten.mm.default(p, p.T) for p in matrices(m)],
    "in evaluation": evaluated,
    "noise": noisy,
    "random": lambda m: [nn.init.normal_(p) for p in m.parameters()],
    "fan": lambda m: [nn.init.xavier_uniform_(p) for p in m.parameters() if p.dim() == 2],
    "again": lambda m: merakc.auto_parallel(m, torch.ones(8, 8).double()),
    "within": lambda m: merakc.auto_parallel(nn.Sequential(m), torch.ones(8, 8).double()),
    "FSDP": lambda m: torch.distributed.fsdp.fully_shard(m),
    "compiled": lambda m: merakc.auto_parallel(
        torch.compile(Net(), backend="eager"), torch.ones(8, 8).double()),
    "half": lambda m: loss_of(m.half()),
    "assigned": lambda m: (m.load_state_dict(Net().state_dict(), assign=True), loss_of(m)),
}  # fmt: skip


def built(layout: dict[str, Any]) -> Any:
    batch = torch.ones(8 // layout.get("dp", 1), 8).double()
    return merakc.auto_parallel(Net(), batch, micro_batches=2, cluster=NOMINAL_CPU, **layout)


def idioms(layout: dict[str, Any]) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    model, start = built(layout), Net().state_dict()
    for name, act in RIGHT.items():
        model.load_state_dict(start)
        model.zero_grad()
        found[name] = act(model)
    for name, act in REFUSED.items():
        model.load_state_dict(start)
        try:
            act(model)
        except ConfigError as error:
            found[name] = str(error)
    return found


LAYOUTS: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {"dp": 2, "state_shards": "zero-3"}]
# What to do instead.
REMEDY = re.compile(
    r"[;:,.] (?:Norms|averages|combine|call|give|make|use|copy|change|leave|compute|a part|"
    r"initialise|train|so values|model\.full|merakc\.|x\.)"
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_idioms(layout: dict[str, Any]) -> None:
    wanted = {name: act(Net()) for name, act in RIGHT.items()}
    for found in run_ranks(2, partial(idioms, layout)):
        told = {n: str(found.pop(n, None)) for n in REFUSED}
        assert found == pytest.approx(wanted, rel=1e-10)
        assert {name: text for name, text in told.items() if not REMEDY.search(text)} == {}


class Pair(nn.Module):
    """A network, and one that follows it, as of deep Q-learning or of momentum contrast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.t = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.q(x) - self.t(x.tanh()) - x).square().mean()}


def _follow_names(model: Any) -> None:
    given = model.q.state_dict()
    for name, value in model.t.state_dict().items():
        if name in given:
            value.mul_(0.9).add_(given[name], alpha=0.1)


FOLLOW: dict[str, Callable[[Any], object]] = {
    "a state": lambda m: m.t.load_state_dict(m.q.state_dict()),
    "part of a state": lambda m: m.t.load_state_dict(m.q.state_dict(), strict=False),
    "values of states": lambda m: [
        t.copy_(q) for t, q in zip(m.t.state_dict().values(), m.q.state_dict().values(),
                                   strict=False)],
    "names of states": _follow_names,
    "copies": lambda m: [t.copy_(q) for t, q in zip(m.t.parameters(), m.q.parameters(),
                                                    strict=True)],
    "data": lambda m: [t.data.mul_(0.9).add_(0.1 * q.data)
                       for t, q in zip(m.t.parameters(), m.q.parameters(), strict=True)],
    "between": lambda m: [t.lerp_(q, 0.1) for t, q in zip(m.t.parameters(), m.q.parameters(),
                                                          strict=True)],
    "lists": lambda m: torch._foreach_lerp_([*m.t.parameters()], [*m.q.parameters()], 0.1),
}  # fmt: skip


def followed(layout: dict[str, Any] | None) -> dict[str, float | str]:
    """The loss after two steps, each with the other network brought near."""
    found: dict[str, float | str] = {}
    model: Any = Pair()
    if layout is not None:
        batch = torch.ones(8 // layout.get("dp", 1), 8).double()
        model = merakc.auto_parallel(model, batch, cluster=NOMINAL_CPU, **layout)
    for name, follow in FOLLOW.items():
        model.load_state_dict(Pair().state_dict())
        model.zero_grad()
        optimizer = torch.optim.SGD(model.q.parameters(), lr=0.1)
        try:
            for _ in range(2):
                loss_of(model).backward()
                optimizer.step()
                model.zero_grad()
                with torch.no_grad():
                    follow(model)
            found[name] = loss_of(model).item()
        except ConfigError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "micro_batches": 1}], ids=str)
def test_a_network_follows_another(layout: dict[str, Any]) -> None:
    """Where both are split alike; in stages of their own each has nothing of the other."""
    wanted = followed(None)
    for found in run_ranks(2, partial(followed, layout)):
        if "tp" in layout:
            assert found == pytest.approx(wanted, rel=1e-10)
        else:
            assert {n: x for n, x in found.items() if not REMEDY.search(str(x))} == {}


class Extra(Net):
    """With a parameter that no forward reads; most ranks hold no element of it."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Parameter(torch.ones(1).double())


def penalized(layout: dict[str, Any] | None) -> tuple[dict[str, float], bool]:
    """The sum of each gradient of a loss with a penalty, and whether all parameters have one."""
    model: Any = Extra()
    if layout is not None:
        batch = torch.ones(8 // layout.get("dp", 1), 8).double()
        model = merakc.auto_parallel(model, batch, cluster=NOMINAL_CPU, **layout)
    (loss_of(model) + sum(p.square().sum() for p in model.parameters())).backward()
    own = {n: p.grad for n, p in model.named_parameters()}
    assert all(p.grad != None for p in model.parameters() if p.grad is not None)  # noqa: E711
    every = own if layout is None else model.full_gradients()
    return {n: g.sum().item() for n, g in every.items()}, None not in own.values()


@pytest.mark.parametrize(
    "layout", [{"dp": 2, "state_shards": "zero-1"}, {"pp": 2, "micro_batches": 1}], ids=str
)
def test_a_penalty_gives_gradients_to_all(layout: dict[str, Any]) -> None:
    wanted, _ = penalized(None)
    ranks = run_ranks(2, partial(penalized, layout))
    assert ranks[0][0] == pytest.approx(wanted, rel=1e-10)
    if "dp" in layout:
        assert [every for _, every in ranks] == [True, True]


class Weighed(Net):
    """With weights of losses that it does not read itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.tensor(0.3).double())
        self.row = nn.Parameter(torch.tensor([0.2]).double())
        self.many = nn.Parameter(torch.tensor([0.3, 0.1, 0.2]).double())


def written_into(m: Any, loss: torch.Tensor) -> torch.Tensor:
    """What has no gradients has them once something with gradients is written into it."""
    part = m.many.detach()
    part.mul_(loss)
    return part.sum()


# Of what ranks have parts of.
NEEDS_ALL = "many", "matrices", "written into", "of a list"
MEETINGS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "one": lambda m, loss: loss * torch.exp(-m.one) + m.one,
    "a row of one": lambda m, loss: (m.row.exp() * loss).sum() + m.row.sum(),
    "reduced": lambda m, loss: loss * m.many.sum() + loss * m.a.weight.norm(),
    "a single penalty": lambda m, loss: loss + 0.1 * m.b.weight.square().sum(),
    "many": lambda m, loss: (loss * m.many.exp()).sum(),
    "written into": written_into,
    "of a list": lambda m, loss: torch._foreach_mul([m.many], loss)[0].sum(),
    "matrices": lambda m, loss: sum(
        ((part.weight - loss) ** 2).mean() for part in (m.a, m.b, m.c, m.d)
    ),
}


def met(layout: dict[str, Any] | None) -> dict[str, dict[str, float] | str]:
    """The sums of gradients where a loss meets parameters, or the error."""
    model: Any = Weighed()
    if layout is not None:
        batch = torch.ones(8 // layout.get("dp", 1), 8).double()
        model = merakc.auto_parallel(model, batch, cluster=NOMINAL_CPU, **layout)
    found: dict[str, dict[str, float] | str] = {}
    for name, meet in MEETINGS.items():
        model.zero_grad()
        loss = loss_of(model)
        try:
            meet(model, loss).backward()
        except ConfigError as error:
            found[name] = str(error)
            continue
        own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        every = own if layout is None else model.full_gradients()
        found[name] = {n: g.sum().item() for n, g in every.items()}
    return found


@pytest.mark.parametrize(
    "layout",
    [{"dp": 2, "state_shards": "zero-1"}, {"tp": 2}, {"pp": 2, "micro_batches": 1}],
    ids=str,
)
def test_a_loss_meets_parameters_or_is_refused(layout: dict[str, Any]) -> None:
    """What meets a part would have the gradient of its elements alone."""
    wanted = met(None)
    for rank, found in enumerate(run_ranks(2, partial(met, layout))):
        for name, of in found.items():
            if isinstance(of, str):
                assert name in NEEDS_ALL
                assert "reduce the parameter first" in of
            elif rank == 0:
                assert of == pytest.approx(wanted[name], rel=1e-10), name
        assert isinstance(found["matrices"], str)


class Batched(Net):
    """With the statistics of batches in place of those of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16).double()  # type: ignore[assignment]


def averaged(layout: dict[str, Any] | None) -> tuple[str, dict[str, torch.Tensor]]:
    """What `update_bn` says, and the statistics of its batches, with its remedy where it is one."""
    model, batches = Batched(), torch.randn(3, 8, 8, dtype=torch.float64).unbind()
    if layout is None:
        torch.optim.swa_utils.update_bn(batches, model)
        return "", dict(model.named_buffers())
    own: Any = merakc.auto_parallel(model, batches[0], cluster=NOMINAL_CPU, **layout)
    said = ""
    try:
        torch.optim.swa_utils.update_bn(batches, own)
    except PlanError as error:
        said = str(error)
        norms = [m for m in own.modules() if isinstance(m, nn.BatchNorm1d)]
        with torch.no_grad():
            for norm in norms:
                norm.reset_running_stats()
            for k, given in enumerate(batches):
                for norm in norms:
                    norm.momentum = 1 / (k + 1)
                own(given)
    return said, own.full_state_dict()


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "micro_batches": 1}], ids=str)
def test_statistics_of_batch_norms_are_made_anew(layout: dict[str, Any]) -> None:
    _, wanted = averaged(None)
    (said, found), *_ = run_ranks(2, partial(averaged, layout))
    assert ("tp" in layout) == ("with momentum 1.0, 1/2, 1/3" in said)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
