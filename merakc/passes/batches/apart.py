"""Whether a module that no rule can look into computes each sample by itself, seen with numbers."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes

from merakc.ir.graph import Node, TensorSpec
from merakc.kernels.opaque import Call, autograd_reachable, drawing, find
from merakc.passes.batches.own_rules import Place
from merakc.passes.batches.states import State

# Arithmetic of the whole batch up to which a module is tried: about a second on a CPU.
MOST_FLOPS = 2 * 10**10
# Parts and the whole batch call kernels of other shapes, in the module's own dtype.
RELATIVE, ABSOLUTE = 1e-2, 1e-3


def seen_apart(place: Place) -> bool | None:
    """Whether parts of random arguments give the parts of what all of them give; None where that
    cannot be tried: the module fails on random numbers, or computes too much.

    Both calls are of one module, for a part's and the whole batch's shapes.
    """
    node, twin, states, samples = place.node, place.twin, place.states, place.samples
    mine, other = find(node.args[-1]), find(twin.args[-1])
    if other.flops > MOST_FLOPS:
        return None
    generator = torch.Generator().manual_seed(0)
    refs, specs = node.args[0], place.part.specs()
    values = [_random(_whole(specs[r], states[r], place.total), generator) for r in refs]
    firsts = range(0, place.total - samples + 1, samples)
    try:
        with _disable_current_modes(), autograd_reachable(), torch.no_grad():
            together = _run(other, values, 0)
            again = _run(other, values, 1)
            if not all(map(_alike, together, again)):
                return None  # it draws, and parts draw otherwise
            for first in firsts:
                own = [
                    rows.take(v, first, samples) if (rows := states[r].rows) else v
                    for r, v in zip(refs, values, strict=True)
                ]
                for k, (a, b) in enumerate(zip(_run(mine, own, 0), together, strict=True)):
                    if node.outputs[k] is None:
                        continue
                    wanted = b  # a buffer is to be the same in all parts
                    if a.shape != b.shape:
                        each = a.shape[0] // samples
                        wanted = b[first * each : (first + samples) * each]
                    if not _alike(a, wanted):
                        return False
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    return True


def holds_batch_norm(node: Node) -> bool:
    """Whether the module of a call normalises over the samples of its part, by convention."""
    module = getattr(find(node.args[-1]).forward, "module", None)
    return isinstance(module, torch.nn.Module) and any(
        isinstance(m, _BatchNorm) and m.training for m in module.modules()
    )


def _run(call: Call, values: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    with drawing((), seed, ()):
        return list(call(values))


def _whole(spec: TensorSpec, state: State, total: int) -> TensorSpec:
    """The spec for all samples."""
    return TensorSpec(state.rows.sized(spec.shape, total), spec.dtype) if state.rows else spec


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return bool(torch.equal(one, two))
    return torch.allclose(one, two, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)


def _random(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Random numbers; whole ones are zeros and ones."""
    if spec.dtype.is_floating_point:
        return torch.randn(spec.shape, generator=generator).to(spec.dtype) * 0.5
    return torch.randint(0, 2, spec.shape, generator=generator).to(spec.dtype)
