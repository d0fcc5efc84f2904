"""Weights from files: as from_pretrained and auto_parallel of the whole model, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import CheckpointError, ConfigError, MismatchError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.checkpoints.weight_files import open_weights
from tests.battery.small_models import Tensors, Words, build, warm_up, words
from tests.train.checkpoints.small_runs import saved

IDS = torch.arange(20).view(4, 5) % 13
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def gpt2() -> Any:
    """Packed projections, tied embeddings, and a buffer that no file holds."""
    config = transformers.GPT2Config(
        vocab_size=16, n_embd=24, n_layer=2, n_head=3, n_positions=8, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    """Rotary frequencies, which are made and not saved."""
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mixtral() -> Any:
    """Experts that its checkpoints hold one by one, and the model packed, under other names."""
    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=12, use_cache=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def meta(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.device("meta"):
        return make().to(dtype)


def ran(model: nn.Module, layout: dict[str, Any], **options: Any) -> tuple[Tensors, Tensors, float]:
    """The weights at first, the gradients of a step and its loss."""
    dp = layout.get("dp", 1)
    batch = {name: value.chunk(dp)[0] for name, value in BATCH.items()}
    ours = merakc.auto_parallel(model, batch, cluster=NOMINAL_CPU, **layout, **options)
    full = ours.full_state_dict()
    own = {name: value.chunk(dp)[ours.data_parallel_rank] for name, value in BATCH.items()}
    loss = ours(**own)["loss"]
    loss.backward()
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    return full, ours.full_gradients(), loss.item()


def from_files(make: Callable[[], nn.Module], folder: Path, layout: dict[str, Any]) -> Any:
    return ran(meta(make), layout, weights=folder)


def from_memory(make: Callable[[], Any], folder: Path, layout: dict[str, Any]) -> Any:
    kind: Any = type(meta(make))
    return ran(kind.from_pretrained(folder, dtype=torch.float64).train(), layout)


def both(folder: Path, layout: dict[str, Any], makes: list[Callable[[], nn.Module]]) -> Any:
    """Of each model: what it is from its files, and as `from_pretrained` reads it."""
    places = {make: folder / make.__name__ for make in makes}
    return {
        make.__name__: (from_files(make, place, layout), from_memory(make, place, layout))
        for make, place in places.items()
    }


@pytest.mark.parametrize(
    ("layout", "makes"),
    [
        ({"tp": 2}, [gpt2, mixtral]),
        ({"pp": 2}, [llama]),
        ({"dp": 2, "state_shards": "zero-3"}, [llama]),
    ],
)
def test_as_from_pretrained_and_the_whole_model(
    layout: dict[str, Any], makes: list[Any], tmp_path: Path
) -> None:
    for make in makes:
        torch.manual_seed(3)
        make().double().save_pretrained(tmp_path / make.__name__, max_shard_size="10KB")
    for model, (found, wanted) in run_ranks(2, both, tmp_path, layout, makes)[0].items():
        assert found[2] == wanted[2], model
        for ours, theirs in zip(found[:2], wanted[:2], strict=True):
            assert ours.keys() == theirs.keys(), model
            for name, value in theirs.items():
                assert torch.equal(ours[name], value), (model, name)


def masters(folder: Path) -> dict[str, tuple[torch.dtype, torch.Tensor]]:
    model = merakc.auto_parallel(
        meta(llama, torch.bfloat16), BATCH, weights=folder, precision="bf16-mixed", tp=2,
        cluster=NOMINAL_CPU,
    )  # fmt: skip
    model(**BATCH)["loss"].backward()
    return {n: (p.dtype, p.detach()) for n, p in model.full_state_dict().items()}


def test_masters_are_read_from_narrower_files(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = llama().bfloat16()
    plain.save_pretrained(tmp_path / "a")
    found = run_ranks(2, partial(masters, tmp_path / "a"))[0]
    for name, value in plain.state_dict().items():
        assert found[name][0] == torch.float32
        assert torch.equal(found[name][1], value.float()), name


def test_a_checkpoint_of_ours_and_one_file(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1, micro_batches=2)
    other = meta(Words)
    for place in (tmp_path / "c", tmp_path / "c" / "model.safetensors"):
        model = merakc.auto_parallel(other, words(0), weights=place, cluster=NOMINAL_CPU)
        held = load_file(tmp_path / "c" / "model.safetensors")
        full = model.full_state_dict()
        assert set(full) - set(held) == {"head.weight"}
        for name, value in held.items():
            assert torch.equal(full[name], value)
    path = tmp_path / "c" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor 'norm\.bias' is damaged"):
        merakc.auto_parallel(other, words(0), weights=tmp_path / "c", cluster=NOMINAL_CPU)


def changed(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of the model's file with another content."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (folder / "other").mkdir(exist_ok=True)
    save_file(tensors, folder / "other" / "model.safetensors")
    return folder / "other"


def test_tied_weights_and_prefixes(tmp_path: Path) -> None:
    plain = build(gpt2)
    plain.save_pretrained(tmp_path)  # type: ignore[operator]
    embedding, head = "transformer.wte.weight", "lm_head.weight"

    def renamed(tensors: Tensors) -> None:
        tensors[head] = tensors.pop(embedding)

    def doubled(tensors: Tensors) -> None:
        tensors[head] = tensors[embedding].clone()

    def without_prefix(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    def twice(tensors: Tensors) -> None:
        tensors["wte.weight"] = tensors[embedding].clone()

    for change in (renamed, doubled, without_prefix):
        full, _, _ = ran(meta(gpt2), {}, weights=changed(tmp_path, change))
        for name, value in plain.state_dict().items():
            assert torch.equal(full[name], value), (change, name)
    place = changed(tmp_path, lambda t: t.update({head: t[embedding] + 1}))
    with pytest.raises(CheckpointError, match="are one tensor in the model"):
        ran(meta(gpt2), {}, weights=place)
    with pytest.raises(CheckpointError, match=r"'wte\.weight', which are both 'trans"):
        open_weights(changed(tmp_path, twice), meta(gpt2))


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    build(gpt2).save_pretrained(tmp_path)  # type: ignore[operator]
    name = "transformer.h.1.mlp.c_fc.weight"
    cases: list[tuple[Callable[[Tensors], object], str]] = [
        (lambda t: t.pop(name), f"no tensor for GPT2LMHeadModel's '{name}'"),
        (lambda t: t.update(more=torch.zeros(2)), r"has, and the model has not, 'more'"),
        (lambda t: t.update({name: t[name].T.contiguous()}), rf"'{name}' is \[96, 24\], and"),
        (lambda t: t.update({name: t[name].to(torch.int8)}), f"'{name}' is torch.int8, and"),
    ]
    for change, message in cases:
        place = changed(tmp_path, change)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=message):
            merakc.auto_parallel(meta(gpt2), BATCH, weights=place)
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        open_weights(tmp_path.parent, meta(gpt2))
    with pytest.raises(CheckpointError, match="nothing cannot be read: No such file"):
        open_weights(tmp_path / "nothing", meta(gpt2))
    plain = meta(gpt2)
    plain._keys_to_ignore_on_load_unexpected = {"more"}  # type: ignore[assignment]
    open_weights(changed(tmp_path, cases[1][0]), plain)  # type: ignore[arg-type]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    told, model = json.loads(index.read_text()), meta(gpt2)
    first = sorted(told["weight_map"])[0]
    for text, message in (
        ("{", "damaged"),
        (json.dumps({"weight_map": {}}), "names no tensors"),
        (json.dumps({"weight_map": {"x": "../x.safetensors"}}), "outside of its folder"),
        (json.dumps({"weight_map": {**told["weight_map"], "x": told["weight_map"][first]}}),
         "has no 'x', which its index says"),
    ):  # fmt: skip
        index.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            open_weights(tmp_path, model)
    index.write_text(json.dumps(told))
    file = tmp_path / told["weight_map"][first]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_weights(index, model)


def own_folder(places: list[Path]) -> None:
    merakc.auto_parallel(
        meta(partial(Words, blocks=2)), words(0), weights=places[dist.get_rank()], pp=2,
        cluster=NOMINAL_CPU,
    )  # fmt: skip


def refused(folder: Path) -> list[str]:
    """What a rank is told where the other reads other files."""
    of_a = folder / "a" / "model.safetensors"
    own_folder([of_a, folder / "b" / "model.safetensors"])
    told = []
    for name in ("norm.weight", "blocks.0.1.bias", "nothing"):
        with pytest.raises((MismatchError, CheckpointError)) as caught:
            own_folder([of_a, folder / name / "model.safetensors"])
        told.append(str(caught.value))
    return told


def test_ranks_that_read_other_files_are_named(tmp_path: Path) -> None:
    plain = build(partial(Words, blocks=2))
    merakc.save(tmp_path / "a", plain)
    merakc.export(tmp_path / "b", plain)
    for name in ("norm.weight", "blocks.0.1.bias"):  # of the second stage, and of the first
        place = changed(tmp_path / "a", lambda t, n=name: t[n][0].add_(1))  # type: ignore[misc]
        place.rename(tmp_path / name)
    first, second = run_ranks(2, refused, tmp_path)
    for told in (first, second):
        for name, text in zip(("norm.weight", "blocks.0.1.bias"), told, strict=False):
            assert f"different weights: '{name}' of rank 1 is not as" in text
    assert "rank 1 could not take part" in first[-1]
    assert "cannot be read" in second[-1]


class Scaled(nn.Module):
    """Has a buffer that is in no file, and that nothing makes again."""

    def __init__(self, mended: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 3.0), persistent=False)
        self.scale: torch.Tensor
        if mended:
            self.reset_parameters = lambda: self.scale.fill_(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return (self.inner(x) * self.scale).square().mean()


@pytest.mark.parametrize("mended", [False, True])
def test_buffers_that_no_file_holds(mended: bool, tmp_path: Path) -> None:
    plain, x = Scaled(mended), torch.ones(2, 4)
    merakc.export(tmp_path / "a", plain)
    with torch.device("meta"):
        empty = Scaled(mended)
    if not mended:
        with pytest.raises(ConfigError, match=r"module '' \(Scaled\).*has no reset_parameters"):
            merakc.auto_parallel(empty, x, weights=tmp_path / "a", cluster=NOMINAL_CPU)
        empty = Scaled(mended)  # what is there stays
    model = merakc.auto_parallel(empty, x, weights=tmp_path / "a", cluster=NOMINAL_CPU)
    assert model(x).item() == pytest.approx(plain(x).item())


def test_a_model_that_was_taken_over_starts_again(tmp_path: Path) -> None:
    merakc.export(tmp_path / "a", build(Words))
    model = build(Words)
    for _ in range(2):
        ours = merakc.auto_parallel(model, words(0), weights=tmp_path / "a", cluster=NOMINAL_CPU)
        for name, value in build(Words).state_dict().items():
            assert torch.equal(ours.full_state_dict()[name], value)
