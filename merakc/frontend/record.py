"""Records the forward of one micro-batch as a `Graph`, on fake tensors.

The model's Python runs as it is: control flow, kwargs and module hooks need no support. No weight
is ever materialised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

from merakc.errors import RecordError
from merakc.frontend.asking import SymbolsNeededError
from merakc.frontend.contexts import put_fakes, untouched
from merakc.frontend.generators import DrawnError
from merakc.frontend.opaque import Fallbacks, UntraceableError
from merakc.frontend.reads import Reads
from merakc.frontend.recorder import Recorder
from merakc.frontend.symbols import Symbols
from merakc.ir.graph import Graph


@dataclass(frozen=True)
class Recording:
    """A recorded forward.

    `outputs` are the leaves of what the forward returned: the name of a graph output, or the
    plain value where the leaf is no tensor; `structure` puts them together again; `numbers` are the
    outputs that are numbers in Python and tensors in the graph. `aliases` maps each further name of
    a tied parameter to the name that the graph uses. The graph is right for batches that answer
    what it `reads` as this one did, and for losses that are finite where lines ask whether numbers
    are: the lines `finite`.
    """

    graph: Graph
    outputs: tuple[Any, ...]
    structure: pytree.TreeSpec
    aliases: Mapping[str, str]
    model_name: str
    numbers: frozenset[str] = frozenset()
    reads: Reads | None = None
    finite: tuple[str, ...] = ()


def record(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parameter_dtype: torch.dtype | None = None,
) -> Recording:
    """Records `model(*args, **kwargs)`, in the mode (train or eval) that the model is in.

    Its floating parameters are recorded in `parameter_dtype`, if one is given. A module whose
    control flow depends on the data becomes one node, which runs it as it is. Raises `RecordError`,
    with the user's line, where that would be the model itself, for random ops that cannot be
    reproduced on every layout, and for whatever a graph cannot say: writes to parameters, hooks on
    gradients, higher-order ops.
    """
    _check_modules(model)
    fallbacks = Fallbacks(dict(model.named_modules()))
    watched = symbolic = False
    while True:
        try:
            return _record(model, args, kwargs, fallbacks, parameter_dtype, watched, symbolic)
        except DrawnError:
            watched = True
        except SymbolsNeededError:
            symbolic = True
        except UntraceableError as error:
            fallbacks.add(error)


def _record(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fallbacks: Fallbacks,
    parameter_dtype: torch.dtype | None,
    watched: bool,
    symbolic: bool,
) -> Recording:
    """One attempt, with some modules kept whole; `watched` for which of them draw, `symbolic` with
    symbols for numbers that depend on values.
    """
    env = Symbols(lambda number: recorder.answer(number)) if symbolic else None
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    recorder = Recorder(fake_mode, watched=watched)
    leaves, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    with untouched(model):
        for slot in put_fakes(model, fake_mode, parameter_dtype):
            recorder.state_input(slot)
        for path, cause in fallbacks.causes.items():
            recorder.keep_whole(path, fallbacks.modules[path], cause)
        flat = [recorder.batch_input(path, leaf) for path, leaf in leaves]
        fake_args, fake_kwargs = pytree.tree_unflatten(flat, spec)
        with recorder.running(model):
            out = model(*fake_args, **fake_kwargs)
        outputs, structure = recorder.finish(out)
    aliases = _aliases(model)
    recorder.states.clear()  # the model's own tensors, which would live as long as Python likes
    reads, finite = recorder.reader.reads(), recorder.guards.lines(recorder.outputs)
    graph = recorder.graph().pruned()
    graph.verify()
    said = frozenset(recorder.numbers), reads, finite
    return Recording(graph, outputs, structure, aliases, type(model).__name__, *said)


def _check_modules(model: torch.nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise RecordError(f"module '{path}' is a ScriptModule; give merakc the Python module")
        if module._backward_hooks or module._backward_pre_hooks:
            raise RecordError(
                f"module '{path}' has backward hooks, which a recorded graph would not call; "
                "remove them, or write an autograd.Function"
            )


def _aliases(model: torch.nn.Module) -> dict[str, str]:
    """Further names of tied parameters and shared buffers -> the first name."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                found[name] = first[id(tensor)]
    return found
