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


def _asking(has_none: Any) -> Any:
    """A loop over all experts that passes over those of which `has_none` says so."""

    def form(m: Any, x: Tensor) -> Tensor:
        weights, chosen = m.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for k, expert in enumerate(m.experts):
            rows, choice = torch.where(chosen == k)
            if has_none(rows, chosen == k):
                continue
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, choice, None])
        return out.square().sum()

    return form


def _guarded(m: Any, x: Tensor) -> Tensor:
    """What is written under a question about a mask of rows."""
    best, chosen = m.router(x).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        mask = chosen == k
        if mask.any():
            out[mask] += expert(x[mask])
    return (out * best[:, None]).square().sum()


def _of_classes(m: Any, x: Tensor) -> Tensor:
    """Masks out of numbers in their one-hot form, and rows that are read before the question."""
    scores = m.router(x).softmax(-1)
    masks, out = F.one_hot(scores.argmax(-1), EXPERTS).t(), x.clone()
    for mask, expert, score in zip(masks, m.experts, scores.unbind(1), strict=True):
        places = mask.nonzero().squeeze(1)
        rows = x[places]
        if rows.shape[0] > 0:
            out[places] = expert(rows) * score[places, None]
    return out.square().sum()


ASKED = (
    _asking(lambda rows, mask: rows.numel() == 0),
    _asking(lambda rows, mask: not rows.numel()),
    _asking(lambda rows, mask: len(rows) == 0),
    _asking(lambda rows, mask: rows.shape[0] < 1),
    _asking(lambda rows, mask: not mask.any()),
    _asking(lambda rows, mask: mask.sum() == 0),
    _asking(lambda rows, mask: mask.sum(-1).sum().item() == 0),
    _guarded,
    _of_classes,
)


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


def _kept_on(turn: Any, none: Any = lambda m, x, out, kept: out, behind: Any = None) -> Any:
    """A loop with a question, what it does with rows, and where there are none."""

    def form(m: Any, x: Tensor) -> Tensor:
        chosen, kept = m.router(x).argmax(-1), dict[str, Any]()
        out = torch.zeros_like(x)
        for k, expert in enumerate(m.experts):
            (rows,) = torch.where(chosen == k)
            if rows.numel() == 0:
                out = none(m, x, out, kept)
            else:
                out = turn(m, x, out, rows, expert, kept, k)
        loss: Tensor = (behind or _told_sum)(out, kept)
        return loss

    return form


def _told_sum(out: Tensor, kept: Any) -> Tensor:
    return out.square().sum() + kept.get("sum", 0)


def _count(m: Any, x: Tensor, out: Tensor, kept: Any) -> Tensor:
    kept["count"] = kept.get("count", 0) + 1
    return out


def _by_threshold(m: Any, x: Tensor) -> Tensor:
    """None may have rows, and the router no gradient then."""
    scores, out = m.router(x), torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        (rows,) = torch.where(scores[:, k] > 0)
        if rows.numel() == 0:
            continue
        out = out.index_add(0, rows, expert(x[rows]) * scores[rows, k, None])
    return out.square().sum()


def _some_classes(m: Any, x: Tensor) -> Tensor:
    """The last is no expert's."""
    weights, chosen = m.router(x).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for k, expert in enumerate(list(m.experts)[:-1]):
        (rows,) = torch.where(chosen == k)
        if rows.numel() > 0:
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
    return out.square().sum()


def _used_again(m: Any, x: Tensor) -> Tensor:
    """Another use of the same rows asks nothing: the gradient is zero there, and not none."""
    chosen, out = m.router(x).argmax(-1), torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        (rows,) = torch.where(chosen == k)
        if rows.numel() > 0:
            out = out.index_add(0, rows, x[rows] * 2)
        out = out.index_add(0, rows, expert(x[rows]))
    return out.square().sum()


def _of_two(m: Any, x: Tensor) -> Tensor:
    chosen, out = m.router(x).argmax(-1), torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        (rows,) = torch.where(chosen == k)
        if rows.numel() > 1:
            out = out.index_add(0, rows, expert(x[rows]))
    return out.square().sum()


ASKING_OTHERS: tuple[tuple[Any, str], ...] = (
    (_kept_on(_plain, _count, _told), "depends on which turns Python went through"),
    (_kept_on(_plain, lambda m, x, out, kept: out * 2), "depends on which turns Python"),
    (_kept_on(_counted, behind=_told), "depends on which turns Python went through"),
    (_kept_on(_of_rows), "read behind a turn"),
    (_kept_on(_added), "depends on which turns Python went through"),
    (_kept_on(_summed), "depends on which turns Python went through"),
    (_kept_on(_drawn), "random numbers"),
    (_kept_on(_aside), "a parameter is read aside from rows"),
    (_kept_on(_kept_in_module), "the forward is another"),
    (_by_threshold, "a parameter is read aside from rows"),
    (_some_classes, "a parameter is read aside from rows"),
    (_used_again, "depends on which turns Python went through"),
    (_of_two, "control flow depends on the data"),
)
