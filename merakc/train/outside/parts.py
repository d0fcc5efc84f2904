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


class Unshared(WithLoss):
    """A model or a part that gives no loss, whatever it returns: none that ranks share."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, None)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Its `outputs`."""
        return {"loss": None, "outputs": self.model(*args, **kwargs)}
