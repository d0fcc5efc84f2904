"""torch's code of its own for transformers in evaluation (`torch.backends.mha`), while recording.

It puts whole layers into one call, of which nothing can be split, and takes padding out of a batch
as nested tensors. What is recorded are the calls of training, and what the other code makes of
padding: zeros, behind the last layer of an `nn.TransformerEncoder`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from merakc.frontend.replaced import replaced


class _PaddingLeftOutError(Exception):
    """Raised where torch would take the padding out; the mask is true for what it keeps."""

    def __init__(self, _: torch.Tensor, mask: torch.Tensor, **__: Any) -> None:
        super().__init__()
        self.mask = mask


class _Layers:
    """Layers as torch asks the first of them how it is, but that do not run."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers = layers

    def __getitem__(self, index: int) -> nn.Module:
        return self._layers[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(())


class _Seen:
    """An encoder with something else in the place of parts of it."""

    def __init__(self, encoder: nn.TransformerEncoder, **other: Any) -> None:
        self._encoder = encoder
        vars(self).update(other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)


@contextlib.contextmanager
def as_in_training() -> Iterator[None]:
    """Layers and attention run as in training, and encoders give what they give in evaluation."""
    whole, enabled = nn.TransformerEncoder.forward, torch.backends.mha.get_fastpath_enabled()

    def forward(
        encoder: nn.TransformerEncoder,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        given = src, mask, src_key_padding_mask, is_causal
        asks = enabled and mask is None and src_key_padding_mask is not None
        kept = _kept(whole, encoder, given) if asks else None
        if kept is None:
            return whole(encoder, *given)
        out = whole(_Seen(encoder, norm=None), *given)  # type: ignore[arg-type]
        out = out.masked_fill(~kept[..., None], 0.0)
        return out if encoder.norm is None else encoder.norm(out)

    with (
        replaced(torch.backends.mha, "get_fastpath_enabled", lambda: False),
        replaced(nn.TransformerEncoder, "forward", forward),
    ):
        yield


def _kept(
    whole: Callable[..., torch.Tensor], encoder: nn.TransformerEncoder, given: tuple[Any, ...]
) -> torch.Tensor | None:
    """The mask of what is no padding, where torch would take the padding out, by its own reasons;
    None where it would not.
    """
    seen = _Seen(encoder, norm=None, layers=_Layers(encoder.layers))
    with (
        replaced(torch.compiler, "is_compiling", lambda: False),  # as it is where it trains
        replaced(torch.backends.mha, "get_fastpath_enabled", lambda: True),
        replaced(torch, "_nested_tensor_from_mask_left_aligned", _is_left_aligned),
        replaced(torch, "_nested_tensor_from_mask", _raise),
    ):
        try:
            whole(seen, *given)
        except _PaddingLeftOutError as found:
            return found.mask
    return None


def _raise(*args: Any, **kwargs: Any) -> None:
    raise _PaddingLeftOutError(*args, **kwargs)


def _is_left_aligned(_: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether each sample's padding stands behind all else."""
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())
