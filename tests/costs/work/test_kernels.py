"""Kernels read off a graph."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpt import GPT, Shape, gpt_graph
from merakc.costs.device import kernel_seconds
from merakc.costs.work.kernels import (
    ALL_REDUCE,
    Kernel,
    KernelKind,
    Work,
    graph_work,
)
from merakc.frontend.record import record
from merakc.ir.graph import Graph
from merakc.machines.cluster import Device

TINY = Shape(32, 4, 3, 16, 64)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, stride=2)
        self.last = nn.Linear(8 * 6 * 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))).flatten(1)).sum()


class Pointwise(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sigmoid(F.gelu(self.first(x)) * 2.0)).sum()


class Scaled(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        left, right = (t.to(torch.float8_e4m3fn) for t in (x, weight))
        one = torch.ones(())
        made = torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)
        return made.float().sum()


def graph_of(model: nn.Module, *args: Tensor) -> Graph:
    return record(model, args, {}).graph


def flops(kernels: Counter[Kernel]) -> int:
    return sum(kernel.flops * count for kernel, count in kernels.items())


def of_kind(kernels: Counter[Kernel], kind: KernelKind) -> list[Kernel]:
    return [k for k in kernels.elements() if k.kind is kind]


def test_scaled_products_run_at_the_rate_of_float8_whatever_they_make() -> None:
    work = graph_work(graph_of(Scaled(), torch.ones(32, 64), torch.ones(48, 64)))
    (product,) = of_kind(work.forward, KernelKind.PRODUCT)
    assert (product.shape, product.dtype) == ((1, 32, 48, 64), "float8")
    assert product.flops == 2 * 32 * 48 * 64
    device = Device("d", {"float8": 4e14, "bfloat16": 2e14}, 1e18, 1 << 30)
    wide = product._replace(dtype="bfloat16")
    assert 2 * kernel_seconds(product, device) == kernel_seconds(wide, device)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("model", "args"),
    [
        (GPT(TINY), (torch.ones(2, 16, dtype=torch.long),) * 2),
        (Convolutions(), (torch.ones(2, 3, 16, 16),)),
        (Pointwise(), (torch.ones(7, 64),)),
    ],
    ids=["gpt", "convolutions", "pointwise"],
)
def test_flops_are_those_that_torch_counts(
    model: nn.Module, args: tuple[Tensor, ...], fused: bool
) -> None:
    work = graph_work(graph_of(model, *args), fused=fused)
    with FlopCounterMode(display=False) as counter:
        loss = model(*args)
    assert flops(work.forward) == counter.get_total_flops() > 0
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert flops(work.backward) == counter.get_total_flops()


def test_products_have_their_shapes() -> None:
    work = graph_work(graph_of(Pointwise(), torch.ones(7, 64)))
    shapes = Counter(k.shape for k in of_kind(work.forward, KernelKind.PRODUCT))
    assert shapes == {(1, 7, 64, 64): 2}
    shapes = Counter(k.shape for k in of_kind(work.backward, KernelKind.PRODUCT))
    # Of the first layer the input asks for no gradient.
    assert shapes == {(1, 64, 64, 7): 2, (1, 7, 64, 64): 1}
    heads = graph_work(gpt_graph(TINY, 2, 1)).forward
    assert {(8, 16, 16, 8), (8, 16, 8, 16)} <= {k.shape for k in heads}


def test_a_chain_is_one_kernel_that_moves_its_ends() -> None:
    x = torch.ones(7, 64)
    size = 4 * 7 * 64
    moved = {
        fused: [
            k.traffic_bytes
            for k in of_kind(
                graph_work(graph_of(Pointwise(), x), fused=fused).forward, KernelKind.TRAFFIC
            )
        ]
        for fused in (False, True)
    }
    assert sorted(moved[False])[1:] == [2 * size] * 3  # gelu, product with 2, sigmoid
    assert sorted(moved[True])[1:] == [2 * size]
    assert min(moved[True]) == size + 4  # the sum has another number of elements


def test_what_several_read_is_written_once_and_its_gradients_are_added() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return (torch.exp(y) @ torch.sin(y).T).sum()

    work = graph_work(graph_of(Twice(), torch.ones(16, 8)), fused=True)
    size = 4 * 16 * 8
    assert sum(k.traffic_bytes == 3 * size for k in work.backward.elements()) >= 1
    single = graph_work(graph_of(Pointwise(8), torch.ones(16, 8)), fused=True)
    assert not any(k.traffic_bytes == 3 * size and k.dtype == "x" for k in single.backward)


def test_tensor_parallel_collectives() -> None:
    work: Work = graph_work(gpt_graph(TINY, 2, 2))
    size = 2 * 2 * 16 * 32  # of bfloat16 [2, 16, 32]
    for kernels in (work.forward, work.backward):
        found = of_kind(kernels, KernelKind.COLLECTIVE)
        # Two of each block, and that of the embedding or of what enters the head.
        assert [(k.op, k.traffic_bytes) for k in found] == [(ALL_REDUCE, size)] * 7
    split = graph_work(gpt_graph(TINY, 2, 2, sequence_parallel=True))
    ops = Counter(k.op for k in of_kind(split.forward, KernelKind.COLLECTIVE))
    # Into each product that is split, the head's too, and out of each but the head's.
    assert ops["merakc.gather_to.default"] == 7
    assert ops["merakc.reduce_scatter.default"] == 6
    ops = Counter(k.op for k in of_kind(split.backward, KernelKind.COLLECTIVE))
    assert ops["merakc.reduce_scatter.default"] == 7
    assert ops["merakc.all_gather.default"] >= 6


def test_attention_in_one_kernel() -> None:
    shape = Shape(32, 4, 3, 16, 64, "fused")
    work = graph_work(gpt_graph(shape, 2, 1))
    forward = of_kind(work.forward, KernelKind.ATTENTION)
    assert [(k.shape, k.flops) for k in forward] == [((8, 16, 8, 16), 4 * 8 * 16 * 16 * 8)] * 3
    backward = of_kind(work.backward, KernelKind.ATTENTION)
    assert sum(k.flops for k in backward) == 2.5 * sum(k.flops for k in forward)
