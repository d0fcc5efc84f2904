"""The modules of a parallel model: its parameters, under the names and in the tree of the user's.

None of them computes anything: the step is compiled from the model's own modules. So what is set on
a mirror goes on to the module that it stands for, and what would go unheard there is refused.
"""

from __future__ import annotations

from functools import cache
from inspect import getattr_static
from types import FunctionType
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
# Their own methods look at modules and parameters one by one, and compute nothing.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Mirror(nn.Module):
    """Stands for a module of the user's, the `source`."""

    def __init__(self, source: nn.Module) -> None:
        nn.Module.__init__(self)  # not that of a user's class
        object.__setattr__(self, "_source", source)  # it is no child
        self._parameters.update({n: None for n, p in source._parameters.items() if p is None})
        self.training = source.training

    def train(self, mode: bool = True) -> Self:
        """Training or evaluation mode, of the source too."""
        self.__dict__["_source"].train(mode)
        for part in self.modules():
            if isinstance(part, Mirror):
                part.__dict__["training"] = part.__dict__["_source"].training
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
            nn.Module.__setattr__(self, name, value)

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
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
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
        nn.Module._load_from_state_dict(self, given, prefix, *args)

    def __getattr__(self, name: str) -> Any:
        """A parameter or a part, or what the source holds that is neither."""
        source = self.__dict__.get("_source")
        if source is not None and _has_setting(source, name):
            return getattr(source, name)
        return nn.Module.__getattr__(self, name)


class Part(Mirror):
    """A module inside a parallel model."""

    def forward(self, *_: Any, **__: Any) -> Never:
        """Refuses: this rank has not all of its weights."""
        raise ConfigError(
            f"{type(self._source).__name__} is called by itself, outside the model's forward: it "
            "is part of compiled steps, and this rank may hold a part of its weights; call the "
            "model, or model.predict"
        )

    def __getattr__(self, name: str) -> Any:
        """As of any mirror; what is withheld says so."""
        if any(isinstance(vars(base).get(name), _Withheld) for base in type(self).__mro__):
            raise AttributeError(
                f"{type(self).__name__}.{name} is not there after auto_parallel: this rank may "
                "hold a part of the module's weights; use it before, or inside the model's forward"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """As of the user's module."""
        return str(self._source.extra_repr())

    def _hooked(self, *_: Any, **__: Any) -> Never:
        raise ConfigError(
            f"a hook is registered on {type(self._source).__name__} after auto_parallel; "
            f"{_HOOKS_REMEDY}"
        )

    register_forward_hook = register_forward_pre_hook = _hooked
    register_full_backward_hook = register_full_backward_pre_hook = _hooked
    register_backward_hook = _hooked


class _Withheld:
    """A method or property of a user's class: it would take a rank's part of weights for all."""

    def __get__(self, part: object, _: type | None = None) -> Never:
        raise AttributeError  # and so `Part.__getattr__` is asked


@cache
def part_type(kind: type[nn.Module]) -> type[Part]:
    """The parts that stand for modules of a class: `isinstance` takes them for such modules, by
    which people group parameters, and lists of modules can be walked. None of the class's own
    methods is there.
    """
    if kind is nn.Module or issubclass(kind, torch.jit.ScriptModule):
        return Part
    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, value in vars(base).items() if base not in CONTAINERS else ():
            code = isinstance(value, (FunctionType, classmethod, staticmethod, property))
            if code and not name.startswith("__"):
                own = getattr_static(Part, name, None)  # what a part does in place of it
                names.setdefault(name, _Withheld() if own is None else own)
    return type(kind.__name__, (Part, kind), names)


def grow(mirror: Mirror, known: dict[nn.Module, Part]) -> None:
    """Gives a mirror a part for each module in its source, as often as it is there."""
    for name, child in mirror.__dict__["_source"]._modules.items():
        if child is not None and child not in known:
            known[child] = part_type(type(child))(child)  # type: ignore[arg-type]
            grow(known[child], known)
        mirror._modules[name] = known.get(child)


def part_at(mirror: nn.Module, path: str) -> nn.Module:
    """The part under a dotted name, which may be that of one of our own properties."""
    for name in path.split(".") if path else ():
        child = mirror._modules[name]
        assert child is not None
        mirror = child
    return mirror


def _has_setting(source: nn.Module, name: str) -> bool:
    """Whether a module has an attribute of its own that is no tensor, module or function."""
    if (name.startswith("_") and not isinstance(source, CONTAINERS)) or isinstance(
        getattr(type(source), name, None), property
    ):
        return False
    value = vars(source).get(name, _UNCOMPARED)
    return value is not _UNCOMPARED and not isinstance(value, _UNCOMPARED) and not callable(value)
