"""Models of peft's, which generate by the model with the adapters that they hold."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from inspect import getattr_static
from typing import Any

import torch
from torch import nn

from merakc.errors import ConfigError
from merakc.train.mirror import Mirror, grow, refuse_alone, users_type
from merakc.train.outside.forwards import Forwards
from merakc.train.outside.parts import Within


class Inner(Forwards):
    """A part of a parallel model that is evaluated by itself, by steps of its own."""

    def __init__(self, source: nn.Module, whole: Forwards) -> None:
        super().__init__(source)
        object.__setattr__(self, "_whole", whole)
        object.__setattr__(self, "_recorded", Within(whole._own("_steps").source, source))

    def _own(self, name: str) -> Any:
        return self._whole._own(name)

    @property
    def _alone(self) -> nn.Module:
        return self._recorded  # type: ignore[no-any-return]

    def _outputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], module: nn.Module, mark: Any = None
    ) -> Any:
        own: Hashable = self._recorded.path, mark
        return super()._outputs(args, kwargs, module, own)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """All that the part returns. Raises `ConfigError` where gradients are on."""
        if torch.is_grad_enabled():
            refuse_alone(self)
        return self.predict(*args, **kwargs)


class Adapted(Forwards):
    """What parallel models of peft's do otherwise, with adapters in them."""

    def _known(self) -> dict[nn.Module, Mirror]:
        base: Any = self._source.get_base_model()
        inner: Mirror = users_type(Inner, type(base))(base, self)  # type: ignore[arg-type]
        known = {base: inner}
        grow(inner, known)
        return known

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As peft's: that of the model with the adapters in it."""
        if given := kwargs.keys() & self.special_peft_forward_args:
            raise ConfigError(
                f"generate({', '.join(sorted(given))}) chooses adapters by hooks, which compiled "
                "steps do not run; model.set_adapter before auto_parallel chooses one"
            )
        base = self.get_base_model()
        base.generation_config = self.generation_config
        return base.generate(*args, **kwargs)


def is_adapted(model: Any) -> bool:
    """Whether a model is one of peft's whose adapters are but modules of the model in it, by which
    it generates.
    """
    if not (hasattr(model, "peft_config") and hasattr(model, "generate")):
        return False
    tuner, base = model.base_model, model.get_base_model()
    own = tuner is base or getattr_static(type(tuner), "generate", None) is not None
    return not own and hasattr(base, "generate")
