"""peft's adapters: files and texts on all layouts are those of one process; merging is refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import merakc
from merakc.equality.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.integrations.adapters import save_adapters
from merakc.machines.cluster import NOMINAL_CPU

# Its own: that tokens of a configuration are none, and attributes that transformers will drop.
pytestmark = pytest.mark.filterwarnings("ignore")


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def adapted() -> Any:
    config = peft.LoraConfig(
        r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base(), config)


BATCH = {"input_ids": torch.arange(8 * 6).view(8, 6), "labels": torch.arange(8 * 6).view(8, 6)}


def generated(model: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens, with and without cached keys and values, and the logits of the last."""
    model.eval()
    ids, how = BATCH["input_ids"][:2], {"max_new_tokens": 2, "pad_token_id": 0}
    tokens = model.generate(ids, do_sample=False, use_cache=True, **how).tolist()
    found = model.generate(
        input_ids=ids, do_sample=False, output_logits=True, return_dict_in_generate=True, **how
    )
    return tokens + found.sequences.tolist(), found.logits[-1]


def save(layout: dict[str, Any], folder: Path) -> tuple[list[list[int]], torch.Tensor]:
    model = merakc.auto_parallel(adapted(), BATCH, cluster=NOMINAL_CPU, **layout)
    assert "input_ids" in inspect.signature(model.get_base_model().forward).parameters
    assert model.generation_config is not None  # of the base, which peft's model asks for it
    save_adapters(folder / "ours", model)
    with pytest.raises((AttributeError, ConfigError), match="merge_and_unload"):
        model.merge_and_unload()
    return generated(model)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_files_and_texts_are_those_of_one_process(layout: dict[str, Any], tmp_path: Path) -> None:
    told = run_ranks(2, save, layout, tmp_path)
    tokens, logits = generated(adapted())
    assert not torch.allclose(logits, generated(base())[1])
    for ours, scores in told:
        assert ours == tokens
        torch.testing.assert_close(scores, logits)
    adapted().save_pretrained(str(tmp_path / "plain"))
    ours, plain = (load_file(tmp_path / x / "adapter_model.safetensors") for x in ("ours", "plain"))
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(ours[name], value), name
    merged = peft.PeftModel.from_pretrained(base(), tmp_path / "ours").merge_and_unload()
    wanted = adapted().merge_and_unload()
    torch.testing.assert_close(merged(**BATCH).loss, wanted(**BATCH).loss)


def multiplied() -> Any:
    """LoHa, whose forward asks of each layer by a random number whether it is left out."""
    config = peft.LoHaConfig(r=2, target_modules=["q_proj", "v_proj"], init_weights=False)
    return peft.get_peft_model(base().double(), config).train()


def trained_on(layout: dict[str, Any] | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = multiplied()
    if layout is not None:
        example = {k: v[: len(v) // layout.get("dp", 1)] for k, v in BATCH.items()}
        options = {"whole_batches": True, **layout}
        model = merakc.auto_parallel(model, example, cluster=NOMINAL_CPU, **options)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for _ in range(2):
        losses.append((loss := model(**BATCH).loss).item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict() if layout is None else model.full_state_dict()


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}])
def test_adapters_that_are_multiplied_train(layout: dict[str, Any]) -> None:
    losses, weights = trained_on(None)
    assert losses[1] < losses[0]
    for found, _ in (ranks := run_ranks(2, trained_on, layout)):
        assert found == pytest.approx(losses, rel=1e-5)  # Llama casts to float32
    for name, value in ranks[0][1].items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6)


def prompted() -> Any:
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(base(), config)


def save_prompts(folder: Path) -> None:
    save_adapters(folder, merakc.auto_parallel(prompted(), BATCH, cluster=NOMINAL_CPU, dp=1, tp=2))


def test_prompts_are_saved(tmp_path: Path) -> None:
    run_ranks(2, save_prompts, tmp_path)
    wanted = peft.get_peft_model_state_dict(prompted())
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_model_without_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without adapters of peft; give the model"):
        save_adapters(tmp_path, base())
