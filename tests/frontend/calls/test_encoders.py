"""Transformers of torch's in evaluation, where torch has other code than in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from merakc.frontend.calls.encoders import as_in_training
from merakc.frontend.record import record
from tests.frontend.against_eager import inputs_of, run_graph
from tests.frontend.small import randn

PADDED = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]], dtype=torch.bool)
FIRST = PADDED.flip(1)  # padding stands first, which torch leaves in


def encoder(**options: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, batch_first=True, dtype=torch.float64, norm_first=options.pop("norm_first", False)
    )
    made = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8, dtype=torch.float64), **options)
    for parameter in made.parameters():  # layers are copies, and norms ones
        parameter.data = randn(*parameter.shape) / 2
    return made.eval()


class Called(nn.Module):
    """An encoder that is given which tokens are padding."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, padded: Tensor | None) -> Tensor:
        return self.inner(x, src_key_padding_mask=padded)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("padded", [None, PADDED, FIRST], ids=["none", "behind", "first"])
def test_padding_is_what_it_is_in_eager(
    padded: Tensor | None, nested: bool, norm_first: bool, gradients: bool
) -> None:
    nested = nested and not norm_first  # torch warns that it cannot have both
    model = Called(encoder(enable_nested_tensor=nested, norm_first=norm_first))
    given = randn(3, 5, 8), padded
    with torch.set_grad_enabled(gradients):
        recording = record(model, given, {})
        wanted = model(*given)
    graph = recording.graph
    assert not {n.op for n in graph.nodes} & {
        "aten._native_multi_head_attention.default",
        "aten._transformer_encoder_layer_fwd.default",
    }
    found = run_graph(graph, inputs_of(graph, model, given, {})).outputs["output"]
    zeros = nested and padded is PADDED and not gradients
    behind = model.inner.norm.bias if zeros else None
    assert behind is None or torch.equal(wanted[1, 3], behind)
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=1e-12)


def test_attention_by_itself() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).eval()
    x = randn(3, 5, 8)
    with torch.no_grad():
        recording = record(model, (x, x, x), {"key_padding_mask": PADDED})
        wanted, _ = model(x, x, x, key_padding_mask=PADDED)
    values = inputs_of(recording.graph, model, (x, x, x), {"key_padding_mask": PADDED})
    found = run_graph(recording.graph, values).outputs["0"]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_users_switch_off_stays_so() -> None:
    model, x = Called(encoder()), randn(3, 5, 8)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            recording = record(model, (x, PADDED), {})
            wanted = model(x, PADDED)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    values = inputs_of(recording.graph, model, (x, PADDED), {})
    found = run_graph(recording.graph, values).outputs["output"]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_all_is_put_back() -> None:
    forward = nn.TransformerEncoder.forward
    with as_in_training():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
    assert nn.TransformerEncoder.forward is forward
