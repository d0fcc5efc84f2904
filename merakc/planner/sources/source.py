"""Where a model to plan for comes from: a configuration, a preset, or a function of the user's.

Models are made on the meta device, without weights; batches hold zeros: only shapes are looked at.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from merakc.batches.dims import check_batch_dims, parse_batch_dims
from merakc.batches.split import batch_size_of, call_arguments, sample_rows, with_samples
from merakc.errors import ConfigError, MerakWarning, failure
from merakc.files.printable import count_of
from merakc.files.reading import parse_json, read_text
from merakc.ir.batches import BY_SIZE, BatchDims, BatchLayout
from merakc.machines.garbage import few_collections
from merakc.planner.sources.config_batches import (
    IGNORED,
    batches_for,
    class_of,
    ignored_label,
    task_of,
)
from merakc.planner.sources.config_checks import (
    TRUST,
    bounded_modules,
    check_buffers,
    check_config,
    check_fields,
    check_model,
    check_sample,
)

# Published configurations, in the fields of transformers' configs.
PRESETS: dict[str, dict[str, Any]] = {
    # Radford et al. 2019, table 2.
    "gpt2": {"model_type": "gpt2"},
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    # Brown et al. 2020 (arXiv 2005.14165), table 2.1.
    "gpt3-175b": {
        "model_type": "gpt2", "n_positions": 2048, "n_embd": 12288, "n_layer": 96, "n_head": 96,
    },
    # Llama team 2024 (arXiv 2407.21783), table 3.
    "llama-3-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 8192,
    },
    "llama-3-70b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "max_position_embeddings": 8192,
    },
    # Raffel et al. 2020 (arXiv 1910.10683), section 3.7.
    "t5-11b": {
        "model_type": "t5", "d_model": 1024, "d_ff": 65536, "d_kv": 128, "num_heads": 128,
        "num_layers": 24, "vocab_size": 32128, "decoder_start_token_id": 0,
    },
}  # fmt: skip
# Where configs say how long texts are, and how long those are of configs that do not.
POSITIONS = ("n_positions", "max_position_embeddings", "max_target_positions")
OPEN_LENGTH = 512
# What models of several kinds of input take beside texts.
BESIDE_TEXT = ("pixel_values", "input_features", "input_values")
MOST_OF_A_REASON = 400  # letters
HINT = "give MODULE:FUNCTION, a function that returns a model and a batch (and its batch_dims)"


@dataclass(frozen=True)
class Source:
    """A model, and the batch of any number of samples that it is called with.

    Of a configuration, `config` is transformers' own and `sequence` the tokens of a text. `bounds`
    says of tensors of integers in the batch how many values they have, from 0, and `ignored` which
    label the loss leaves out; `example` is the batch of a function of the user's, and `dims` says
    where its samples stand.
    """

    name: str
    model: nn.Module
    batch: Callable[[int], Any]
    config: Any = None
    sequence: int = 0
    bounds: Mapping[str, int] = field(default_factory=dict)
    ignored: int = IGNORED
    example: Any = None
    dims: BatchDims = field(default_factory=dict)

    def part(
        self, samples: int, *, alone: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any], BatchLayout]:
        """A dp rank's batch whose parts have so many samples, and how it lies among others.

        Whatever their number, it is one of two parts: of two dp ranks, or both of one that is
        `alone`, whose forward may go by their values: a function's are then those of its batch.
        """
        if not alone:
            return *call_arguments(self.batch(samples)), BatchLayout((samples, samples), 1)
        layout = BatchLayout((2 * samples,), 2)
        if self.example is None:
            return *call_arguments(self.batch(layout.own)), layout
        return *call_arguments(_repeated(self.example, layout.own, self.dims)), layout


@few_collections()
def load_source(
    text: str, sequence: int | None = None, *, trust_remote_code: bool = False
) -> Source:
    """The source that a user names: a preset, a config.json or its folder, or MODULE:FUNCTION.

    `sequence` is the length of texts; the model's own where None. Code that a configuration names
    runs only with `trust_remote_code`. Raises `ConfigError` where there is no such thing, or it is
    of a kind whose batches are not known.
    """
    if text in PRESETS:
        return _from_config(text, PRESETS[text], sequence)
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    if path.is_file() and path.suffix == ".json":
        return _from_file(path, sequence, trust_remote_code)
    if ":" in text:
        if sequence is not None:
            raise ConfigError(
                f"--seq {sequence}: texts are as long as in the batch that {text} gives; leave "
                "--seq out, and let the function give others"
            )
        return _from_function(text)
    if Path(text).is_dir():
        raise ConfigError(f"{text}: this folder has no config.json; give one that has, or {HINT}")
    if path.suffix == ".json":
        raise ConfigError(f"{text}: there is no such file; give a config.json, or {HINT}")
    near = difflib.get_close_matches(text.lower(), PRESETS, 1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    raise ConfigError(
        f"{text!r} is no preset ({', '.join(PRESETS)}), no config.json and no folder with "
        f"one{meant}; or {HINT}"
    )


def _from_function(text: str) -> Source:
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{text!r} names no {'function' if module_name else 'module'}; {HINT}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{text}: importing it fails: {failure(error)}; {HINT}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{text}: module {module_name!r} has no function {name!r}; {HINT}")
    try:
        made = function()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{text}() fails: {failure(error)}; {HINT}") from error
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3):
        what = (
            f"{count_of(len(made), 'value')}"
            if isinstance(made, (tuple, list))
            else type(made).__name__
        )
        raise ConfigError(f"{text}() gave no model and batch, but {what}; {HINT}")
    model, batch, *more = made
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{text}() gave {type(model).__name__} for a model; {HINT}")
    if more and not isinstance(more[0], Mapping | None):
        what = type(more[0]).__name__
        raise ConfigError(f"{text}() gave batch_dims that are {what}, not a mapping; {HINT}")
    dims = parse_batch_dims(more[0] if more else None)
    check_batch_dims(*call_arguments(batch), dims)
    return Source(
        text, model, lambda samples: resized(batch, samples, dims), example=batch, dims=dims
    )


def resized(batch: Any, samples: int, dims: BatchDims = BY_SIZE) -> Any:
    """The batch with another number of samples; their values are zeros."""
    args, kwargs = call_arguments(batch)
    args, kwargs = with_samples(
        args, kwargs, sample_rows(args, kwargs, dims),
        lambda rows, leaf: leaf.new_zeros(rows.sized(leaf.shape, samples)),
    )  # fmt: skip
    return kwargs or args


def _repeated(batch: Any, samples: int, dims: BatchDims) -> Any:
    """The batch with another number of samples, its own as often as it takes."""
    args, kwargs = call_arguments(batch)
    times, left = divmod(samples, size := batch_size_of(args, kwargs, dims))
    args, kwargs = with_samples(
        args, kwargs, sample_rows(args, kwargs, dims),
        lambda rows, x: rows.join([*[rows.take(x, 0, size)] * times, rows.take(x, 0, left)]),
    )  # fmt: skip
    return kwargs or args


def _from_file(path: Path, sequence: int | None, trusted: bool) -> Source:
    transformers = _transformers(str(path))
    try:
        fields = parse_json(read_text(path))
        check_fields(fields, trusted)
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trusted)
        check_config(config)
    except Exception as error:  # of its many checks
        why = " ".join(str(error).split())[:MOST_OF_A_REASON] or type(error).__name__
        if "trust_remote_code" in str(error):
            why = f"it has code of its own; {TRUST}"
        raise ConfigError(f"{path}: no config of transformers': {why}; mend it") from error
    return source_of(str(path), config, sequence)


def _from_config(name: str, fields: Mapping[str, Any], sequence: int | None) -> Source:
    transformers = _transformers(name)
    return source_of(name, transformers.AutoConfig.for_model(**fields), sequence)


def _transformers(wanted_by: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{wanted_by}: transformers is not installed; install merakc[hf], or {HINT}"
        ) from error
    # Its advice is for those who run the model.
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return transformers


@few_collections()
def source_of(name: str, config: Any, sequence: int | None = None, device: str = "meta") -> Source:
    """The model of a configuration of transformers', made on a device, and its batches.

    Raises `ConfigError` for a kind of model whose batches are not known.
    """
    transformers = _transformers(name)
    kind, config = _trained_as(name, config, transformers)
    task = task_of(kind.__name__, config.model_type)
    assert task is not None, kind
    config.use_cache = False  # before the stacks of an encoder-decoder copy it
    try:
        with torch.device(device), bounded_modules():
            model = kind(config)
        check_model(model)
        check_buffers(partial(kind, config))
        length = _own_length(config) if sequence is None else sequence
        batch, bounds = _batches(name, kind, task, config, length)
        check_sample(batch)
        if unknown := batch(1).keys() - signature(kind.forward).parameters:
            raise ValueError(f"its forward takes no {', '.join(sorted(unknown))}")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name}: {kind.__name__} cannot be made of this config: "
            f"{failure(error)}; mend the config, or {HINT}"
        ) from error
    _check_length(name, config, length)
    ignored = ignored_label(task, config)
    return Source(name, model.train(), batch, config, length, bounds, ignored=ignored)


def _batches(name: str, kind: Any, task: Any, config: Any, length: int) -> Any:
    """The batches of a kind of model, as merakc makes them."""
    try:
        return batches_for(task, config, length)
    except AttributeError as error:
        raise ConfigError(
            f"{name}: the batch that merakc makes for {kind.__name__} goes by what this config "
            f"does not say ({error}); {HINT}"
        ) from error


def _trained_as(name: str, config: Any, transformers: Any) -> tuple[Any, Any]:
    """The class that a configuration is trained as, and the configuration that this is made of.

    A class that transformers no longer has, or one without a loss, becomes the usual one of its
    type, and a model of several kinds of input its model of texts; a warning says so.
    """
    named = next(iter(getattr(config, "architectures", None) or ()), "")
    found = getattr(transformers, named, None)
    takes = () if found is None else signature(found.forward).parameters
    text = config.get_text_config()
    is_mixed = text is not config and any(name in takes for name in BESIDE_TEXT)
    if task_of(named, config.model_type) and not (is_mixed and "labels" in takes):
        return found, config
    own = class_of(config.model_type)
    if own is not None and "labels" not in takes:
        if named:
            why = "transformers has no such class" if found is None else "it takes no labels"
            _say(f"{name}: this plans {own} in place of {named}: {why}")
        return getattr(transformers, own), config
    if is_mixed and (own := class_of(text.model_type)) is not None:
        _say(f"{name}: this plans {own}, the part of {named} that reads texts, alone; {HINT}")
        return getattr(transformers, own), text
    raise ConfigError(f"{name}: merakc knows no batch for {named or config.model_type}; {HINT}")


def _say(text: str) -> None:
    warnings.warn(text, MerakWarning, stacklevel=4)


def _own_length(config: Any) -> int:
    return next((int(n) for k in POSITIONS if (n := getattr(config, k, None))), OPEN_LENGTH)


def _check_length(name: str, config: Any, length: int) -> None:
    """Warns where texts are longer than the config says."""
    known = {key: int(n) for key in POSITIONS if (n := getattr(config, key, None))}
    if length > min(known.values(), default=length):
        key = min(known, key=lambda k: known[k])
        warnings.warn(
            f"{name}: texts of {length} tokens are longer than the config's {key}, {known[key]}; "
            "a model that learns its positions cannot run on them",
            MerakWarning,
            stacklevel=2,
        )
