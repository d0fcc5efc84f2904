"""Tiny models that run the real modelling code, with batches that are uneven on purpose.

Sequences differ in length and labels are missing at random, so that micro-batches hold different
numbers of valid labels; a vocabulary of 131 divides by no number of ranks; Llama has fewer
key-value heads than heads. Every model has at least four blocks, for four pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.plain_models import ResNet, TransformerEncoder

Batch = dict[str, torch.Tensor]

SEQUENCE = 12
EVEN_VOCABULARY = 128
ODD_VOCABULARY = 131
CLASSES = 5
IGNORED = -100  # the label that transformers' and torch's losses leave out
FIRST_WORD = 3  # smaller ids are padding and the begin and end of a sequence

HIDDEN, HEADS, KV_HEADS, WIDE, LAYERS = 32, 4, 2, 64, 4
MELS, FRAMES = 8, 32
IMAGE = 16


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A model and its batches.

    `build(dropout)` gives freshly initialised float32 weights, `make_batch(batch_size, generator)`
    a float32 batch, `valid_labels(batch)` the number of labels over which the model's loss is a
    mean. `casts_float32` says that the model's own code computes parts of a float64 model in
    float32, `running_statistics` that its forward writes buffers.
    """

    name: str
    build: Callable[[float], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]
    valid_labels: Callable[[Batch], int]
    casts_float32: bool = False
    running_statistics: bool = False

    def model(self, dtype: torch.dtype = torch.float32, *, dropout: float = 0.0) -> nn.Module:
        """The model in train mode, with the same weights at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build(dropout).to(dtype).train()

    def batch(self, batch_size: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Batch:
        """Samples of `seed`; floating-point inputs are of `dtype`."""
        made = self.make_batch(batch_size, torch.Generator().manual_seed(seed))
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in made.items()}


def words(shape: tuple[int, ...], generator: torch.Generator, vocabulary: int) -> torch.Tensor:
    """Random ids of `shape`, no special ones."""
    return torch.randint(FIRST_WORD, vocabulary, shape, generator=generator)


def padding_mask(batch_size: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`[batch_size, length]`, 1 where there is a word: at least a third, at the front."""
    lengths = torch.randint(length // 3, length + 1, (batch_size, 1), generator=generator)
    return (torch.arange(length) < lengths).long()


def drop_labels(labels: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Ignores a random `share` of the labels, but never all of a sample: position 1 stays."""
    dropped = torch.rand(labels.shape, generator=generator) < share
    dropped[:, 1] = False
    return labels.masked_fill(dropped, IGNORED)


def causal_batch(vocabulary: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Makes padded sequences whose labels are their own words."""
    ids = words((batch_size, SEQUENCE), generator, vocabulary)
    mask = padding_mask(batch_size, SEQUENCE, generator)
    labels = drop_labels(ids.masked_fill(mask == 0, IGNORED), 0.1, generator)
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": labels,
    }


def masked_batch(batch_size: int, generator: torch.Generator) -> Batch:
    """Most labels are ignored, as where only masked words are to be found again."""
    batch = causal_batch(ODD_VOCABULARY, batch_size, generator)
    batch["labels"] = drop_labels(batch["labels"], 0.6, generator)
    return batch


def text_to_text_batch(vocabulary: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Makes padded sequences whose labels are other, shorter ones."""
    batch = causal_batch(vocabulary, batch_size, generator)
    target = words((batch_size, SEQUENCE - 3), generator, vocabulary)
    mask = padding_mask(batch_size, SEQUENCE - 3, generator)
    return {**batch, "labels": target.masked_fill(mask == 0, IGNORED)}


def speech_batch(batch_size: int, generator: torch.Generator) -> Batch:
    """Spectra `[batch_size, mels, frames]` and the words spoken."""
    text = text_to_text_batch(ODD_VOCABULARY, batch_size, generator)
    sound = torch.randn(batch_size, MELS, FRAMES, generator=generator)
    return {"input_features": sound, "labels": text["labels"]}


def images(size: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Images `[batch, 3, size, size]` and their classes."""
    pixels = torch.randn(batch_size, 3, size, size, generator=generator)
    labels = torch.randint(0, CLASSES, (batch_size,), generator=generator)
    return {"pixel_values": pixels, "labels": labels}


def shifted(batch: Batch) -> int:
    """Causal losses predict the next word, so the first label is never used."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def unshifted(batch: Batch) -> int:
    """Every label that is not ignored."""
    return int((batch["labels"] != IGNORED).sum())


def transformers_model(
    class_name: str, dropouts: tuple[str, ...], **sizes: Any
) -> Callable[[float], nn.Module]:
    """A model of transformers; each of `dropouts` names a rate in its config."""

    def build(dropout: float) -> nn.Module:
        kind = getattr(transformers, class_name)
        config = kind.config_class(**sizes, **dict.fromkeys(dropouts, dropout))
        if hasattr(config, "use_cache"):
            config.use_cache = False
        model: nn.Module = kind(config)
        return model

    return build


# The names that most configurations have for them.
IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}  # fmt: skip
GROUPED: dict[str, Any] = {"num_key_value_heads": KV_HEADS}
VIT: dict[str, Any] = {"patch_size": 4, **SIZES}
T5_SIZES: dict[str, Any] = {
    "vocab_size": EVEN_VOCABULARY, "d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": WIDE,
    "num_layers": 2, "num_decoder_layers": 2, "num_heads": HEADS, "pad_token_id": 0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
    "decoder_start_token_id": 0,
}  # fmt: skip
GPT_SIZES: dict[str, Any] = {
    "vocab_size": ODD_VOCABULARY, "n_positions": SEQUENCE, "n_embd": HIDDEN, "n_layer": LAYERS,
    "n_head": HEADS, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Of BART, Whisper and their likes. Whole layers that are left out at random would make the graph
# depend on the draw.
SEQ2SEQ_SIZES: dict[str, Any] = {
    "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": WIDE, "decoder_ffn_dim": WIDE, **IDS,
    "decoder_start_token_id": 2, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
GPT_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
SEQ2SEQ_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
BERT_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def causal_case(
    name: str, build: Callable[[float], nn.Module], vocabulary: int = EVEN_VOCABULARY
) -> ModelCase:
    """A model that guesses the next word."""
    return ModelCase(name, build, partial(causal_batch, vocabulary), shifted, casts_float32=True)


def like_llama(
    name: str, class_name: str, *dropouts: str, vocabulary: int = EVEN_VOCABULARY, **sizes: Any
) -> ModelCase:
    """A causal language model of four layers, whose config follows Llama's names."""
    build = transformers_model(
        f"{class_name}ForCausalLM", dropouts or ("attention_dropout",),
        **{"vocab_size": vocabulary, **SIZES, **IDS, **sizes},
    )  # fmt: skip
    return causal_case(name, build, vocabulary)


def masked_case(
    name: str,
    class_name: str,
    dropouts: tuple[str, ...] = BERT_DROPOUTS,
    *,
    casts_float32: bool = False,
    **sizes: Any,
) -> ModelCase:
    """A model that guesses masked words."""
    given = {"vocab_size": ODD_VOCABULARY, "max_position_embeddings": SEQUENCE, **SIZES, **IDS}
    build = transformers_model(f"{class_name}ForMaskedLM", dropouts, **given | sizes)
    return ModelCase(name, build, masked_batch, unshifted, casts_float32=casts_float32)


def like_bart(
    name: str, class_name: str, *, casts_float32: bool = False, **sizes: Any
) -> ModelCase:
    """A model of text to text whose config follows BART's names."""
    build = transformers_model(
        f"{class_name}ForConditionalGeneration", SEQ2SEQ_DROPOUTS, vocab_size=EVEN_VOCABULARY,
        **SEQ2SEQ_SIZES, **sizes,
    )  # fmt: skip
    make = partial(text_to_text_batch, EVEN_VOCABULARY)
    return ModelCase(name, build, make, unshifted, casts_float32=casts_float32)


def like_t5(name: str, class_name: str, **sizes: Any) -> ModelCase:
    """A model of text to text whose config follows T5's names."""
    build = transformers_model(
        f"{class_name}ForConditionalGeneration", ("dropout_rate",), **T5_SIZES, **sizes
    )
    make = partial(text_to_text_batch, EVEN_VOCABULARY)
    return ModelCase(name, build, make, unshifted, casts_float32=True)


def classifier(
    name: str,
    class_name: str,
    dropouts: tuple[str, ...] = (),
    *,
    image: int = IMAGE,
    running_statistics: bool = False,
    **sizes: Any,
) -> ModelCase:
    """A model that tells the class of an image."""
    build = transformers_model(
        f"{class_name}ForImageClassification", dropouts,
        **{"image_size": image, "num_labels": CLASSES, **sizes},
    )  # fmt: skip
    return ModelCase(
        name, build, partial(images, image), unshifted, running_statistics=running_statistics
    )


_CASES = (
    causal_case(
        "gpt2", transformers_model("GPT2LMHeadModel", GPT_DROPOUTS, **GPT_SIZES), ODD_VOCABULARY
    ),
    like_llama("llama", "Llama", **GROUPED),
    like_llama("qwen2", "Qwen2", vocabulary=ODD_VOCABULARY, **GROUPED),
    like_t5("t5", "T5"),
    like_bart("bart", "Bart", max_position_embeddings=SEQUENCE),
    ModelCase(
        "whisper",
        transformers_model(
            "WhisperForConditionalGeneration", SEQ2SEQ_DROPOUTS, vocab_size=ODD_VOCABULARY,
            num_mel_bins=MELS,
            max_source_positions=FRAMES // 2,  # its second convolution has stride 2
            max_target_positions=SEQUENCE, **SEQ2SEQ_SIZES,
        ),
        speech_batch,
        unshifted,
    ),
    masked_case("bert", "Bert"),
    classifier("vit", "ViT", BERT_DROPOUTS, **VIT),
    ModelCase(
        "transformer_encoder",
        lambda dropout: TransformerEncoder(
            ODD_VOCABULARY, SEQUENCE, HIDDEN, heads=HEADS, wide=WIDE, layers=LAYERS, dropout=dropout
        ),
        masked_batch,
        unshifted,
    ),
    ModelCase(
        "resnet",
        lambda dropout: ResNet(width=8, blocks=(2, 2), classes=CLASSES, dropout=dropout),
        partial(images, IMAGE),
        unshifted,
        running_statistics=True,
    ),
    like_llama("llama_tied", "Llama", tie_word_embeddings=True, **GROUPED),
    like_llama("mistral", "Mistral", sliding_window=6, **GROUPED),
    like_llama("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2, **GROUPED),
    like_llama("gpt_neox", "GPTNeoX", "attention_dropout", "hidden_dropout"),
    like_llama(
        "opt", "OPT", "attention_dropout", "dropout", ffn_dim=WIDE, word_embed_proj_dim=HIDDEN,
        max_position_embeddings=SEQUENCE,
    ),
)  # fmt: skip
MODELS: dict[str, ModelCase] = {case.name: case for case in _CASES}

# The ten of the equivalence table; the rest are for the comparison with torch's own pipelining.
EQUIVALENCE_MODELS = tuple(case.name for case in _CASES[:10])
