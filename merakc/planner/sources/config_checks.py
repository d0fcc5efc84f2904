"""Refuses configurations of which no model can be made, before time and memory go into it."""

from __future__ import annotations

import importlib.util
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

# Models of transformers have at most 8,000 modules and parameters as they are published. So many
# are made in half a second; to record and plan them takes minutes.
MOST_MODULES = 30_000
# Configurations make lists with an entry for each layer before there is a model.
MOST_LAYERS = 2_000
LAYERS = re.compile(r"(^|_)n?_?layers?$")
# Of text: thirty million tokens.
MOST_SAMPLE_BYTES = 1 << 28
TRUST = "give --trust-remote-code if you trust it"
# Implementations that are torch's or transformers' own; of others some are fetched from the hub.
LOCAL = ("eager", "sdpa", "flex_attention")
# What frequencies and positions are computed of, and how many of them that takes at the most.
RANGES, MOST_REAL = (torch.arange, torch.linspace, torch.tensor), 1 << 20
_INDEX = re.compile(r"\.\d+(?=\.|$)")


def check_fields(fields: Any, trusted: bool) -> None:
    """Raises `ValueError` for fields of a config.json that are none, ask for more layers than
    there are, or, where it is not `trusted`, for code from the hub.
    """
    if not isinstance(fields, Mapping):
        raise ValueError("the top level is no JSON object")
    for key, value in fields.items():
        if isinstance(value, Mapping):
            check_fields(value, trusted)
        if isinstance(value, int) and LAYERS.search(key) and value > MOST_LAYERS:
            raise ValueError(f"{key} is {value}; at most {MOST_LAYERS} layers can be planned")
        if key.endswith(("attn_implementation", "experts_implementation")) and not trusted:
            for name in value.values() if isinstance(value, Mapping) else (value,):
                if isinstance(name, str) and is_remote(name):
                    raise ValueError(f"{key} is {name!r}, a kernel from the hub; {TRUST}")


def is_remote(name: str) -> bool:
    """Whether an implementation of that name may be code from the hub."""
    flash = name.startswith("flash") and importlib.util.find_spec("flash_attn") is None
    return name not in LOCAL and ("/" in name or flash)


def check_config(config: Any) -> None:
    """Raises `ValueError` where a configuration of transformers', with its defaults, names classes
    in no list, or groups heads that do not divide.
    """
    classes = getattr(config, "architectures", None) or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"architectures is {classes!r}: give a list of names")
    heads, groups = (
        getattr(config, f"num_{name}_heads", None) for name in ("attention", "key_value")
    )
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        raise ValueError(
            f"num_key_value_heads is {groups}, which does not divide {heads} attention heads"
        )


@contextmanager
def bounded_modules() -> Iterator[None]:
    """While it is entered, modules and parameters are counted. Raises `ValueError` for too many."""
    left = MOST_MODULES

    def count(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(
                f"it has more than {MOST_MODULES} modules and parameters, and published models "
                "have at most 8000: give fewer layers, or smaller lists of parts"
            )

    hooks = (
        registration.register_module_module_registration_hook(count),
        registration.register_module_parameter_registration_hook(count),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_model(model: nn.Module) -> None:
    """Raises `ValueError` where a parameter is empty, or there is none of a kind of layers."""
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            shape = " x ".join(map(str, parameter.shape))
            raise ValueError(f"parameter {name} is {shape}: sizes must be 1 or more")
    layers: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            pattern = _INDEX.sub(".*", name)
            layers[pattern] = layers.get(pattern, 0) + len(module)
    for pattern, count in layers.items():
        if not count:
            raise ValueError(f"{pattern} has no layers: numbers of layers must be 1 or more")


class _Ranges(TorchFunctionMode):
    """Makes short ranges, and what is computed of them, real; all else takes no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, (int, float))]
            is_short = func in RANGES and all(abs(n) < MOST_REAL for n in numbers)
            kwargs = {**kwargs, "device": "cpu" if is_short else "meta"}
        return func(*args, **kwargs)


def check_buffers(make: Callable[[], nn.Module]) -> None:
    """Raises `ValueError` where a buffer that the model computes of its configuration is NaN or
    infinite, as the frequencies of `rope_theta` 0 are; a mask is infinite below zero.
    """
    try:
        with _Ranges(), bounded_modules(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = dict(make().named_buffers())
    except Exception:  # it mixes what is real with what is not: nothing is known of it
        return
    for name, value in found.items():
        if value.is_meta or not value.is_floating_point():
            continue
        if not (value < math.inf).all():
            raise ValueError(
                f"buffer {name} is not finite: a number of the config that it is computed from, "
                "such as rope_theta, cannot be"
            )


def check_sample(batch: Callable[[int], Mapping[str, Any]]) -> None:
    """Raises `ValueError` where a sample is empty, or larger than any memory is for."""
    with torch.device("meta"):
        given = batch(1)
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if not 0 < tensor.numel() * tensor.element_size() <= MOST_SAMPLE_BYTES:
            shape = " x ".join(map(str, tensor.shape))
            raise ValueError(
                f"a sample's {name} is {shape}: give --seq, or a size that is above 0 and takes "
                f"at most {MOST_SAMPLE_BYTES >> 20} MiB"
            )
