"""Modules of a model that are run by themselves, by steps of their own."""

from __future__ import annotations

from typing import Any

from torch import nn

from merakc.frontend.values.outside import WithLoss


class Within(WithLoss):
    """A model of which a forward runs one part alone, under the model's own names."""

    path: str

    def __init__(self, model: nn.Module, part: nn.Module) -> None:
        super().__init__(model, None)
        path = next(name for name, other in model.named_modules() if other is part)
        vars(self).update(path=path)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The part's outputs."""
        return self.model.get_submodule(self.path)(*args, **kwargs)


class Evaluated(Within):
    """The same of a part that gives no loss, whatever it returns: it is not trained by itself."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The part's `outputs`."""
        return {"loss": None, "outputs": super().forward(*args, **kwargs)}
