"""Texts of encoder-decoders, and of ranks that draw or end otherwise than others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import merakc
from benchmarks.ranks import run_ranks
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.groups import Groups
from merakc.train.outside.generating import drawing_alike
from tests.battery.small_models import build, warm_up
from tests.train.outside.test_caches import BEAMS, GROWING, generated, gpt2, prompts, same

NEW, START = 5, 2
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def t5() -> nn.Module:
    """With fewer layers in the decoder, and a head of its own: texts that vary."""
    return T5ForConditionalGeneration(T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=START, tie_word_embeddings=False, dropout_rate=0.0,
    ))  # fmt: skip


_SIZES: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "decoder_start_token_id": START, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2,
}  # fmt: skip


def bart() -> nn.Module:
    """Whose encoder is that of a model in it; places are learnt."""
    return BartForConditionalGeneration(BartConfig(max_position_embeddings=64, **_SIZES))


def whisper() -> nn.Module:
    """Which hears, and has a `generate` of its own."""
    return WhisperForConditionalGeneration(WhisperConfig(
        num_mel_bins=8, max_source_positions=20, max_target_positions=64, suppress_tokens=None,
        begin_suppress_tokens=None, **_SIZES,
    ))  # fmt: skip


def given(make: Any, samples: int = 2) -> Tensors:
    if make is not whisper:
        return prompts(samples)
    drawn = torch.Generator().manual_seed(0)
    return {"input_features": torch.randn(samples, 8, 40, generator=drawn, dtype=torch.float64)}


def parallel(make: Any, **layout: Any) -> Any:
    """The model in eval mode."""
    ids = torch.randint(3, 64, (4, 7), generator=torch.Generator().manual_seed(1))
    batch = {**given(make, 4), "labels": ids}
    batch |= {"labels": batch["input_ids"]} if make is gpt2 else {}
    layout = {"micro_batches": 2, **layout}
    return merakc.auto_parallel(build(make), batch, cluster=NOMINAL_CPU, **layout).eval()


def by_hand(model: Any, batch: Tensors) -> torch.Tensor:
    """The logits of a few tokens, of the encoder called by itself and caches that are asked for."""
    mask = {k: v for k, v in batch.items() if k == "attention_mask"}
    encoded, past, logits = model.get_encoder()(**batch), None, []
    new = torch.full((len(next(iter(batch.values()))), 1), START)
    with torch.no_grad():
        for _ in range(NEW):
            out = model(
                encoder_outputs=encoded, decoder_input_ids=new, past_key_values=past,
                use_cache=True, **mask,
            )  # fmt: skip
            past, new = out.past_key_values, out.logits[:, -1:].argmax(-1)
            logits.append(out.logits)
    return torch.cat(logits, 1)


def texts(model: Any, make: Any, samples: int = 2) -> Any:
    """By hand, and by `generate`."""
    batch, hows = given(make, samples), ({}, {**BEAMS, "num_return_sequences": 2})
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    tokens = torch.cat([model.generate(**batch, **how, **more) for more in hows])
    return tokens, by_hand(model, batch)


@pytest.mark.filterwarnings("ignore:merakc has compiled this model for")
@pytest.mark.parametrize("make", [t5, bart, whisper])
def test_texts_of_encoder_decoders(make: Any) -> None:
    plain, ours = build(make).eval(), parallel(make)
    same(texts(ours, make), texts(plain, make))
    if make is t5:
        for how in ({"use_cache": False}, GROWING, {"cache_implementation": "static"}):
            same(generated(ours, prompts(), **how), generated(plain, prompts(), **how))


@pytest.mark.filterwarnings("ignore:merakc has compiled this model for")
@pytest.mark.parametrize(
    ("make", "layout", "samples"),
    [
        (t5, {"tp": 2, "pp": 2}, 1),
        (bart, {"pp": 2}, 2),
        (t5, {"dp": 2, "state_shards": (2, 2, 2)}, 2),
        (bart, {"dp": 2}, 2),
    ],
)
def test_on_ranks(make: Any, layout: dict[str, Any], samples: int) -> None:
    plain = texts(build(make).eval(), make, samples)
    ranks = 4 if "tp" in layout else 2
    for ours in run_ranks(ranks, lambda: texts(parallel(make, **layout), make, samples)):
        same(ours, plain)


SAMPLED: dict[str, Any] = {"do_sample": True, "max_new_tokens": NEW, "min_new_tokens": NEW}


def drawn(make: Any, layout: dict[str, Any], *, alike: bool) -> Any:
    """Texts that are drawn by ranks of one seed, or each of its own, and the next number then."""
    model = parallel(make, **layout)
    torch.manual_seed(0 if alike else dist.get_rank())
    return model.generate(**prompts(), pad_token_id=0, **SAMPLED).tolist(), float(torch.rand(()))


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(("make", "layout"), [(gpt2, {"tp": 2}), (t5, {"pp": 2})])
def test_ranks_of_one_text_draw_the_same(make: Any, layout: dict[str, Any], alike: bool) -> None:
    model = build(make).eval()
    torch.manual_seed(0)
    tokens = model.generate(**prompts(), pad_token_id=0, **SAMPLED).tolist()  # type: ignore[operator]
    behind = float(torch.rand(()))
    torch.manual_seed(1)
    own = float(torch.rand(()))
    first, second = run_ranks(2, lambda: drawn(make, layout, alike=alike))
    assert first == (tokens, behind)
    assert second == (tokens, behind if alike else own)


def ended(make: Any, layout: dict[str, Any]) -> list[list[int]]:
    """Of which each rank of dp has prompts of its own length, and another number of tokens."""
    model, rank = parallel(make, **layout), dist.get_rank()
    new, batch = 3 + 2 * rank, {k: v[:, : 5 - 2 * rank] for k, v in prompts().items()}
    found = model.generate(**batch, do_sample=False, max_new_tokens=new, min_new_tokens=new)
    more = model.generate(**batch, do_sample=False, max_length=12 - 2 * rank, pad_token_id=0)
    return [*found.tolist(), *more.tolist()]


@pytest.mark.parametrize(("make", "sharded"), [(gpt2, False), (t5, True)])
def test_ranks_of_dp_go_on_until_all_texts_have_ended(make: Any, sharded: bool) -> None:
    layout: dict[str, Any] = {"dp": 2} | ({"state_shards": (2, 2, 2)} if sharded else {})
    found = run_ranks(2, lambda: ended(make, layout))
    for rank, ours in enumerate(found):
        batch = {k: v[:, : 5 - 2 * rank] for k, v in prompts().items()}
        model: Any = build(make).eval()
        new = 3 + 2 * rank
        plain = model.generate(**batch, do_sample=False, max_new_tokens=new, min_new_tokens=new)
        more = model.generate(**batch, do_sample=False, max_length=12 - 2 * rank, pad_token_id=0)
        assert ours == [*plain.tolist(), *more.tolist()]


@pytest.mark.filterwarnings("ignore:merakc has compiled this model for")
@pytest.mark.parametrize("make", [gpt2, t5])
def test_a_parallel_model_assists_a_plain_one(make: Any) -> None:
    plain: Any = build(make, seed=1).eval()
    batch = {k: v[1:] for k, v in prompts().items()}
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9}
    wanted = plain.generate(**batch, pad_token_id=0, **how).tolist()
    found = plain.generate(**batch, pad_token_id=0, **how, assistant_model=parallel(make))
    assert found.tolist() == wanted


def numbers(axis: str) -> list[float]:
    """The numbers that ranks of dp2 draw within, and behind it."""
    ids = {"input_ids": torch.zeros(4, 5, dtype=torch.long)}
    model = merakc.auto_parallel(
        build(gpt2), {**ids, "labels": ids["input_ids"]}, dp=2, cluster=NOMINAL_CPU
    )
    groups: Groups = model._own("_steps").groups
    torch.manual_seed(dist.get_rank())
    with drawing_alike(groups, axis):
        within = float(torch.rand(()))
    return [within, float(torch.rand(()))]


def test_numbers_are_drawn_as_the_first_rank_does() -> None:
    first, second = run_ranks(2, numbers, "world")
    assert first[0] == second[0]
    assert first[1] != second[1]
    first, second = run_ranks(2, numbers, "model")  # of which each is alone
    assert first[0] != second[0]
