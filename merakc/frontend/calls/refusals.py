"""What no recording can honour about a model, seen before its forward runs."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_modules
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from merakc.errors import RecordError
from merakc.frontend.python.plain_tensors import layout_reason

# Modules that split a batch or a model themselves, by the place where their class is.
_SPLITTING = ("torch.distributed.fsdp", "deepspeed", "fairscale", "megatron")
_HOOK_REMEDY = (
    "register it after auto_parallel, on the parameter of the model that this returns: there it "
    "sees the gradient of the whole batch, of this rank's part"
)


def check_modules(model: nn.Module) -> None:
    """Raises `RecordError` for hooks on gradients, and for modules that cannot be recorded."""
    for hooks in (torch_modules._global_backward_hooks, torch_modules._global_backward_pre_hooks):
        if hooks:
            raise RecordError(
                "a backward hook is registered for all modules, which a recorded graph would not "
                "call; remove it"
            )
    for path, module in model.named_modules():
        reason = _module_reason(module)
        if reason:
            raise RecordError(f"module '{path}' {reason}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        reason = _tensor_reason(tensor)
        if reason:
            what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise RecordError(f"{what} '{name}' {reason}")


def _module_reason(module: nn.Module) -> str:
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "is a ScriptModule; give merakc the Python module"
    if module._backward_hooks or module._backward_pre_hooks:
        return (
            "has backward hooks, which a recorded graph would not call; remove them, or write an "
            "autograd.Function"
        )
    splits = isinstance(module, (DataParallel, DistributedDataParallel))
    if splits or kind.__module__.startswith(_SPLITTING):
        return f"is a {kind.__name__}, which splits the work itself; give merakc what it wraps"
    if isinstance(module, nn.SyncBatchNorm) and module.training and dist.is_initialized():
        return (
            "is a SyncBatchNorm, which communicates by itself; use BatchNorm, whose statistics "
            "merakc takes of each micro-batch"
        )
    return ""


def _tensor_reason(tensor: torch.Tensor) -> str:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return (
            "has no shape yet (its module is lazy); run the model once on a batch, without "
            "gradients, before auto_parallel"
        )
    if isinstance(tensor, DTensor):
        return "is a DTensor, split already; give merakc the model as it is in one process"
    if any(reason := layout_reason(tensor)):
        return "; ".join(reason)
    if tensor._backward_hooks:
        return f"has a hook (register_hook), which a recorded graph would not call; {_HOOK_REMEDY}"
    if getattr(tensor, "_post_accumulate_grad_hooks", None):
        return (
            "has a hook (register_post_accumulate_grad_hook), which a recorded graph would not "
            f"call; {_HOOK_REMEDY}"
        )
    if tensor.is_leaf and tensor.requires_grad and _accumulation_is_held(tensor):
        return (
            "has its accumulation of gradients (an AccumulateGrad node) held by somebody, whose "
            f"hooks on it a recorded graph would not call; {_HOOK_REMEDY}"
        )
    return ""


def _accumulation_is_held(parameter: torch.Tensor) -> bool:
    """Whether the node that adds to a parameter's gradient is held by more than its parameter.

    It lives no longer than who holds it: where nobody does, no hook is on it.
    """
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    node = view.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    return sys.getrefcount(node) > _REFERENCES


def _own_references() -> int:
    """How often a node is held that nobody holds."""
    leaf = torch.zeros(1, requires_grad=True)
    view = leaf.view_as(leaf)
    node = view.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    return sys.getrefcount(node)


_REFERENCES = _own_references()
