"""Models on the meta device get their own initial weights, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from merakc.errors import ConfigError
from merakc.train.parameters import initial
from merakc.train.parameters.initial import initialise, replace_tensors
from tests.train.test_weights import Net, llama, meta

Tensors = dict[str, torch.Tensor]


def test_meta_weights_are_the_models_own() -> None:
    # Its modules' initialisers, in their order: what building it on the CPU does.
    ours = meta(lambda: nn.Sequential(nn.Linear(4, 5), nn.Conv2d(2, 3, 3), nn.Embedding(6, 7)))
    initialise(ours, seed=7)
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Conv2d(2, 3, 3), nn.Embedding(6, 7))
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    model: Any = meta(llama)
    initialise(model, seed=7)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert torch.equal(model.model.norm.weight, torch.ones(64))
    stock: Any = llama()
    assert torch.equal(model.model.rotary_emb.inv_freq, stock.model.rotary_emb.inv_freq)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def gpt2() -> nn.Module:
    """Its `_init_weights` writes some weights twice, the second time long after the first."""
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=24, n_layer=3, n_head=3, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


class Twins(nn.Module):
    """Copies what it made long before; `reset_parameters` of all its inner modules come later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("count", torch.zeros(()))
        self.count: torch.Tensor

    def init_weights(self) -> None:
        """As transformers has it."""
        self.count.fill_(4)
        for module in self.inner:
            module.reset_parameters()  # type: ignore[operator]
        self.inner[3].weight.data.copy_(self.inner[0].weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("make", [Net, llama, gpt2, Twins])
def test_handed_on_one_after_the_other(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial, "RECENT_BYTES", 1)
    monkeypatch.setattr(initial, "SMALL_BYTES", 0)
    whole, empty, found = meta(make), meta(make), {}
    initialise(whole, seed=3)

    def keep(name: str, tensor: torch.Tensor) -> None:
        found[name] = tensor.clone()

    initialise(empty, seed=3, keep=keep)
    wanted = dict([*whole.named_parameters(), *whole.named_buffers()])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert all(t.is_meta for t in (*empty.parameters(), *empty.buffers()))


def test_only_some_are_made() -> None:
    model: Any = meta(llama)
    found: Tensors = {}
    initialise(model, 0, ["model.rotary_emb.inv_freq"], lambda n, t: found.update({n: t.clone()}))
    assert list(found) == ["model.rotary_emb.inv_freq"]
    stock: Any = llama()
    assert torch.equal(found["model.rotary_emb.inv_freq"], stock.model.rotary_emb.inv_freq)
    assert model.lm_head.weight.is_meta


class Forgetful(nn.Linear):
    """Does not set what it adds."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(2))


def test_models_that_from_pretrained_put_on_the_meta_device(tmp_path: Path) -> None:
    stock: Any = llama()
    stock.save_pretrained(tmp_path)
    model: Any = type(stock).from_pretrained(tmp_path, device_map="meta")
    with pytest.raises(ConfigError, match=r"read by from_pretrained .* as weights="):
        initialise(model, 0)
    initialise(model, 0, ["model.rotary_emb.inv_freq"])  # no file has it
    assert torch.equal(model.model.rotary_emb.inv_freq, stock.model.rotary_emb.inv_freq)


def test_what_cannot_be_initialised() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with pytest.raises(ConfigError, match=r"module '1' \(Own\).*no reset_parameters"):
        initialise(meta(lambda: nn.Sequential(nn.Linear(2, 2), Own())), 0)
    with pytest.raises(ConfigError, match=r"parameter '1\.weight' is on cpu"):
        initialise(nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)), 0)
    with pytest.raises(ConfigError, match=r"'scale' of module '0' \(Forgetful\).* does not set it"):
        initialise(meta(lambda: nn.Sequential(Forgetful())), 0)


def test_replacing_keeps_ties_kinds_and_frozen_parameters() -> None:
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.BatchNorm1d(2)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    names = []

    def three(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        names.append(name)
        return None if name == "b.bias" else torch.full_like(tensor, 3)

    model["b"].bias.data.fill_(3)
    replace_tensors(model, three)
    assert names == sorted(n for n, _ in (*model.named_parameters(), *model.named_buffers()))
    assert model["b"].weight is model["a"].weight
    assert isinstance(model["a"].weight, nn.Parameter)
    assert not model["a"].bias.requires_grad
    assert model["b"].bias.requires_grad
    assert not isinstance(model["c"].running_mean, nn.Parameter)
    assert {v.unique().item() for v in model.state_dict().values()} == {3}
