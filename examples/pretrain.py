"""Trains a small Llama from nothing on the source of Python's standard library, byte by byte.

    torchrun --nproc-per-node 4 examples/pretrain.py

It saves as it goes; started again, on any number of ranks, it goes on from the last save.
"""

import argparse
import sysconfig
from itertools import islice
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import merakc

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--folder", default="pretrained")
given = parser.parse_args()

source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
texts = torch.tensor(list(source)).unfold(0, 64, 64)  # 64 bytes each


def batch(some: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch of texts, each of which is its own label."""
    ids = torch.stack(some)
    return {"input_ids": ids, "labels": ids}


config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
torch.manual_seed(0)
model = merakc.auto_parallel(LlamaForCausalLM(config), batch([*texts[:16]]), batch_size=16)
loader = merakc.dataloader(texts, model, 16, shuffle=True, drop_last=True, collate_fn=batch)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

step = 0
if merakc.latest(given.folder) is not None:
    step = merakc.load(given.folder, model, optimizer, scheduler, extra=loader).step
while step < given.steps:
    for some in islice(loader, given.steps - step):  # an epoch, or what is left of it
        loss = model(**some).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if model.rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        if step % given.save_every == 0:
            folder = f"{given.folder}/step-{step}"
            merakc.save(folder, model, optimizer, scheduler, extra=loader, keep_last=2)
