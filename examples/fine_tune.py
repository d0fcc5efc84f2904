"""Fine-tunes a classifier of transformers with its Trainer, on any plan.

    torchrun --nproc-per-node 4 examples/fine_tune.py

The task: whether a text has more small letters than other bytes. Give `from_pretrained` where the
model is made, and data of your own.
"""

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
    default_data_collator,
    logging,
)

import merakc
from merakc.integrations.trainer import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--folder", default="fine-tuned")
given = parser.parse_args()

source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
texts = torch.tensor(list(source)).unfold(0, 48, 48)
small = ((texts >= ord("a")) & (texts <= ord("z"))).float().mean(1)
data = [{"input_ids": t, "labels": int(s > 0.5)} for t, s in zip(texts, small, strict=True)]

config = BertConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64,
)  # fmt: skip
if int(os.environ.get("RANK", "0")) > 0:  # what transformers warns of, rank 0 says
    logging.set_verbosity_error()
torch.manual_seed(0)
model = BertForSequenceClassification(config)
model = merakc.auto_parallel(model, default_data_collator(data[:16]), batch_size=16)


def accuracy(found: Any) -> dict[str, float]:
    """The share of texts that are told right."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


arguments = TrainingArguments(
    output_dir=given.folder, max_steps=given.steps, per_device_train_batch_size=16,
    learning_rate=1e-3, warmup_steps=5, logging_steps=10, save_strategy="no", report_to=[],
    disable_tqdm=True, dataloader_pin_memory=torch.cuda.is_available(),
)  # fmt: skip
trainer = Trainer(
    model=model, args=arguments, train_dataset=data[64:], eval_dataset=data[:64],
    compute_metrics=accuracy,
)  # fmt: skip
trainer.train()
trainer.evaluate()
trainer.save_model()
