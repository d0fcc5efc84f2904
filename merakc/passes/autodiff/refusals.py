"""What cannot be differentiated, with the line that it is from."""

from __future__ import annotations

import re

import torch

from merakc.errors import MerakError, RecordError
from merakc.ir.graph import Graph

NO_DERIVATIVE = re.compile(r"derivative for aten::(\w+) is not implemented")  # of torch's errors


def of_unknown_size(graph: Graph, error: Exception) -> RecordError:
    """The refusal of a backward whose sizes only values know, as of a write by a mask."""
    specs = graph.specs()
    writes = [
        n.source for n in graph.nodes
        if "index_put" in n.op and any(specs[r].dtype == torch.bool for r in n.refs if r in specs)
    ]  # fmt: skip
    where = ", ".join(dict.fromkeys(writes)) or "some line of the forward"
    return RecordError(
        f"{where}: the gradient of what is written by a mask is of a size that only the mask's "
        f"values know ({error}); write torch.where(mask, values, x)"
    )


def writes_to(graph: Graph, target: str) -> RecordError:
    """The refusal of a backward that writes to what the forward was given."""
    own = [n for n in graph.nodes if n.op in graph.functions]
    lines = ", ".join(dict.fromkeys(n.source for n in own if n.source)) or "some line"
    names = ", ".join(dict.fromkeys(n.op.split(".")[1] for n in own)) or "some"
    return RecordError(
        f"{lines}: the backward of a custom function ({names}) writes to '{target}', and what a "
        "compiled backward gives are gradients alone; write it in the model's forward, or in the "
        "loop, behind loss.backward()"
    )


def without_derivative(graph: Graph, error: MerakError) -> RecordError | None:
    """The refusal of calls of which torch knows no derivative, if that is why a backward fails."""
    missing = NO_DERIVATIVE.search(str(error.__cause__))
    if missing is None:
        return None
    name, grads = missing.group(1), graph.grad_values()
    calls = [n for n in graph.nodes if n.op.split(".")[1] == name and n.grad_outputs(grads)]
    where = ", ".join(dict.fromkeys(n.source for n in calls if n.source)) or "some line"
    return RecordError(
        f"{where}: torch has no derivative of {name}, which is called with values that are "
        "trained; call it in an autograd.Function, whose backward says what the gradient is, or "
        "with detached values (x.detach())"
    )
