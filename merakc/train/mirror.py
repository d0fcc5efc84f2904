"""The modules of a parallel model: its parameters, under the names and in the tree of the user's.

None of them computes anything: the step is compiled from the model's own modules. So what is set on
a mirror goes on to the module that it stands for, and what would go unheard there is refused.

Each is of a class that is made from ours and the user's, so that `isinstance` holds. It is another
object than the user's, from which, and whatever refers to it, steps of new shapes are compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, wraps
from inspect import getattr_static, iscoroutinefunction
from types import FunctionType, MethodType
from typing import Any, Never, Self
from weakref import ref

import torch
from torch import nn

from merakc.errors import ConfigError
from merakc.runtime.part import local_of, place_of, tagged
from merakc.train.parameters.guard import SLICED, guarded, indexed, unguarded
from merakc.train.parameters.memory import COMPILED
from merakc.train.parameters.places import check_here, elsewhere
from merakc.train.parameters.resetting import RESETS, reset
from merakc.train.told import warn_of_line
from merakc.train.withheld import Withheld, refuse_to_change

_HOOKED = (
    "after auto_parallel; its forward is part of a compiled step: register forward hooks before "
    "auto_parallel, and for gradients p.register_hook, or use an autograd.Function in the forward"
)
# What every module has, and a mirror has for itself.
_OF_MODULES = frozenset({*vars(nn.Module), *vars(nn.Module())})
# Methods of ours that call those of a user's class.
_CALLING_THEIRS = {"_prepare_cache_for_generation", "generate"}
# Their own methods look at modules and parameters one by one, and compute nothing.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Mirror(nn.Module):
    """Stands for a module of the user's, the `source`."""

    _in_parts = True  # whether this rank may hold a part of the parameters

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Makes one; not as a user's class would."""
        return object.__new__(cls)

    def __init__(self, source: nn.Module) -> None:
        nn.Module.__init__(self)  # not that of a user's class
        object.__setattr__(self, "_source", source)  # it is no child
        self._let_go()
        self.training = source.training

    def _known(self) -> dict[nn.Module, Mirror]:
        """The parts that are there before `grow`, by what they stand for."""
        return {}

    def _let_go(self) -> None:
        """Has no tensors of its own any more; but for what is None in the source."""
        source = self.__dict__["_source"]
        vars(self)["_non_persistent_buffers_set"] = set()
        for held in ("_parameters", "_buffers"):
            vars(self)[held] = {n: None for n, t in vars(source)[held].items() if t is None}

    def train(self, mode: bool = True) -> Self:
        """Training or evaluation mode, of the source too."""
        self.__dict__["_source"].train(mode)
        return self._in_mode()

    def eval(self) -> Self:
        """Evaluation mode, as the source goes into it."""
        self.__dict__["_source"].eval()
        return self._in_mode()

    def _in_mode(self) -> Self:
        for part in self.modules():
            if isinstance(part, Mirror):
                part.__dict__["training"] = part.__dict__["_source"].training
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets on the source, for the steps that come, what is no module's own."""
        source = self.__dict__.get("_source")
        refuse_to_change(name)
        if name == "__class__":
            raise ConfigError(
                f"{type(self).__name__} is to become a {value.__name__}: modules of a model that "
                "auto_parallel runs cannot be given to other parallelism too (fully_shard, "
                "parallelize_module); give the model to one of them"
            )
        now = self._parameters.get(name, self._modules.get(name))
        if now is not None and value is now:  # `module.weight -= ...` has written there
            return
        if isinstance(value, (nn.Module, nn.Parameter)) or now is not None:
            self._refuse(name, value)
        own = getattr_static(type(self), name, None)
        if name in _OF_MODULES or self._buffers.get(name) is not None or isinstance(own, property):
            nn.Module.__setattr__(self, name, value)
            return
        setattr(source, name, value)
        if isinstance(own, FunctionType):  # a method, which is called on the mirror too
            vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        """Deletes what is no module's own of the source, too."""
        refuse_to_change(name)
        if any(name in held for held in (self._modules, self._parameters, self._buffers)):
            raise ConfigError(f"'{name}' is deleted after auto_parallel, {COMPILED}")
        source = self.__dict__["_source"]
        if name in vars(self):
            nn.Module.__delattr__(self, name)
        if name not in _OF_MODULES and name in vars(source):
            delattr(source, name)

    def _refuse(self, name: str, value: object) -> Never:
        raise ConfigError(
            f"'{name}' is set to a {type(value).__name__} after auto_parallel, {COMPILED}"
        )

    register_parameter = register_module = add_module = _refuse  # type: ignore[assignment]

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        """Refuses: a copy of a part would have no steps of its own."""
        raise ConfigError(
            f"{type(self).__name__} is a part of a model that auto_parallel runs, and is copied by "
            "itself: copy.deepcopy(model) copies the whole model"
        )

    def __reduce_ex__(self, _: object) -> Never:
        """Refuses to be pickled, and shallow copies."""
        raise ConfigError(
            "a model that auto_parallel runs cannot be pickled (torch.save(model)) or shallowly "
            "copied: merakc.save and model.full_state_dict() save it, copy.deepcopy copies it"
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """This rank's parts, each of which says so."""
        with torch._C.DisableTorchFunctionSubclass():
            nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
            if tensor in elsewhere:
                destination.pop(prefix + name, None)
            elif tensor is not None and not keep_vars and prefix + name in destination:
                destination[prefix + name] = tagged(tensor)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Takes whole tensors, or the parts that this rank has."""
        given = dict(state_dict)
        for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
            if name in self._non_persistent_buffers_set:
                continue
            if tensor in elsewhere:
                given[prefix + name] = tensor  # there is nothing to load
            elif tensor is not None and isinstance(given.get(prefix + name), torch.Tensor):
                given[prefix + name] = local_of(tensor, given[prefix + name])
        with torch._C.DisableTorchFunctionSubclass():
            nn.Module._load_from_state_dict(self, given, prefix, *args)

    def __getattr__(self, name: str) -> Any:
        """A parameter or a part, or what the source holds that is neither."""
        source = self.__dict__.get("_source")
        if source is not None and _has_setting(source, name):
            return vars(source)[name]
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            theirs: Any = getattr(type(source), "__getattr__", None)
            if theirs in (None, nn.Module.__getattr__):
                raise
            found = vars(source).get(name) or guarded(theirs)(self, name)
            if isinstance(found, MethodType):
                raise AttributeError(
                    f"{type(self).__name__}.{name} is a method of a module inside the model, of "
                    f"whose weights this rank may hold a part; {_ELSEWHERE}"
                ) from None
            return found  # a setting of a part: models around models ask those for it

    def extra_repr(self) -> str:
        """As of the user's module, and what this rank has of its parameters."""
        own = [_shown(n, t) for n, t in (*self._parameters.items(), *self._buffers.items())]
        said = str(type(self._source).extra_repr(self._source))
        return "; ".join(x for x in (said, *own) if x)


_ELSEWHERE = (
    "use it before auto_parallel, or in one process on the weights that merakc.export writes "
    "(of peft's adapters merakc.integrations.adapters.save_adapters)"
)


def refuse_alone(part: Mirror) -> Never:
    """Refuses to train a part by itself, and to run one whose model is gone."""
    raise ConfigError(
        f"{type(part._source).__name__} is called by itself, outside the model's forward: it is "
        "part of compiled steps, and this rank may hold a part of its weights; call the model, or, "
        "to evaluate the part alone, keep the model, and call it under torch.no_grad() or after "
        "model.eval()"
    )


class Part(Mirror):
    """A module inside a parallel model."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # its steps are compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns, where that is not to be trained: by a step of its own, which
        every rank has to call.
        """
        model = self.__dict__["_within"]()
        if model is None or (self.training and torch.is_grad_enabled()):
            refuse_alone(self)
        return model._evaluated(self._source, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """As of any mirror; what is withheld says so."""
        if any(isinstance(vars(base).get(name), Withheld) for base in type(self).__mro__):
            raise AttributeError(
                f"{type(self).__name__}.{name} is not there after auto_parallel, but in the "
                f"model's forward: this rank may hold a part of its weights; {_ELSEWHERE}"
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """As of any mirror; another forward would go unheard."""
        if name == "forward":
            self._refuse(name, value)
        super().__setattr__(name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's parts, where every pipeline rank has some."""
        if not args and "destination" not in kwargs:  # asked for by itself
            check_here(self)
        return super().state_dict(*args, **kwargs)

    def _hooked(self, *_: Any, **__: Any) -> Never:
        raise ConfigError(f"a hook is registered on {type(self._source).__name__} {_HOOKED}")

    register_forward_hook = register_forward_pre_hook = register_backward_hook = _hooked
    register_full_backward_hook = register_full_backward_pre_hook = _hooked


def _resetting(method: str) -> Any:
    def run(part: Part) -> None:
        reset(part, part.__dict__["_source"], method)

    return unguarded(run)


class _Setting:
    """An attribute of a user's class that is no code: the source's, which may have set its own."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def __get__(self, part: Mirror | None, _: type | None = None) -> Any:
        return self.value if part is None else getattr(part.__dict__["_source"], self.name)


def _own(kind: type[nn.Module]) -> Iterator[tuple[str, Any, bool]]:
    """What a user's class has, the nearest first, and whether that is code."""
    behind = kind.__mro__.index(
        nn.Module
    )  # some bases stand behind it, which hides names of theirs
    for k, base in enumerate(kind.__mro__):
        if base in (*CONTAINERS, nn.Module, object):
            continue
        for name, value in vars(base).items():
            is_hidden = k > behind and name in vars(nn.Module)
            if not is_hidden and name not in ("__dict__", "__weakref__"):
                yield name, value, hasattr(value, "__get__") and not isinstance(value, type)


def _code(kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """What of a user's class is code, the nearest first."""
    return ((name, value) for name, value, is_code in _own(kind) if is_code)


def _made(kind: type[nn.Module], base: type[Mirror], names: dict[str, Any]) -> Any:
    if (get := getattr(kind, "__getitem__", None)) in SLICED:
        names["__getitem__"] = indexed(SLICED[get])
    for name, value, is_code in _own(kind):
        if not is_code and name not in _OF_MODULES and not name.startswith("__"):
            names.setdefault(name, _Setting(name, value))
    names |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if hasattr(kind, "__del__"):
        names["__del__"] = lambda _: None  # the user's object has its own end
    return type(kind.__name__, (base, kind), names)


@cache
def part_type(kind: type[nn.Module]) -> type[Part]:
    """The parts that stand for modules of a class: `isinstance` takes them for such modules, by
    which people group parameters, and lists of modules can be walked. Of the class's own methods
    those that initialise are there; the others refuse.
    """
    if kind is nn.Module or issubclass(kind, torch.jit.ScriptModule):
        return Part
    names: dict[str, Any] = {}
    for name, value in _code(kind):
        own = getattr_static(Part, name, None)  # what a part does in place of it
        walks = name.startswith("__") and isinstance(value, FunctionType)  # `len(part)`, `part[0]`
        withheld = guarded(value) if walks else Withheld(value)
        if isinstance(value, (classmethod, staticmethod)):  # which are of no module
            withheld = staticmethod(value.__get__(None, kind))
        withheld = _resetting(name) if name in RESETS else withheld
        names.setdefault(name, withheld if own is None else own)
    names["forward"] = wraps(kind.forward)(unguarded(Part.forward))  # with their signature
    return _made(kind, Part, names)  # type: ignore[no-any-return]


@cache
def users_type(base: type[Mirror], kind: type[nn.Module]) -> Any:
    """The class of the parallel models that stand for a user's class: theirs and `base`, whose
    methods count. The other methods of the user's are those of the user's class, under guard.
    """
    if issubclass(kind, torch.jit.ScriptModule):
        return base
    bases = base.__mro__[: base.__mro__.index(nn.Module)]
    ours = {name: value for b in reversed(bases) for name, value in vars(b).items()}
    names: dict[str, Any] = {
        n: unguarded(v) for n, v in (*ours.items(), ("_apply", nn.Module._apply))
        if isinstance(v, FunctionType) and n != "state_dict" and (n[0] != "_" or n == "_apply")
    }  # fmt: skip
    names["forward"] = wraps(kind.forward)(names["forward"])
    hidden = set()
    for name, value in _code(kind):
        if name in ours or name in vars(object) or name == "__call__":
            names.setdefault(name, getattr_static(base, name))
            hidden |= {name} - _OF_MODULES - _CALLING_THEIRS - vars(object).keys()
        else:
            names.setdefault(name, _as_guarded(value, kind))
    if isinstance(own := names.get("generate"), FunctionType) and "generate" not in ours:
        names["generate"] = wraps(own)(lambda self, *a, **kw: self._generated(own, *a, **kw))
    if hidden:
        warn_of_line(
            f"after auto_parallel {', '.join(sorted(hidden))} of a {kind.__name__} are merakc's: "
            "its own are used inside its forward alone; give them other names to call them"
        )
    return _made(kind, base, names)


def _as_guarded(value: Any, kind: type[nn.Module]) -> Any:
    """What a parallel model has in place of an attribute of the user's class that is code."""
    if isinstance(value, (classmethod, staticmethod)):
        return staticmethod(value.__get__(None, kind))
    if isinstance(value, property):
        fget, fset, fdel = (f and guarded(f) for f in (value.fget, value.fset, value.fdel))
        return property(fget, fset, fdel)
    if isinstance(value, FunctionType) and not iscoroutinefunction(value):
        return guarded(value)
    return Withheld()


def grow(mirror: Mirror, known: dict[nn.Module, Mirror], model: Any = None) -> None:
    """Gives a mirror a part for each module in its source, as often as it is there; by themselves
    they are run by the `model`, by default the mirror.
    """
    model = model or ref(mirror)
    for name, child in mirror.__dict__["_source"]._modules.items():
        if child is not None and child not in known:
            known[child] = part_type(type(child))(child)  # type: ignore[arg-type]
            vars(known[child])["_within"] = model
            grow(known[child], known, model)
        mirror._modules[name] = known.get(child)


def part_at(mirror: nn.Module, path: str) -> nn.Module:
    """The part under a dotted name, which may be that of one of our own properties."""
    for name in path.split(".") if path else ():
        child = mirror._modules[name]
        assert child is not None
        mirror = child
    return mirror


def _has_setting(source: nn.Module, name: str) -> bool:
    """Whether a module has an attribute of its own that is none, nor a method of one with state."""
    found = vars(source).get(name)
    of = found.__self__ if isinstance(found, MethodType) else None
    reads = isinstance(of, nn.Module) and [*of.parameters(), *of.buffers()]
    own = name in vars(source) and name not in _OF_MODULES
    return own and not (isinstance(found, nn.Module) or reads)


def _shown(name: str, tensor: torch.Tensor | None) -> str:
    """Which part of a tensor this rank has, where that is not all of it."""
    if tensor is None or (place_of(tensor) is None and tensor not in elsewhere):
        return ""
    place = place_of(tensor)
    if place is None:
        return f"{name} {list(elsewhere[tensor])} on other pipeline ranks"
    if place.is_whole:
        return ""
    over = f", part {place.tp_rank} of {place.tp} of [{place.layout}]"
    found = f"{name}: {place.numel} of {place.layout.numel} elements"
    return found + (over if place.layout.is_split else "")
