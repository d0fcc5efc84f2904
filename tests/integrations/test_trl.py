"""TRL: a run is that of one process, also when it goes on elsewhere; what is refused.

All layouts are compared by `benchmarks/loops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from accelerate.state import AcceleratorState

import merakc
from benchmarks.loops.cells import compared, references
from benchmarks.loops.job import Job, on, tokenizer
from merakc.errors import ConfigError
from merakc.integrations.trl import DPOTrainer, SFTTrainer, _scores, parallel

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and accelerate's own, on a CPU


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)


def test_adapters_train_by_preferences_as_in_one_process(tmp_path: Path) -> None:
    plain = references("TRL DPO + LoRA", 2, tmp_path)
    assert {"rewards/margins", "grad_norm", "entropy"} <= plain[0][0].keys()
    cell = compared("TRL DPO + LoRA", "dp2", 2, plain)  # and from its middle on tp2
    assert cell.passed, cell


def test_adapters_are_fine_tuned_as_in_one_process(tmp_path: Path) -> None:
    cell = compared("TRL SFT + LoRA", "tp2", 2, references("TRL SFT + LoRA", 2, tmp_path))
    assert cell.passed, cell  # and from its middle on pp2


def test_scores_are_those_of_trls_head() -> None:
    torch.manual_seed(0)
    names = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs", "label_mask")
    model = Job(Path(), {}, 2, 0, 2).model()
    head = Job(Path(), {}, 2, 0, 2).model()
    trl.trainer.utils.add_fused_lm_head(head, outputs=names[1:5])
    ids = torch.randint(1, 64, (3, 9))
    labels = ids.masked_fill(torch.rand(3, 9) < 0.3, -100)
    with torch.no_grad():
        model.lm_head.weight[7] = model.lm_head.weight[5]  # equal logits: the first counts
        head.lm_head.weight[7] = head.lm_head.weight[5]
    theirs = head(input_ids=ids, labels=labels, fused_lm_head=True)
    ours = _scores(model(input_ids=ids), labels[:, 1:])
    for name in names:
        torch.testing.assert_close(ours[name].double(), theirs[name].double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "config", "options", "message"),
    [
        (SFTTrainer, trl.SFTConfig, {"bf16": True}, r"bf16=True\): auto_parallel\(..., precision"),
        (SFTTrainer, trl.SFTConfig, {"gradient_checkpointing": True}, "enable it before"),
        (DPOTrainer, trl.DPOConfig, {"precompute_ref_log_probs": True}, "leave it out"),
        (DPOTrainer, trl.DPOConfig, {"sync_ref_model": True}, "it mixes parameters one by one"),
    ],
)
def test_what_would_be_wrong_is_refused(
    kind: Any, config: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, on({}), 2, 0, 2)
    model = merakc.auto_parallel(job.model(), job.example, **job.layout)
    own = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
    arguments = config(**own | {"bf16": False, "gradient_checkpointing": False} | options)
    row = {"prompt": "1", "completion": " 2", "chosen": " 2", "rejected": " 3"}
    names = ("prompt", "completion") if kind is SFTTrainer else ("prompt", "chosen", "rejected")
    data = trl.trainer.sft_trainer.Dataset.from_list([{n: row[n] for n in names}] * 8)
    with pytest.raises(ConfigError, match=message):
        kind(model, args=arguments, train_dataset=data, processing_class=tokenizer())


def test_late_adapters_and_other_trainers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"give auto_parallel peft.get_peft_model\(model"):
        SFTTrainer(torch.nn.Linear(1, 1), peft_config=peft.LoraConfig())
    with pytest.raises(ConfigError, match="give it ref_model, the model without"):
        DPOTrainer(Job(Path(), {}, 2, 0, 2, adapters=True).model())
    with pytest.raises(ConfigError, match="RewardTrainer is no SFTTrainer"):
        parallel(trl.RewardTrainer)
