"""Tiny models that run the real modelling code, with batches that are uneven on purpose.

Sequences differ in length and labels are missing at random, so that micro-batches hold different
numbers of valid labels; a vocabulary of 131 divides by no number of ranks; Llama has fewer
key-value heads than heads. Every model has at least four blocks, for four pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


def drop_labels(
    labels: torch.Tensor, share: float, generator: torch.Generator, first: int = 0
) -> torch.Tensor:
    """Ignores a random `share` of the labels, but never all of a sample: position `first` stays."""
    dropped = torch.rand(labels.shape, generator=generator) < share
    dropped[:, first] = False
    return labels.masked_fill(dropped, IGNORED)


def causal_batch(vocabulary: int) -> Callable[[int, torch.Generator], Batch]:
    """Makes padded sequences whose labels are their own words."""

    def make(batch_size: int, generator: torch.Generator) -> Batch:
        ids = words((batch_size, SEQUENCE), generator, vocabulary)
        mask = padding_mask(batch_size, SEQUENCE, generator)
        labels = drop_labels(ids.masked_fill(mask == 0, IGNORED), 0.1, generator, first=1)
        return {
            "input_ids": ids.masked_fill(mask == 0, 0),
            "attention_mask": mask,
            "labels": labels,
        }

    return make


def masked_batch(vocabulary: int) -> Callable[[int, torch.Generator], Batch]:
    """Most labels are ignored, as where only masked words are to be found again."""

    def make(batch_size: int, generator: torch.Generator) -> Batch:
        batch = causal_batch(vocabulary)(batch_size, generator)
        batch["labels"] = drop_labels(batch["labels"], 0.6, generator, first=1)
        return batch

    return make


def text_to_text_batch(vocabulary: int) -> Callable[[int, torch.Generator], Batch]:
    """Makes padded sequences whose labels are other, shorter ones."""

    def make(batch_size: int, generator: torch.Generator) -> Batch:
        batch = causal_batch(vocabulary)(batch_size, generator)
        target = words((batch_size, SEQUENCE - 3), generator, vocabulary)
        mask = padding_mask(batch_size, SEQUENCE - 3, generator)
        return {**batch, "labels": target.masked_fill(mask == 0, IGNORED)}

    return make


def speech_batch(batch_size: int, generator: torch.Generator) -> Batch:
    """Spectra `[batch_size, mels, frames]` and the words spoken."""
    text = text_to_text_batch(ODD_VOCABULARY)(batch_size, generator)
    sound = torch.randn(batch_size, MELS, FRAMES, generator=generator)
    return {"input_features": sound, "labels": text["labels"]}


def image_batch(batch_size: int, generator: torch.Generator) -> Batch:
    """Images `[batch_size, 3, height, width]` and their classes."""
    images = torch.randn(batch_size, 3, IMAGE, IMAGE, generator=generator)
    labels = torch.randint(0, CLASSES, (batch_size,), generator=generator)
    return {"pixel_values": images, "labels": labels}


def shifted(batch: Batch) -> int:
    """Causal losses predict the next word, so the first label is never used."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def unshifted(batch: Batch) -> int:
    """Every label that is not ignored."""
    return int((batch["labels"] != IGNORED).sum())


def transformers_model(
    class_name: str, config_name: str, dropouts: tuple[str, ...], **sizes: Any
) -> Callable[[float], nn.Module]:
    """A model of transformers; each of `dropouts` names a rate in its config."""

    def build(dropout: float) -> nn.Module:
        config = getattr(transformers, config_name)(**sizes, **dict.fromkeys(dropouts, dropout))
        if hasattr(config, "use_cache"):
            config.use_cache = False
        model = getattr(transformers, class_name)(config)
        assert isinstance(model, nn.Module)
        return model

    return build


def decoder(
    name: str,
    *,
    dropouts: tuple[str, ...],
    vocabulary: int = EVEN_VOCABULARY,
    config: str = "",
    **sizes: Any,
) -> Callable[[float], nn.Module]:
    """A causal language model whose config follows Llama's names."""
    return transformers_model(
        f"{name}ForCausalLM",
        f"{config or name}Config",
        dropouts,
        **{
            "vocab_size": vocabulary,
            "hidden_size": HIDDEN,
            "intermediate_size": WIDE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **sizes,
        },
    )


def speech_and_text_sizes(**sizes: Any) -> dict[str, Any]:
    """What BART and Whisper share."""
    return {
        "d_model": HIDDEN,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": WIDE,
        "decoder_ffn_dim": WIDE,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        **sizes,
    }


T5_SIZES: dict[str, Any] = {
    "vocab_size": EVEN_VOCABULARY, "d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": WIDE,
    "num_layers": 2, "num_decoder_layers": 2, "num_heads": HEADS, "pad_token_id": 0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
    "decoder_start_token_id": 0,
}  # fmt: skip
GPT_SIZES: dict[str, Any] = {
    "vocab_size": ODD_VOCABULARY,
    "n_positions": SEQUENCE,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": KV_HEADS}
SEQ2SEQ_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
BERT_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")

_CASES = (
    ModelCase(
        "gpt2",
        transformers_model(
            "GPT2LMHeadModel",
            "GPT2Config",
            ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
            **GPT_SIZES,
        ),
        causal_batch(ODD_VOCABULARY),
        shifted,
        casts_float32=True,
    ),
    ModelCase(
        "llama",
        decoder("Llama", dropouts=("attention_dropout",), **GROUPED),
        causal_batch(EVEN_VOCABULARY),
        shifted,
        casts_float32=True,
    ),
    ModelCase(
        "qwen2",
        decoder("Qwen2", dropouts=("attention_dropout",), vocabulary=ODD_VOCABULARY, **GROUPED),
        causal_batch(ODD_VOCABULARY),
        shifted,
        casts_float32=True,
    ),
    ModelCase(
        "t5",
        transformers_model("T5ForConditionalGeneration", "T5Config", ("dropout_rate",), **T5_SIZES),
        text_to_text_batch(EVEN_VOCABULARY),
        unshifted,
        casts_float32=True,
    ),
    ModelCase(
        "bart",
        transformers_model(
            "BartForConditionalGeneration",
            "BartConfig",
            SEQ2SEQ_DROPOUTS,
            **speech_and_text_sizes(vocab_size=EVEN_VOCABULARY, max_position_embeddings=SEQUENCE),
        ),
        text_to_text_batch(EVEN_VOCABULARY),
        unshifted,
    ),
    ModelCase(
        "whisper",
        transformers_model(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            SEQ2SEQ_DROPOUTS,
            **speech_and_text_sizes(
                vocab_size=ODD_VOCABULARY,
                num_mel_bins=MELS,
                max_source_positions=FRAMES // 2,  # its second convolution has stride 2
                max_target_positions=SEQUENCE,
            ),
        ),
        speech_batch,
        unshifted,
    ),
    ModelCase(
        "bert",
        transformers_model(
            "BertForMaskedLM",
            "BertConfig",
            BERT_DROPOUTS,
            vocab_size=ODD_VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=WIDE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=SEQUENCE,
            pad_token_id=0,
        ),
        masked_batch(ODD_VOCABULARY),
        unshifted,
    ),
    ModelCase(
        "vit",
        transformers_model(
            "ViTForImageClassification",
            "ViTConfig",
            BERT_DROPOUTS,
            image_size=IMAGE,
            patch_size=4,
            hidden_size=HIDDEN,
            intermediate_size=WIDE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_labels=CLASSES,
        ),
        image_batch,
        unshifted,
    ),
    ModelCase(
        "transformer_encoder",
        lambda dropout: TransformerEncoder(
            ODD_VOCABULARY, SEQUENCE, HIDDEN, heads=HEADS, wide=WIDE, layers=LAYERS, dropout=dropout
        ),
        masked_batch(ODD_VOCABULARY),
        unshifted,
    ),
    ModelCase(
        "resnet",
        lambda dropout: ResNet(width=8, blocks=(2, 2), classes=CLASSES, dropout=dropout),
        image_batch,
        unshifted,
        running_statistics=True,
    ),
    ModelCase(
        "llama_tied",
        decoder("Llama", dropouts=("attention_dropout",), tie_word_embeddings=True, **GROUPED),
        causal_batch(EVEN_VOCABULARY),
        shifted,
        casts_float32=True,
    ),
    ModelCase(
        "mistral",
        decoder("Mistral", dropouts=("attention_dropout",), sliding_window=6, **GROUPED),
        causal_batch(EVEN_VOCABULARY),
        shifted,
        casts_float32=True,
    ),
    ModelCase(
        "mixtral",
        decoder(
            "Mixtral",
            dropouts=("attention_dropout",),
            num_local_experts=4,
            num_experts_per_tok=2,
            **GROUPED,
        ),
        causal_batch(EVEN_VOCABULARY),
        shifted,
        casts_float32=True,
    ),
    ModelCase(
        "gpt_neox",
        decoder("GPTNeoX", dropouts=("attention_dropout", "hidden_dropout")),
        causal_batch(EVEN_VOCABULARY),
        shifted,
        casts_float32=True,
    ),
    ModelCase(
        "opt",
        decoder(
            "OPT",
            dropouts=("attention_dropout", "dropout"),
            ffn_dim=WIDE,
            word_embed_proj_dim=HIDDEN,
            max_position_embeddings=SEQUENCE,
        ),
        causal_batch(EVEN_VOCABULARY),
        shifted,
        casts_float32=True,
    ),
)

MODELS: dict[str, ModelCase] = {case.name: case for case in _CASES}

# The ten of the equivalence table; the rest are for the comparison with torch's own pipelining.
EQUIVALENCE_MODELS = tuple(case.name for case in _CASES[:10])
