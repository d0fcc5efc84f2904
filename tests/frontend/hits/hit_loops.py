"""Loops over the experts that were hit, in the forms that people write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.frontend.small import WIDTH, Small, linear, randn

EXPERTS, TOKENS = 5, 7


def model_of(form: Any) -> Small:
    """Experts, a router that chooses by `form`, a parameter for all, and a sum behind."""
    torch.manual_seed(0)
    experts = nn.ModuleList(linear() for _ in range(EXPERTS))
    return Small(form, experts=experts, router=linear(WIDTH, EXPERTS), own=nn.Parameter(randn(1)))


def of_one_hot(m: Any, x: Tensor) -> Tensor:
    """As transformers has them."""
    weights, chosen = m.router(x).softmax(-1).topk(2, -1)
    out, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for k in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        choice, rows = torch.where(mask[k].squeeze(0))
        made = m.experts[int(k[0])](x[None, rows].reshape(-1, x.shape[-1]))
        out.index_add_(0, rows, made * weights[rows, choice, None])
    return out.square().sum()


def by_name(m: Any, x: Tensor) -> Tensor:
    """Numbers in texts, a list of places, a mask by comparison."""
    chosen, out = m.router(x).argmax(-1), x.clone()
    (hit,) = torch.where(F.one_hot(chosen, EXPERTS).bool().any(0))
    for k in hit:
        mask = chosen == k.item()
        out[mask] = m.get_submodule(f"experts.{k}")(x[mask])
    return out.square().sum()


def within_capacity(m: Any, x: Tensor) -> Tensor:
    """Of the rows of an expert the first two."""
    taken = F.one_hot(m.router(x).argmax(-1), EXPERTS)
    taken, out = taken * (taken.cumsum(0) <= 2), torch.zeros_like(x)
    for (k,) in taken.sum(0).nonzero():
        rows = taken[:, k].nonzero().squeeze(1)
        out[rows] += m.experts[k](x[rows])
    return out.square().sum()


FORMS = (of_one_hot, by_name, within_capacity)


def _loop(turn: Any, behind: Any = lambda out, kept: out.square().sum()) -> Any:
    def form(m: Any, x: Tensor) -> Tensor:
        chosen, out, kept = m.router(x).argmax(-1), torch.zeros_like(x), dict[str, Any]()
        mask = F.one_hot(chosen, EXPERTS)
        for k in mask.sum(0).nonzero().squeeze(1):
            (rows,) = torch.where(mask[:, k])
            out = turn(m, x, out, rows, m.experts[k], kept, int(k))
            if kept.get("ends"):
                break
        loss: Tensor = behind(out, kept)
        return loss

    return form


def _plain(m: Any, x: Tensor, out: Tensor, rows: Tensor, expert: Any, kept: Any, k: int) -> Tensor:
    return out.index_add(0, rows, expert(x[rows]))


def _counted(*given: Any) -> Tensor:
    given[5]["count"] = given[5].get("count", 0) + 1
    return _plain(*given)


def _first(*given: Any) -> Tensor:
    out = _plain(*given)
    return out if given[5].setdefault("first", given[6]) != given[6] else out.index_add(
        0, given[3], given[1][given[3]])  # fmt: skip


def _ending(*given: Any) -> Tensor:
    given[5]["ends"] = given[6] == 2
    return _plain(*given)


def _summed(*given: Any) -> Tensor:
    given[5]["sum"] = given[5].get("sum", 0) + given[4].weight.sum()
    return _plain(*given)


def _of_rows(*given: Any) -> Tensor:
    given[5]["sum"] = given[5].get("sum", 0) + given[1][given[3]].mean()
    return _plain(*given)


def _added(m: Any, x: Tensor, out: Tensor, rows: Tensor, expert: Any, kept: Any, k: int) -> Tensor:
    return out + torch.zeros_like(x).index_add(0, rows, expert(x[rows]))


def _drawn(m: Any, x: Tensor, out: Tensor, rows: Tensor, expert: Any, kept: Any, k: int) -> Tensor:
    return out.index_add(0, rows, F.dropout(expert(x[rows])))


def _other_mask(*given: Any) -> Tensor:
    (rows,) = torch.where(given[1][:, 0] > given[6])
    return _plain(*given[:3], rows, *given[4:])


def _aside(m: Any, x: Tensor, out: Tensor, rows: Tensor, expert: Any, kept: Any, k: int) -> Tensor:
    scale = expert.weight.sum()
    return out.index_add(0, rows, expert(x[rows]) * scale)


def _kept_in_module(*given: Any) -> Tensor:
    given[0].last = given[6]
    return _plain(*given)


def _told(out: Tensor, kept: Any) -> Tensor:
    return out.square().sum() * kept.get("count", 0) + kept.get("sum", 0)


OTHERS: tuple[tuple[Any, str], ...] = (
    (_loop(_counted, _told), "depends on which turns Python went through"),
    (_loop(_first), "depends on which turns Python went through"),
    (_loop(_ending), "a turn ends the loop"),
    (_loop(_summed, _told), "a parameter is read aside from rows"),
    (_loop(_of_rows, _told), "read behind a turn"),
    (_loop(_added), "read behind a turn"),
    (_loop(_drawn), "random numbers"),
    (_loop(_other_mask), "a mask is not known"),
    (_loop(_aside), "a parameter is read aside from rows"),
    (_loop(_kept_in_module), "the forward is another"),
)
