"""The modules of a parallel model: its parameters, under the names and in the tree of the user's.

None of them computes anything: the step is compiled from the model's own modules. So what is set on
a mirror goes on to the module that it stands for, and what would go unheard there is refused.
"""

from __future__ import annotations

from typing import Any, Never, Self

import numpy as np
import torch
from torch import nn

from merakc.errors import ConfigError
from merakc.runtime.part import local_of, tagged
from merakc.train.parameters.places import elsewhere

_HOOKS_REMEDY = "its forward is part of a compiled step; register hooks before auto_parallel"
# Values that are compared by more than equality, or are a module's parts.
_UNCOMPARED = (torch.Tensor, nn.Module, np.ndarray)


class Mirror(nn.Module):
    """Stands for a module of the user's, the `source`."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_source", source)  # it is no child
        self.training = source.training

    def train(self, mode: bool = True) -> Self:
        """Training or evaluation mode, of the source too."""
        super().train(mode)
        self.__dict__["_source"].train(mode)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets what the source has on the source, for the steps that come."""
        source = self.__dict__.get("_source")
        if name == "__class__":
            raise ConfigError(
                f"{type(self).__name__} is to become a {value.__name__}: modules of a model that "
                "auto_parallel runs cannot be given to other parallelism too (fully_shard, "
                "parallelize_module); give the model to one of them"
            )
        if isinstance(value, (nn.Module, nn.Parameter)):
            self._refuse(name, value)
        if source is not None and name != "training" and _has_setting(source, name):
            setattr(source, name, value)
        else:
            super().__setattr__(name, value)

    def _refuse(self, name: str, value: object) -> Never:
        raise ConfigError(
            f"'{name}' is set to a {type(value).__name__} after auto_parallel, whose steps are "
            "compiled from the model that it was given; change the model before"
        )

    register_parameter = register_module = add_module = _refuse  # type: ignore[assignment]

    def __deepcopy__(self, _: object) -> Never:
        """Refuses: a copy would have no steps of its own."""
        raise ConfigError(
            "a model that auto_parallel runs cannot be copied or pickled (copy.deepcopy, "
            "AveragedModel, torch.save(model)): keep averages of its parameters, "
            "[p.detach().clone() for p in model.parameters()], and bring them in by "
            "p.data.copy_(average); merakc.save and model.full_state_dict() save it"
        )

    __copy__ = __deepcopy__

    def __reduce_ex__(self, _: object) -> Never:
        """Refuses to be pickled."""
        self.__deepcopy__(None)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """This rank's parts, each of which says so."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
            if tensor in elsewhere:
                destination.pop(prefix + name, None)
            elif tensor is not None and not keep_vars and prefix + name in destination:
                destination[prefix + name] = tagged(tensor).detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Takes whole tensors, or the parts that this rank has."""
        given = dict(state_dict)
        for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
            if tensor in elsewhere:
                given[prefix + name] = tensor  # there is nothing to load
            elif tensor is not None and isinstance(given.get(prefix + name), torch.Tensor):
                given[prefix + name] = local_of(tensor, given[prefix + name])
        super()._load_from_state_dict(given, prefix, *args)

    def __getattr__(self, name: str) -> Any:
        """A parameter or a part, or what the source holds that is neither."""
        source = self.__dict__.get("_source")
        if source is not None and _has_setting(source, name):
            return getattr(source, name)
        return super().__getattr__(name)


class Part(Mirror):
    """A module inside a parallel model."""

    def _hooked(self, *_: Any, **__: Any) -> Never:
        raise ConfigError(
            f"a hook is registered on {type(self._source).__name__} after auto_parallel; "
            f"{_HOOKS_REMEDY}"
        )

    register_forward_hook = register_forward_pre_hook = _hooked
    register_full_backward_hook = register_full_backward_pre_hook = _hooked
    register_backward_hook = _hooked


def _has_setting(source: nn.Module, name: str) -> bool:
    """Whether a module has an attribute of its own that is no tensor, module or function."""
    if name.startswith("_") or isinstance(getattr(type(source), name, None), property):
        return False
    value = vars(source).get(name, _UNCOMPARED)
    return value is not _UNCOMPARED and not isinstance(value, _UNCOMPARED) and not callable(value)
