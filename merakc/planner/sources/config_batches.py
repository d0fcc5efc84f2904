"""Batches for the models of transformers, by its own tables of which class is for which task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

# What images are cropped to where a configuration does not say, as for ImageNet.
IMAGE_SIDE = 224
COLOURS = 3
SOUND_S, SOUND_HZ = 10, 16_000
CHOICES = 4
IGNORED = -100  # the label that losses of torch and transformers leave out


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a batch: the shape of one sample's, and how many values it has, whole numbers
    from 0; any of floating point where None.
    """

    shape: tuple[int, ...]
    values: int | None = None
    dtype: torch.dtype = torch.long

    def of(self, samples: int) -> torch.Tensor:
        """Of so many samples; zeros."""
        dtype = torch.float32 if self.values is None else self.dtype
        return torch.zeros(samples, *self.shape, dtype=dtype)


Entries = Mapping[str, Entry]


def _text(config: Any, length: int) -> Entry:
    return Entry((length,), int(config.get_text_config().vocab_size))


def _class(config: Any) -> Entry:
    """The label of a sample, as the loss of transformers' heads takes it (`problem_type`)."""
    count = int(config.num_labels)
    if count == 1:
        return Entry(())
    is_multi = getattr(config, "problem_type", None) == "multi_label_classification"
    return Entry((count,)) if is_multi else Entry((), count)


def _image(config: Any) -> Entry:
    """Pictures as a configuration, or that of its part for images, has them."""
    own = getattr(config, "vision_config", config)
    return Entry((getattr(own, "num_channels", COLOURS), *_sides(own)))


def _sides(config: Any) -> tuple[int, int]:
    """The height and the width of an image."""
    size = getattr(config, "image_size", IMAGE_SIDE)
    if isinstance(size, Mapping):
        return size["height"], size["width"]
    return (size, size) if isinstance(size, int) else tuple(size)


def _sound(config: Any, length: int) -> Entry:
    """A spectrum, or as many readings of a wave as leave a frame for each letter and blank."""
    if not hasattr(config, "conv_stride"):
        return Entry((config.max_length, config.num_mel_bins))
    return Entry((max(SOUND_S * SOUND_HZ, 2 * length * prod(config.conv_stride)),))


def _words(config: Any, length: int) -> Entries:
    return {"input_ids": _text(config, length), "labels": _text(config, length)}


def _speech(config: Any, length: int) -> Entries:
    frames = 2 * config.max_source_positions
    return {"input_features": Entry((config.num_mel_bins, frames)), "labels": _text(config, length)}


def _images(config: Any, _: int) -> Entries:
    return {"pixel_values": _image(config), "labels": _class(config)}


def _texts(config: Any, length: int) -> Entries:
    return {"input_ids": _text(config, length), "labels": _class(config)}


def _tokens(config: Any, length: int) -> Entries:
    return {
        "input_ids": _text(config, length),
        "labels": Entry((length,), int(config.num_labels)),
    }


def _spans(config: Any, length: int) -> Entries:
    return {
        "input_ids": _text(config, length),
        "start_positions": Entry((), length),
        "end_positions": Entry((), length),
    }


def _choices(config: Any, length: int) -> Entries:
    words = _text(config, length).values
    return {"input_ids": Entry((CHOICES, length), words), "labels": Entry((), CHOICES)}


def _sentences(config: Any, length: int) -> Entries:
    return {"input_ids": _text(config, length), "labels": Entry((), 2)}


def _pairs(config: Any, _: int) -> Entries:
    """Images and their texts, whose own length is short."""
    length = config.text_config.max_position_embeddings
    return {"input_ids": _text(config, length), "pixel_values": _image(config)}


def _pixels(config: Any, _: int) -> Entries:
    image = _image(config)
    return {"pixel_values": image, "labels": Entry(image.shape[1:], int(config.num_labels))}


def _hidden_patches(config: Any, _: int) -> Entries:
    image = _image(config)
    patches = prod(side // config.patch_size for side in image.shape[1:])
    return {"pixel_values": image, "bool_masked_pos": Entry((patches,), 2, torch.bool)}


def _videos(config: Any, _: int) -> Entries:
    shape = (config.num_frames, *_image(config).shape)
    return {"pixel_values": Entry(shape), "labels": _class(config)}


def _letters(config: Any, length: int) -> Entries:
    return {"input_values": _sound(config, length), "labels": _text(config, length)}


def _sounds(config: Any, length: int) -> Entries:
    return {"input_values": _sound(config, length), "labels": _class(config)}


# By transformers' tables, those first that a kind of model without a class is taken from.
TASKS: dict[str, Callable[[Any, int], Entries]] = {
    "SPEECH_SEQ_2_SEQ": _speech,
    "SEQ_TO_SEQ_CAUSAL_LM": _words,
    "MASKED_LM": _words,
    "CAUSAL_LM": _words,
    "IMAGE_CLASSIFICATION": _images,
    "ZERO_SHOT_IMAGE_CLASSIFICATION": _pairs,
    "CTC": _letters,
    "VIDEO_CLASSIFICATION": _videos,
    "AUDIO_CLASSIFICATION": _sounds,
    "SEMANTIC_SEGMENTATION": _pixels,
    "SEQUENCE_CLASSIFICATION": _texts,
    "TOKEN_CLASSIFICATION": _tokens,
    "QUESTION_ANSWERING": _spans,
    "MULTIPLE_CHOICE": _choices,
    "NEXT_SENTENCE_PREDICTION": _sentences,
    "MASKED_IMAGE_MODELING": _hidden_patches,
}
# What such a model is told beside tensors.
SAID = {"ZERO_SHOT_IMAGE_CLASSIFICATION": {"return_loss": True}}


def _tables() -> Iterator[tuple[str, Mapping[str, Any]]]:
    from transformers.models.auto import modeling_auto

    for task in TASKS:
        yield task, getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")


def task_of(kind: str, model_type: str) -> str | None:
    """The task that a class of transformers' is for; None where none of `TASKS` is."""
    return next((task for task, table in _tables() if kind in _names(table, model_type)), None)


def class_of(model_type: str) -> str | None:
    """The class that models of a type are trained as, where it is not said; None if none is."""
    return next((n for _, table in _tables() for n in _names(table, model_type)), None)


def _names(table: Mapping[str, Any], model_type: str) -> tuple[str, ...]:
    found = table.get(model_type)
    return (found,) if isinstance(found, str) else tuple(found or ())


def batches_for(
    task: str, config: Any, length: int
) -> tuple[Callable[[int], dict[str, Any]], dict[str, int]]:
    """What gives a batch of any number of samples, and how many values whole numbers in it have.

    Raises `AttributeError` and others where the configuration does not say what a sample is.
    """
    entries = TASKS[task](config, length)
    bounds = {name: entry.values for name, entry in entries.items() if entry.values is not None}
    return partial(_batch, entries, SAID.get(task, {})), bounds


def ignored_label(task: str, config: Any) -> int:
    """The label that the loss leaves out."""
    return int(config.semantic_loss_ignore_index) if TASKS[task] is _pixels else IGNORED


def _batch(entries: Entries, said: Mapping[str, Any], samples: int) -> dict[str, Any]:
    return {name: entry.of(samples) for name, entry in entries.items()} | dict(said)
