"""What generates by the model in it, and what is refused; texts: tests/integrations."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

import merakc
from merakc.errors import ConfigError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.outside.within import is_adapted
from tests.integrations.test_adapters import BATCH, adapted, base

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own


def test_prompts_that_are_learnt_stand_before_the_model() -> None:
    prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    assert not is_adapted(peft.get_peft_model(base(), prompts))
    assert not is_adapted(base())
    assert is_adapted(adapted())


def test_the_model_within_is_evaluated_alone() -> None:
    model: Any = merakc.auto_parallel(adapted(), BATCH, cluster=NOMINAL_CPU)
    inner = model.get_base_model()
    with pytest.raises(ConfigError, match="is called by itself, outside the model's forward"):
        inner(**BATCH)
    with torch.no_grad():
        torch.testing.assert_close(inner(**BATCH).logits, adapted()(**BATCH).logits)
    with pytest.raises(ConfigError, match=r"generate\(adapter_names\) chooses adapters by hooks"):
        model.eval().generate(BATCH["input_ids"], adapter_names=["default"] * 8)
