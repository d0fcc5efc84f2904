"""Products of float8 are priced as the calls that they are made of."""

from __future__ import annotations

from collections import Counter

import torch

from merakc.costs.work.kernels import Kernel, KernelKind, Work, graph_work
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec

BF16 = torch.bfloat16


def work_of(*axes: str) -> Work:
    """That of a product of [5, 32, 64] and [48, 64]."""
    x = Input("x", InputKind.ACTIVATION, TensorSpec((5, 32, 64), BF16), "x", True)
    w = Input("w", InputKind.PARAMETER, TensorSpec((48, 64), BF16), "w", True)
    out = (TensorSpec((5, 32, 48), BF16),)
    node = Node("y", "merakc.scaled_linear.default", (Ref("x"), Ref("w"), *axes), (), out)
    return graph_work(Graph((x, w), (node,), (Output("y", OutputKind.ACTIVATION, Ref("y")),)))


def products(kernels: list[Kernel]) -> list[tuple[tuple[int, ...], str]]:
    return [(k.shape, k.dtype) for k in kernels if k.kind is KernelKind.PRODUCT]


def test_two_products_run_in_float8_and_the_weights_gradient_does_not() -> None:
    work = work_of()
    forward, backward = list(work.forward.elements()), list(work.backward.elements())
    assert products(forward) == [((1, 160, 48, 64), "float8")]
    assert products(backward) == [
        ((1, 160, 64, 48), "float8"), ((1, 64, 48, 160), "bfloat16"),
    ]  # fmt: skip
    assert all(k.flops == 2 * 160 * 48 * 64 for k in forward if k.kind is KernelKind.PRODUCT)
    assert products(list(work.weight_grad.elements())) == [((1, 64, 48, 160), "bfloat16")]


def test_rounding_reads_both_arguments_twice_and_writes_them_in_one_byte() -> None:
    moved = sum(
        k.traffic_bytes * n for k, n in work_of().forward.items() if k.kind is KernelKind.TRAFFIC
    )
    for rows, width in ((160, 64), (48, 64)):
        moved -= (2 + 2 + 1) * rows * width  # by the largest magnitude, by the cast
        moved -= 2 * 4 * rows  # which is written, and read
    assert moved == 0


def test_largest_magnitudes_travel_where_an_axis_splits_the_sum() -> None:
    def sent(kernels: Counter[Kernel]) -> list[tuple[int, str]]:
        every = [k for k in kernels.elements() if k.kind is KernelKind.COLLECTIVE]
        return [(k.traffic_bytes, k.axis) for k in every]

    inner, outer = work_of("tp", ""), work_of("", "tp")
    assert sent(inner.forward) == [(4 * 160, "tp"), (4 * 48, "tp")]
    assert sent(outer.backward) == [(4 * 160, "tp"), (4 * 64, "tp")]
    assert not sent(inner.backward) + sent(outer.forward)
