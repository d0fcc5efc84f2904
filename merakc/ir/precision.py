"""The dtypes of a step in mixed precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from merakc.errors import ConfigError

_FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Precision:
    """What dtype a step computes in, and what it keeps.

    Parameters and the batch's floating tensors are cast to `compute`; gradients of micro-batches
    are added up in `gradients`, reduced over ranks in float32 or wider, and handed to the optimizer
    in `master`, the dtype of the parameters that it updates (Micikevicius et al. 2018). Buffers
    keep their own. Where `compute` is float16 the loss is scaled. With `products` of "float8" those
    with weights, and of their inputs' gradients, multiply numbers of eight bits
    (`merakc.passes.forward.scaled_products`); gradients of weights do not.

    Raises `ConfigError` where one is no floating dtype, or masters are narrower than the rest.
    """

    compute: str
    gradients: str
    master: str = "float32"
    products: str | None = None

    def __post_init__(self) -> None:
        names = self.compute, self.gradients, self.master
        for name in names:
            if name not in _FLOATS:
                raise ConfigError(f"precision: dtype {name!r} is not one of {', '.join(_FLOATS)}")
        if self.products not in (None, "float8"):
            raise ConfigError(f"precision: products of {self.products!r} are not 'float8' or None")
        if self.products is not None and self.compute == "float16":
            raise ConfigError("precision: products of float8 need another compute than float16")
        with torch._C.DisableTorchFunction():  # a mode that lifts casts lifts these, too
            widest = torch.promote_types(self.dtype("compute"), self.dtype("gradients"))
            held = torch.promote_types(widest, self.dtype("master"))
        if held != self.dtype("master"):
            raise ConfigError(
                f"precision: masters of {self.master} do not hold what is computed in "
                f"{self.compute} with gradients of {self.gradients}; give a wider dtype"
            )

    def dtype(self, of: str) -> torch.dtype:
        """Torch's dtype of "compute", "gradients" or "master"."""
        found: torch.dtype = getattr(torch, getattr(self, of))
        return found

    def __str__(self) -> str:
        own = f" (products of {self.products})" if self.products else ""
        held = f"gradients of {self.gradients} and masters of {self.master}"
        return f"{self.compute}{own} with {held}"

    @property
    def scales_loss(self) -> bool:
        """Whether small gradients would vanish, so that the loss is scaled."""
        return "float16" in (self.compute, self.gradients)


NAMED = {
    "bf16-mixed": Precision("bfloat16", "bfloat16"),
    "fp16-mixed": Precision("float16", "float16"),
    "fp8-mixed": Precision("bfloat16", "bfloat16", products="float8"),
}


def parse_precision(given: str | Precision | None) -> Precision | None:
    """The precision that a user asks for. Raises `ConfigError` for a name that is not known."""
    if not isinstance(given, str):
        return given
    if given not in NAMED:
        raise ConfigError(
            f"precision {given!r} is not known; choose one of {', '.join(NAMED)}, give a "
            "merakc.Precision, or None to compute in the model's own dtypes"
        )
    return NAMED[given]


def kept_dtype(dtype: torch.dtype, precision: Precision | None, *, is_trained: bool) -> torch.dtype:
    """The dtype in which a rank keeps a parameter: its master's; frozen ones have none."""
    if precision is None or not dtype.is_floating_point:
        return dtype
    return precision.dtype("master" if is_trained else "compute")
