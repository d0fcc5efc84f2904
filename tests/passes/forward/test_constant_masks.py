"""Masks that are known without data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.ir.graph import InputKind
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.forward import constant_masks
from merakc.passes.forward.constant_masks import (
    ATTENTION,
    CAUSAL,
    MASK,
    WITHIN,
    with_known_masks,
)

SIZE = 6
LOW = torch.finfo(torch.float64).min


class Masked(nn.Module):
    """Attention with a mask that `make` gives for [batch, heads, SIZE, SIZE]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("seen", torch.ones(SIZE, SIZE, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = torch.arange(SIZE)[:, None], torch.arange(SIZE)
        batch = torch.arange(x.shape[0])[:, None, None, None]
        causal = columns <= rows
        mask = {
            "causal": causal,
            "each sample's": (causal[None, None] & (batch >= 0)).expand(x.shape[0], 1, -1, -1),
            "floats": torch.where(causal, torch.zeros((), dtype=x.dtype), LOW),
            "all": (columns <= rows + SIZE).expand(x.shape[0], 1, SIZE, SIZE),
            "window": causal & (columns > rows - 3),
            "one sample's": causal[None, None] | (batch == 1),
            "slope": torch.where(causal, (columns - rows).double(), LOW),
            "buffer": self.seen,
            "first column": columns[None] == 0,  # one row for all
            "data": causal & (x[:, :1, :1, :1] < 1e9),
            "both ways": (columns > rows - 2) & (columns < rows + 3),
            "window of data": (x[:, :1, :1, :1] < 1e9) & (causal & (columns > rows - 3)),
            "either of data": causal | (x[:, :1, :1, :1] < -1e9),
            "not of data": ~(causal & (x[:, :1, :1, :1] < -1e9)),
        }[self.kind]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("elements", [1 << 24, 2 * SIZE])
@pytest.mark.parametrize(
    ("kind", "causal", "masked"),
    [
        ("causal", True, False), ("each sample's", True, False), ("floats", True, False),
        ("all", False, False), ("window", False, True), ("one sample's", False, True),
        ("slope", False, True), ("buffer", False, True), ("data", False, True),
        ("first column", False, True),
    ],
)  # fmt: skip
def test_masks(
    kind: str, causal: bool, masked: bool, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constant_masks, "MOST_ELEMENTS", elements)  # a block of two rows
    model, x = Masked(kind), torch.randn(3, 2, SIZE, 8, dtype=torch.float64)
    graph = record(model, (x,), {}).graph
    found = with_known_masks(graph)
    found.verify()
    (node,) = (n for n in found.nodes if n.op == ATTENTION)
    assert node.args[CAUSAL] is causal
    assert (node.args[MASK] is not None) is masked
    given = {i.name: x if i.kind is InputKind.BATCH else model.seen for i in found.inputs
             if i.kind is not InputKind.CONSTANT}  # fmt: skip
    (out,) = interpret(found, given)
    torch.testing.assert_close(out, model(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "within"),
    [
        ("window", (2, 0)), ("both ways", (1, 2)), ("data", (SIZE - 1, 0)),
        ("window of data", (2, 0)), ("either of data", None), ("one sample's", None),
        ("buffer", None), ("slope", None), ("not of data", None),
    ],
)  # fmt: skip
def test_how_far_rows_see_at_most(kind: str, within: tuple[int, int] | None) -> None:
    model, x = Masked(kind), torch.randn(3, 2, SIZE, 8, dtype=torch.float64)
    graph = record(model, (x,), {}).graph
    found = with_known_masks(graph)
    found.verify()
    (node,) = (n for n in found.nodes if n.op == ATTENTION)
    assert (node.args[WITHIN] if len(node.args) > WITHIN else None) == within
    given = {i.name: x if i.kind is InputKind.BATCH else model.seen for i in found.inputs
             if i.kind is not InputKind.CONSTANT}  # fmt: skip
    (out,) = interpret(found, given)
    torch.testing.assert_close(out, model(x), rtol=0, atol=1e-12)


def test_a_model_that_writes_its_mask_out() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(2, 8, dtype=torch.long)
    graph = record(model, (), {"input_ids": ids}).graph
    known = with_known_masks(graph)
    assert len(known.nodes) < len(graph.nodes)
    for node in known.nodes:
        if node.op == ATTENTION:
            assert node.args[MASK] is None
            assert node.args[CAUSAL]
    told = record(model, (), {"input_ids": ids, "position_ids": ids}).graph
    assert with_known_masks(told) is told  # who is seen depends on the batch
