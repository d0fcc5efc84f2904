"""In-place calls through views: the graph's values are what eager leaves in memory."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from merakc.errors import RecordError
from merakc.frontend.record import record
from merakc.ir.graph import Ref
from tests.frontend.against_eager import check, inputs_of, run_graph
from tests.frontend.small import Small, here, linear, randn

# What a forward does to `y` [4, 6], which requires a gradient.
WRITES = """
y[..., 1:] = y[..., :-1].clone() * 2
y[..., 1:] = y[..., :-1] * 2
y[0] = 0
y[0] += y[1]
z = torch.complex(y, y + 1); z[:, -3:] = z[:, :3].conj() * 2; y = z.abs()
z = torch.complex(y, y); z[1] = z[2].conj(); z[..., -1] *= 1j; y = z.real + 2 * z.imag
y[:, 1] = y[:, 2]
y[-1, -2:] = 0
y[:, ::2].mul_(2)
y[:, None, 0].mul_(2)
y[...].mul_(2)
y.t()[2] = y[:, 0] * 3
z = y.transpose(0, 1); z += 1; z.mul_(2)
y.mT[0].mul_(2)
y.view(2, 2, 6).permute(2, 0, 1)[0].mul_(2)
y.view(2, 2, 6).movedim(0, 2)[0].mul_(2)
y.view(-1)[3:7].mul_(2)
y.reshape(2, 12)[0].add_(1)
y.flatten()[2].mul_(9)
y.unflatten(1, (2, 3))[:, 1].mul_(2)
y.unsqueeze(1).squeeze(1).mul_(2)
y.narrow(1, 2, 3).mul_(2)
y.diagonal().mul_(0.5)
y.diagonal(1).zero_()
y.contiguous().mul_(2)
y.to(torch.float64).mul_(2)
z = y.float(); z.mul_(2); y = y + z
v = y[0]; y.mul_(2); y = y + v
v = y[0]; w = v[1:3]; w.mul_(2); v.add_(1); y = y + w.sum()
a = y.t(); b = y.view(-1); a[0].mul_(2); b[1].add_(1); y = y * a.sum() * b[3]
y.masked_fill_(y > 0, -1.0)
y.masked_fill_(y > 0, torch.tensor(2.0))
y[torch.tensor([0, 2])] = 1.5
y[torch.tensor([0, 2]), torch.tensor([1, 1])] += y[1, :2]
y[y > 0] = 0
y[:, [0, 1]] = y[:, [1, 0]]
y[:, torch.tensor([True, False, True, False, True, True])] = 2.0
y.index_add_(0, torch.tensor([0, 0]), y[2:].clone())
y.index_copy_(0, torch.tensor([0, 1]), y[2:].clone())
y.index_fill_(1, torch.tensor([0, 1]), 3.0)
y.scatter_(1, torch.zeros(4, 1, dtype=torch.long), 5.0)
y.scatter_add_(1, torch.zeros(4, 2, dtype=torch.long), y[:, :2].clone())
y.put_(torch.tensor([1, 2]), torch.tensor([0.0, 1.0], dtype=torch.float64))
y = F.relu(y, inplace=True)
y = F.silu(y, inplace=True)
y = F.hardtanh(y, inplace=True)
y = F.leaky_relu(y, inplace=True)
y.clamp_(min=0.1)
y.clamp_(-0.5, 0.5)
y.exp_()
y.pow_(2)
y.neg_().triu_().tril_(1)
y.cumsum_(0)
y.addcmul_(y.clone(), y.clone(), value=2)
y.addmm_(y[:, :3].clone(), y[:3].clone())
y.lerp_(y.clone() * 2, 0.3)
y.copy_(y.clone() * 2)
y[1:].copy_(y[0])
y.copy_(y.float())
y.add_(y.clone(), alpha=0.5)
y -= 1; y *= 2; y /= 3; y **= 2
r = y; y = y * 2; y += r
y.zero_(); y.add_(1)
y[0].fill_(y[1, 0])
y.as_strided((2,), (1,)).mul_(2)
y.unsqueeze_(0)
y.unsqueeze_(0).squeeze_(0)
v = y[0]; y.t_(); y = y[0].sum() * v
y.transpose_(0, 1); y[0].mul_(2)
v = y[0]; w = y * 3; y.mul_(3); y = v * w.sum()
o = torch.empty(4, 6, dtype=y.dtype); o[:2] = y[:2]; o[2:] = 1; y = o
o = y.new_zeros(4, 8); o[:, :6] = y; y = o
o = torch.tensor([1.0, 2.0], dtype=y.dtype); o[0] = y[0, 0]; y = y * o.sum()
o = torch.empty(4, 6, dtype=y.dtype); torch.add(y.detach(), 1, out=o); y = y + o
o = torch.arange(24.0).view(4, 6); a, b = o.split(3, -1); a.mul_(2); b.add_(a); y = y * o
o = torch.arange(24.0).view(4, 6); a, b = o.split([2, 4], 1); b.mul_(2); o.add_(1); y = y * a.sum()
o = torch.zeros(4, 6); [r.fill_(i) for i, r in enumerate(o.unbind(-1))]; y = y * o
a, b = torch._foreach_mul([x, y], 2.0); torch._foreach_add_([a], 1.0); y = a * b
z = torch.zeros(4, 6); d = z.detach(); d.add_(2); y = y * z
with torch.no_grad(): y[0] = 0
with torch.no_grad(): y.clamp_(min=0.1).mul_(2)
v = y[1:]; w = v + 2; with torch.no_grad(): v.t().add_(1); y = y * w.sum() + v.sum()
z = y.clone(); with torch.no_grad(): v = z * z[0].fill_(2); y = z + y * v
""".strip().splitlines()

REFUSED = {
    "y.unsqueeze(0).expand(3, -1, -1)[0].mul_(2)": "aten.expand",
    "y.as_strided((2, 3), (1, 1)).mul_(2)": "aten.unfold",
    "y.unfold(1, 2, 2)[0].mul_(2)": "aten.unfold",
    "y.view(torch.int64).bitwise_and_(7)": "aten.view.dtype",
    "y.detach().mul_(2)": "autograd does not see",
    "y.data.mul_(2)": "autograd does not see",
    "with torch.no_grad(): y.detach().clamp_(0, 1)": "autograd does not see",
    "with torch.no_grad(): s.layer.weight.clamp_(-1, 1)": "its parameter 'layer.weight'",
    "s.layer.weight.data[0].zero_()": "its parameter 'layer.weight'",
    "y.resize_(3)": "aten.resize_",
}


def program(statements: str) -> Callable[[Any, Tensor], Tensor]:
    """A forward that applies statements to a fresh [4, 6] tensor and sums what is left in `y`."""
    body = textwrap.indent("\n".join(statements.split("; ")), "    ")
    source = f"def forward(s, x):\n    y = s.layer(x) * 1\n{body}\n    return y.pow(2).sum()\n"
    found: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), {"torch": torch, "F": F}, found)
    forward: Callable[[Any, Tensor], Tensor] = found["forward"]
    return forward


@pytest.mark.parametrize("statements", WRITES)
def test_a_write_is_as_in_eager(statements: str) -> None:
    torch.manual_seed(0)
    check(Small(program(statements), layer=linear()), randn(4, 6), relative=1e-15)


@pytest.mark.parametrize("statements", REFUSED)
def test_what_cannot_be_undone_is_refused_with_the_line(statements: str) -> None:
    forward = program(statements)
    with pytest.raises(RecordError) as caught:
        record(Small(forward, layer=linear()), (randn(4, 6),), {})
    assert here(forward, 2) in str(caught.value)
    assert REFUSED[statements] in str(caught.value)


def test_a_write_to_the_batch_is_seen_and_stays_inside() -> None:
    def forward(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x[:, 0] = 0
        x.mul_(2)
        return s.layer(x).sum(), x

    x = randn(4, 6)
    before = x.clone()
    check(Small(forward, layer=linear()), x)
    assert torch.equal(x, before)


def test_a_view_made_under_no_grad_has_no_gradient() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.layer(x) * 2
        with torch.no_grad():
            v = y[0]
        return v.pow(2).sum() + y.sum()

    check(Small(forward, layer=linear()), randn(4, 6))


def test_a_view_first_read_under_no_grad_keeps_its_gradient() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.layer(x) * 2
        v = y[0]
        y.mul_(3)
        with torch.no_grad():
            factor = v.sum()
        return v.pow(2).sum() * factor

    check(Small(forward, layer=linear()), randn(4, 6))


def test_zeros_are_filled_in() -> None:
    """As all numbers are: of that call there are rules."""

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.layer(x)
        y[:, 0].zero_()
        return y.sum()

    ops = [n.op for n in check(Small(forward, layer=linear()), randn(4, 6)).graph.nodes]
    assert "aten.fill.Scalar" in ops
    assert "aten.zero.default" not in ops


def test_buffers_written_through_views_leave_the_graph() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.rows[1].copy_(s.layer(x).detach().mean(0))
        s.count += 1
        return (s.layer(x) * s.rows[1] * s.count).sum()

    model = Small(forward, layer=linear(), rows=randn(3, 6), count=torch.zeros(()))
    graph = check(model, randn(4, 6)).graph
    assert [o.name for o in graph.outputs] == ["output", "rows", "count"]


# Random programs: every variable is a view, of any depth, of one of two tensors.
VIEWS: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda t, k: t[k % t.shape[0]],
    lambda t, k: t[..., k % t.shape[-1] :],
    lambda t, k: t.transpose(0, -1),
    lambda t, k: t.unsqueeze(k % (t.dim() + 1)),
    lambda t, k: t.reshape(-1) if t.is_contiguous() else t.permute(*reversed(range(t.dim()))),
    lambda t, k: t.diagonal(0, 0, -1) if t.dim() > 1 else t,
    lambda t, k: t.split(max(1, t.shape[0] // 2))[0],
    lambda t, k: t.unbind(-1)[k % t.shape[-1]],
    lambda t, k: t[::2],
)
WRITERS: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    lambda t, o: t.mul_(1.5),
    lambda t, o: t.add_(o.sum()),
    lambda t, o: t.copy_(o.reshape(-1)[0].clone()),
    lambda t, o: t.masked_fill_(t > 0.5, 0.25),
    lambda t, o: t.zero_(),
    lambda t, o: t.clamp_(max=1.0),
)
STEP = st.tuples(st.booleans(), st.integers(0, 8), st.integers(0, 20), st.integers(0, 20))


def _run(steps: list[tuple[bool, int, int, int]], bases: list[Tensor]) -> Tensor:
    variables = list(bases)
    for is_view, which, first, second in steps:
        target = variables[first % len(variables)]
        if is_view and target.dim():
            variables.append(VIEWS[which % len(VIEWS)](target, second))
        else:
            WRITERS[which % len(WRITERS)](target, variables[second % len(variables)])
    return torch.stack([(v * (k + 1)).sum() for k, v in enumerate(variables)]).sum()


@settings(max_examples=30)
@given(steps=st.lists(STEP, min_size=3, max_size=14))
def test_random_programs_without_gradients(steps: list[tuple[bool, int, int, int]]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return _run(steps, [x * 1, x * 2])

    torch.manual_seed(0)
    model, x = Small(forward), randn(4, 6)
    graph = record(model, (x,), {}).graph
    found = run_graph(graph, inputs_of(graph, model, (x,), {}))
    assert torch.equal(found.outputs["output"], model(x))


@settings(max_examples=20)
@given(steps=st.lists(STEP, min_size=3, max_size=10))
def test_random_programs_with_gradients(steps: list[tuple[bool, int, int, int]]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return _run(steps, [s.layer(x) * 1, x * 2])

    torch.manual_seed(0)
    model, x = Small(forward, layer=linear()), randn(4, 6)
    try:
        model(x).backward()
    except RuntimeError:
        assume(False)  # eager itself refuses to write to split views, or to what backward needs
    for parameter in model.parameters():
        parameter.grad = None
    check(model, x, relative=1e-13, zeros=True)


def test_a_stale_split_is_made_again_as_a_slice() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        o = x * 1
        _, b = o.split(4, -1)
        o.mul_(2)
        return (s.layer(x)[:, :2] * b).sum()

    graph = check(Small(forward, layer=linear()), randn(4, 6)).graph
    (made,) = [n for n in graph.nodes if n.op == "aten.slice.Tensor" and n.spec.shape == (4, 2)
               and n.args[1:] == (-1, 4, 6)]  # fmt: skip
    assert made.args[0] == Ref("mul_1")
