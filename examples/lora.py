"""Trains adapters of peft on a frozen Llama, and writes them as `PeftModel.from_pretrained` reads.

    torchrun --nproc-per-node 4 examples/lora.py

Give `from_pretrained` where the model is made, and data of your own.
"""

import argparse
import os
import sysconfig
import warnings
from pathlib import Path

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import merakc
from merakc.integrations.adapters import save_adapters

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--folder", default="adapters")
given = parser.parse_args()

source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
texts = torch.tensor(list(source)).unfold(0, 64, 64)


def batch(some: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch of texts, each of which is its own label."""
    ids = torch.stack(some)
    return {"input_ids": ids, "labels": ids}


config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
if int(os.environ.get("RANK", "0")) > 0:  # what peft and transformers warn of, rank 0 says
    warnings.simplefilter("ignore", FutureWarning)
torch.manual_seed(0)
lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
model = peft.get_peft_model(LlamaForCausalLM(config), lora)
model = merakc.auto_parallel(model, batch([*texts[:16]]), batch_size=16)
loader = merakc.dataloader(texts, model, 16, shuffle=True, drop_last=True, collate_fn=batch)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

step = 0
while step < given.steps:
    for some in loader:
        if step == given.steps:
            break
        loss = model(**some).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if model.rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
save_adapters(given.folder, model)
