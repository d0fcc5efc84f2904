"""The identity of a graph: one hash, and one for each module's part."""

from __future__ import annotations

import hashlib
import re
from itertools import zip_longest

import torch

from merakc.files.elements import bytes_of
from merakc.ir.graph import Graph, Input, InputKind
from merakc.ir.plan import GraphId

INPUTS, OUTPUTS = "(inputs)", "(outputs)"
# Where Python put an object, in the text of a custom function's argument.
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fingerprint(graph: Graph) -> GraphId:
    """Hashes what the graph computes: names, shapes and calls, not lines of source.

    The modules are those that own a node, in program order. A parameter, buffer or constant
    belongs to the module that reads it first; the batch comes first, as module "(inputs)", what
    the graph returns last, as "(outputs)".
    """
    readers: dict[str, str] = {}
    for node in graph.nodes:
        for ref in node.refs:
            readers.setdefault(ref.node, node.module)
    given: dict[str, list[str]] = {}
    for item in graph.inputs:
        text = _describe(item, graph.constants.get(item.name))
        is_own = item.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT)
        module = readers.get(item.name, INPUTS) if is_own else INPUTS
        given.setdefault(module, []).append(text)
    parts = {INPUTS: given.get(INPUTS, [])}
    for node in graph.nodes:
        parts.setdefault(node.module, given.get(node.module, [])).append(str(node))
    parts[OUTPUTS] = [str(Graph((), (), graph.outputs))]
    texts = {name: ADDRESS.sub("", "\n".join(lines)) for name, lines in parts.items()}
    modules = tuple((name, _digest(text.encode())[:16]) for name, text in texts.items())
    return GraphId(_digest(repr(modules).encode()), modules)


def first_difference(planned: GraphId, found: GraphId) -> str:
    """The first module in which two graphs differ, in words; empty where they are the same.

    A module's own calls also come after those of the modules inside it, and change with what these
    return: of modules that differ, the first with no other inside it is named.
    """
    if planned.hash == found.hash:
        return ""
    before, now = dict(planned.modules), dict(found.modules)
    for old, new in zip_longest(before, now):
        if old != new:
            return f"{_called(old)} is planned where the model has {_called(new)}"
    changed = [name for name, digest in now.items() if before[name] != digest]
    if INPUTS in changed:
        return (
            "the batch (its names, shapes or dtypes): it is made for another batch_size= or "
            "--batch, or another length of sequences (--seq)"
        )
    leaves = [m for m in changed if not any(other.startswith(f"{m}.") for other in changed)]
    first = next((m for m in leaves if m), "")
    return f"{_called(first)} computes something else (shapes, dtypes or calls)"


def _describe(item: Input, value: torch.Tensor | None) -> str:
    text = f"{item} {item.requires_grad}"
    if value is None:
        return text
    # Bytes, since a mask may hold millions of numbers.
    data = bytes_of(value).numpy().tobytes()
    return f"{text} {_digest(data)}"


def _called(module: str | None) -> str:
    if module is None:
        return "nothing more"
    return f"module '{module}'" if module else "the model's own forward"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
