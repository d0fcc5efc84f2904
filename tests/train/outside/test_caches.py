from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError, RecordError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.outside.caches import ROOM, cache_in
from tests.battery.small_models import build, warm_up

NEW, PADDED = 4, 2
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def llama() -> nn.Module:
    """With two heads for keys."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    ))  # fmt: skip


def gpt2() -> nn.Module:
    """With places that are learnt."""
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


def mistral() -> nn.Module:
    """Of which layers keep the last few tokens alone."""
    return MistralForCausalLM(MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=6,
    ))  # fmt: skip


def prompts(samples: int = 2) -> Tensors:
    """Of which the first begins with padding."""
    ids = torch.randint(64, (samples, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :PADDED] = 0
    return {"input_ids": ids, "attention_mask": mask}


def parallel(make: Any, **layout: int) -> Any:
    """The model in eval mode; trained by one step, so that it is what trains."""
    ids = torch.randint(64, (4, 7), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    model = merakc.auto_parallel(build(make), batch, micro_batches=2, cluster=NOMINAL_CPU, **layout)
    return model.eval()


def generated(model: Any, batch: Tensors, **how: Any) -> Any:
    """What a model goes on with, with the logits that it chose by."""
    found = model.generate(
        **batch, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True, **how,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


def same(ours: Any, plain: Any) -> None:
    """Equal tokens, and logits to rounding."""
    assert ours[0].tolist() == plain[0].tolist()
    torch.testing.assert_close(ours[1], plain[1], rtol=1e-10, atol=1e-12)


BEAMS: dict[str, Any] = {"num_beams": 2}
GROWING: dict[str, Any] = {"cache_implementation": "dynamic"}  # takes a step for each token


@pytest.mark.filterwarnings("ignore:merakc has compiled this model for")
@pytest.mark.parametrize("make", [llama, gpt2, mistral])
def test_tokens_and_logits_are_those_of_the_plain_model(make: Any) -> None:
    ours, plain = parallel(make), build(make).eval()
    for how in ({}, BEAMS) if make is gpt2 else ({}, BEAMS, GROWING):
        same(generated(ours, prompts(), **how), generated(plain, prompts(), **how))


@pytest.mark.parametrize(
    ("make", "layout", "samples"),
    [(llama, {"tp": 2, "pp": 2}, 1), (gpt2, {"dp": 2}, 2)],
)
def test_on_ranks(make: Any, layout: dict[str, int], samples: int) -> None:
    ranks = 2 * len(layout)
    plain = generated(build(make).eval(), prompts(samples))
    for ours in run_ranks(ranks, lambda: generated(parallel(make, **layout), prompts(samples))):
        same(ours, plain)


def test_a_cache_that_a_call_asks_for_is_given() -> None:
    """None would be taken for no past by the next call."""
    logits = []
    for model in (parallel(llama), build(llama).eval()):
        past, new, own = None, prompts()["input_ids"], []
        with torch.no_grad():
            for _ in range(3):
                out = model(input_ids=new, past_key_values=past, use_cache=True)
                past, new = out.past_key_values, out.logits[:, -1:].argmax(-1)
                own.append(out.logits)
        logits.append(torch.cat(own, 1))
    torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-12)
    out = parallel(llama)(input_ids=new)
    assert out.past_key_values is not None
    with pytest.raises(ConfigError, match="output 'past_key_values' is a DynamicCache"):
        parallel(llama)(input_ids=new, past_key_values=out.past_key_values)


def test_a_step_is_compiled_once_for_all_tokens() -> None:
    model = parallel(llama)
    generated(model, prompts())
    steps = model._own("_steps").compiled
    assert len(steps) == 1 + 2  # of training; of the prompts, and of a token
    generated(model, prompts())
    assert len(steps) == 3
    assert model.train()(**prompts(4), labels=prompts(4)["input_ids"]).loss.requires_grad
    assert len(steps) == 4


def test_a_users_cache_gets_keys_and_values() -> None:
    model, plain = parallel(llama), build(llama).eval()
    for kind in (lambda: StaticCache(plain.config, 16), lambda: DynamicCache(config=plain.config)):
        caches = kind(), kind()
        ids = prompts()["input_ids"]
        for part in (ids[:, :3], ids[:, 3:4], ids[:, 4:]):
            with torch.no_grad():
                ours = model(input_ids=part, past_key_values=caches[0])
                wanted = plain(input_ids=part, past_key_values=caches[1])
            assert ours.past_key_values is caches[0]
            torch.testing.assert_close(ours.logits, wanted.logits, rtol=1e-10, atol=1e-12)
        for own, other in zip(caches[0].layers, caches[1].layers, strict=True):
            torch.testing.assert_close(own.keys, other.keys, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(own.values, other.values, rtol=1e-10, atol=1e-12)
        assert int(caches[0].get_seq_length()) == 5


def test_caches_have_room_for_more() -> None:
    model, kwargs = parallel(llama), dict[str, Any]()
    config = copy.copy(model.generation_config)
    model._prepare_cache_for_generation(config, kwargs, "greedy_search", 2, 17)
    assert kwargs["past_key_values"].get_max_length() == ROOM
    for changed, mode in (({"use_cache": False}, "sample"), ({}, "assisted_generation")):
        kwargs, config = {}, copy.copy(model.generation_config)
        config.update(**changed)
        model._prepare_cache_for_generation(config, kwargs, mode, 2, 17)
        assert not isinstance(kwargs.get("past_key_values"), StaticCache)


class Twice(nn.Module):
    """Adds the same keys twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        """Of `[n, s, 4]`."""
        y = self.layer(x)
        for _ in range(2 if past_key_values is not None else 0):
            past_key_values.update(y[:, None], y[:, None], 0)
        return y


class Grows(Twice):
    """Makes room for one layer more."""

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        """Of `[n, s, 4]`."""
        if past_key_values is not None:
            past_key_values.layers.append(past_key_values.layers[0])
        return super().forward(x)


class Keeps(Twice):
    """Leaves something with the cache."""

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        """Of `[n, s, 4]`."""
        if past_key_values is not None:
            past_key_values.keeper = self
        return self.layer(x)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Twice, "updates a layer of its cache twice"),
        (Grows, "adds layers to the DynamicCache"),
        (Keeps, "sets 'keeper' of the DynamicCache that it is given to a Keeps"),
    ],
)
def test_what_cannot_be_followed_is_refused(kind: type[Twice], told: str) -> None:
    x = torch.zeros(2, 3, 4)
    model = merakc.auto_parallel(
        build(kind), {"x": x}, loss=lambda out, _: out.sum(), cluster=NOMINAL_CPU
    ).eval()
    with pytest.raises(ConfigError, match=told):
        model(x=x, past_key_values=DynamicCache(config=build(llama).config))
    if kind is Twice:
        with pytest.raises(RecordError, match="is of type DynamicCache"):
            model(x=x, past_key_values=DynamicCache())  # of how many layers, nobody knows yet


def test_only_caches_of_layers_are_taken_for_some() -> None:
    class State:
        def update(self) -> None: ...

        def update_more(self) -> None: ...

    class Holder:
        def __init__(self, layers: Any) -> None:
            self.layers = layers

    static = StaticCache(build(llama).config, 8)
    assert cache_in({"past_key_values": static}) is static
    both = EncoderDecoderCache(static, StaticCache(build(llama).config, 8))
    assert cache_in({"past_key_values": both}) is both
    both.is_updated["more"] = torch.ones(1)
    assert cache_in({"past_key_values": both}) is None
    for other in (None, (1, 2), Holder([]), Holder([State()]), Holder([3])):
        assert cache_in({"past_key_values": other}) is None
