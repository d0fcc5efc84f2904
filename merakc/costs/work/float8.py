"""The calls that a product of float8 is made of: `merakc.kernels.float8.scaled`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from merakc.ir.graph import Node, Ref, TensorSpec
from merakc.kernels.float8.scaled import FLOAT8

Calls = tuple[list[Node], Mapping[Ref, TensorSpec]]
"""Calls, and the shapes of their values."""


def forward_calls(node: Node, specs: Mapping[Ref, TensorSpec]) -> Calls:
    """Those of a node of `merakc.scaled_linear`."""
    x, w = (specs[ref] for ref in node.args[:2])
    return _calls(node, x, w, node.args[2:3])


def gradient_calls(node: Node, specs: Mapping[Ref, TensorSpec]) -> Calls:
    """Those of the gradient of its first argument."""
    w = specs[node.args[1]]
    turned = TensorSpec(w.shape[::-1], w.dtype)
    return _calls(node, node.spec, turned, node.args[3:4])


def _calls(node: Node, a: TensorSpec, b: TensorSpec, axes: tuple[str, ...]) -> Calls:
    """Those of the product of rows a [..., k] and b [n, k], where an axis may split k."""
    specs: dict[Ref, TensorSpec] = {}
    calls: list[Node] = []
    sides: list[Ref] = []

    def call(name: str, op: str, args: tuple[object, ...], spec: TensorSpec) -> Ref:
        calls.append(Node(name, f"merakc.{op}.default", args, (), (spec,), source=node.source))
        specs[Ref(name)] = spec
        return Ref(name)

    for name, side in (("a", a), ("b", b)):
        specs[Ref(name)] = side
        of_rows = TensorSpec((*side.shape[:-1], 1), torch.float32)
        largest = call(f"of_{name}", "row_amax", (Ref(name),), of_rows)
        for axis in filter(None, axes):
            largest = call(f"over_{name}", "all_reduce", (largest, axis, "max"), of_rows)
        small = TensorSpec(side.shape, FLOAT8)
        sides += [call(f"small_{name}", "quantized", (Ref(name), largest), small), largest]
    out = TensorSpec((*a.shape[:-1], b.shape[0]), a.dtype)
    call("product", "scaled_mm", (*sides, a.dtype), out)
    return calls, specs
