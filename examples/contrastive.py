"""Learns representations by a contrastive loss, over the whole batch, whatever the plan.

    torchrun --nproc-per-node 4 examples/contrastive.py

Two noisy views of each point are to be more alike than those of any other point of the batch, on
whichever ranks they are: nothing is gathered by hand.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import merakc

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
given = parser.parse_args()


class Encoder(nn.Module):
    """Two views of points to unit vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor]:
        """The vectors of both, one row each."""
        return {
            "first": F.normalize(self.layers(first), dim=-1),
            "second": F.normalize(self.layers(second), dim=-1),
        }


def contrast(outputs: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """InfoNCE (van den Oord et al., 2018): each view is to find the other among all."""
    alike = outputs["first"] @ outputs["second"].T / 0.1
    own = torch.arange(len(alike))
    return (F.cross_entropy(alike, own) + F.cross_entropy(alike.T, own)) / 2


torch.manual_seed(0)
points = torch.randn(512, 32)
views = [{"first": p + torch.randn(32) / 2, "second": p + torch.randn(32) / 2} for p in points]
example = {name: torch.stack([v[name] for v in views[:32]]) for name in ("first", "second")}
model = merakc.auto_parallel(Encoder(), example, batch_size=32, loss=contrast)
loader = merakc.dataloader(views, model, batch_size=32, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

step = 0
while step < given.steps:
    for batch in loader:
        if step == given.steps:
            break
        loss, _ = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if model.rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
