"""What is refused before a forward runs: hooks on gradients, and modules that split work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from merakc.errors import RecordError
from merakc.frontend.record import record
from tests.frontend.against_eager import check
from tests.frontend.small import Small, linear, randn


def test_hooks_on_gradients_are_refused() -> None:
    model = Small(lambda s, x: s.b(s.a(x)).sum(), a=linear(), b=linear())
    model.b.register_full_backward_hook(lambda module, before, after: None)
    with pytest.raises(RecordError, match="module 'b' has backward hooks"):
        record(model, (randn(4, 6),), {})


def test_script_modules_are_refused() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    with pytest.warns(DeprecationWarning, match="torch.jit"):
        scripted = torch.jit.trace(Double(), torch.ones(1))
    model = Small(lambda s, x: s.inner(x).sum(), inner=scripted)
    with pytest.raises(RecordError, match="module 'inner' is a ScriptModule"):
        record(model, (randn(4, 6),), {})


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "register_hook": lambda m: m.get_parameter("a.weight").register_hook(lambda g: g * 2),
    "register_post_accumulate_grad_hook": lambda m: m.get_parameter(
        "a.weight"
    ).register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_parameters_are_refused(name: str) -> None:
    model = Small(lambda s, x: s.a(x).sum(), a=linear())
    handle = HOOKS[name](model)
    with pytest.raises(RecordError, match=rf"'a.weight' has a hook \({name}\).*auto_parallel"):
        record(model, (randn(4, 6),), {})
    handle.remove()
    check(model, randn(4, 6))


def test_hooks_on_accumulations_are_refused() -> None:
    """They live as long as somebody holds the node."""
    model = Small(lambda s, x: s.a(x).square().sum(), a=linear(), b=linear())
    check(model, randn(4, 6))
    held: list[Any] = []
    with torch.enable_grad():
        weight = model.get_parameter("a.weight")
        held.append(weight.expand_as(weight).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
    held[0].register_prehook(lambda g: (g[0] * 2,))
    with pytest.raises(RecordError, match=r"'a.weight' has its accumulation .* held by somebody"):
        record(model, (randn(4, 6),), {})
    held.clear()
    check(model, randn(4, 6))


def test_hooks_on_all_modules() -> None:
    model = Small(lambda s, x: s.a(x).sum(), a=linear())
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(RecordError, match="registered for all modules"):
            record(model, (randn(4, 6),), {})
    finally:
        handle.remove()


def test_hooks_on_all_forwards_run() -> None:
    model = Small(lambda s, x: s.a(x).square().sum(), a=linear())
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 2 if isinstance(module, nn.Linear) else None
    )
    try:
        check(model, randn(4, 6))
    finally:
        handle.remove()


def test_modules_that_split_work(tmp_path: Any) -> None:
    layer, norm = linear(), nn.SyncBatchNorm(6, dtype=torch.float64)
    model = Small(lambda s, x: s.norm(s.a(x)).square().sum(), a=layer, norm=norm)
    check(model, randn(4, 6), relative=1e-14)  # alone it is a BatchNorm
    parallel = Small(lambda s, x: s.a(x).sum(), a=nn.DataParallel(layer))
    with pytest.raises(RecordError, match="module 'a' is a DataParallel, which splits"):
        record(parallel, (randn(4, 6),), {})
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    try:
        with pytest.raises(RecordError, match="module 'norm' is a SyncBatchNorm"):
            record(model, (randn(4, 6),), {})
    finally:
        dist.destroy_process_group()


def test_lazy_modules() -> None:
    model = Small(lambda s, x: s.a(x).square().sum(), a=nn.LazyLinear(6, dtype=torch.float64))
    with pytest.raises(RecordError, match=r"'a\.weight' has no shape yet"):
        record(model, (randn(4, 6),), {})
    model(randn(4, 6))
    check(model, randn(4, 6))
