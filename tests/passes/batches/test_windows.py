"""Parts that leave out copies alone are taken from what is copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from merakc.errors import RecordError
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.batches.recorded import in_parts
from merakc.passes.batches.windows import with_windows
from tests.recorded import recorded

FRAMES, PATCHES, WIDTH = 3, 4, 5
Take = Callable[[Tensor, int], Tensor]


class Videos(nn.Module):
    """A token before the patches of each frame, which goes on as one of each video."""

    def __init__(self, take: Take) -> None:
        super().__init__()
        self.take = take
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH).double())
        self.places = nn.Parameter(torch.randn(1, 1 + PATCHES, WIDTH).double())
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        joined = torch.cat([self.token.expand(len(rows), -1, -1), rows], 1) + self.places
        taken = self.take(joined, len(x))
        patches = joined[:, 1:].reshape(len(x), -1, WIDTH)
        return (
            self.layer(taken.reshape(len(x), -1, WIDTH).mean(1) + patches.mean(1)).square().mean()
        )


COPIES: dict[str, Take] = {
    "first rows, then their first place": lambda y, n: y[:n, 0, :],
    "their first place, then the first rows": lambda y, n: y[:, 0][:n],
    "both are slices": lambda y, n: y[n : 2 * n, :1],
    "the last rows": lambda y, n: y[-n:].select(-2, 0),
}
OTHERS: dict[str, Take] = {
    "patches of some rows": lambda y, n: y[:n, 1],
    "tokens and patches": lambda y, n: y[:n, :2],
    "every third row": lambda y, n: y[::FRAMES, 0],
}


def _videos(samples: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(samples, FRAMES, PATCHES, WIDTH).double()}


@pytest.mark.parametrize("name", [*COPIES, *OTHERS])
def test_what_is_taken_and_its_gradients_stay(name: str) -> None:
    model, batch = Videos((COPIES | OTHERS)[name]), _videos()
    graph = recorded(model, batch).graph
    made = with_windows(graph)
    made.verify()
    assert (made != graph) == (name in COPIES)
    state = {**dict(model.named_parameters()), **batch}
    values = [interpret(g, {i.name: state[i.target] for i in g.inputs})[0] for g in (graph, made)]
    assert torch.equal(*values)
    grads = [torch.autograd.grad(v, list(model.parameters())) for v in values]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def _kept(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Windows leave values, dtypes and gradients as they are."""
    graph = recorded(model, batch).graph
    made = with_windows(graph)
    state = {**dict(model.named_parameters()), **batch}
    values = [interpret(g, {i.name: state[i.target] for i in g.inputs})[0] for g in (graph, made)]
    assert torch.equal(*values)
    assert graph.grad_values() & {o.ref for o in graph.outputs} == made.grad_values() & {
        o.ref for o in made.outputs
    }


@pytest.mark.parametrize("without", ["join", "rows", ""])
def test_gradients_and_dtypes_pass_as_they_did(without: str) -> None:
    """A token of another dtype, or a join, or rows of it, that are made without gradients."""

    class Token(Videos):
        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            token = self.token.expand(len(rows), -1, -1)
            with torch.set_grad_enabled(without != "join"):
                joined = torch.cat([token if without else token.float(), rows], 1)
            with torch.set_grad_enabled(without != "rows"):
                first = joined[: len(x)]
            return first[:, 0].square().mean()

    _kept(Token(COPIES["both are slices"]), _videos())


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("parts", [4, 8])
def test_copies_of_other_samples_do_not_couple(name: str, parts: int) -> None:
    found = recorded(Videos(COPIES[name]), _videos(), parts)
    assert in_parts(found, parts).head is None


@pytest.mark.parametrize("name", ["patches of some rows", "tokens and patches"])
def test_other_samples_couple(name: str) -> None:
    with pytest.raises(RecordError, match="some of the samples are taken"):
        in_parts(recorded(Videos(OTHERS[name]), _videos(), 4), 4)
