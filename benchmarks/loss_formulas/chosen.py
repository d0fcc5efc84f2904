"""Losses of rows that are chosen by the batch, and numbers of it that Python reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss_formulas.formula import IGNORED, WORDS, Named, formulas, square


def _labelled(h: Tensor, b: Named) -> tuple[Tensor, Tensor]:
    """The scores and labels of the steps that have one, as masked language models choose them."""
    mask = b.labels != IGNORED
    return h[mask], b.labels[mask]


def _positions(h: Tensor, b: Named) -> tuple[Tensor, Tensor]:
    """The same, by places in the flattened steps."""
    places = (b.labels.view(-1) != IGNORED).nonzero().squeeze(-1)
    return h.reshape(-1, WORDS)[places], b.labels.view(-1)[places]


def _selected(h: Tensor, b: Named) -> Tensor:
    mask = b.labels != IGNORED
    scores = torch.masked_select(h, mask[..., None]).view(-1, WORDS)
    return F.cross_entropy(scores, torch.masked_select(b.labels, mask))


def _masked(z: Tensor, b: Named) -> Tensor:
    return (square(z, b) * b.mask).sum()


ROWS = formulas("chosen rows", {
    "ce_of_chosen": lambda z, b, p: F.cross_entropy(z[b.mask > 0], b.c[b.mask > 0]),
    "ce_of_labelled": lambda z, b, p: F.cross_entropy(z[b.y != IGNORED], b.y[b.y != IGNORED]),
    "ce_sum_of_labelled": lambda z, b, p: F.cross_entropy(
        z[b.y != IGNORED], b.y[b.y != IGNORED], reduction="sum"),
    "ce_smooth_of_labelled": lambda z, b, p: F.cross_entropy(
        z[b.y != IGNORED], b.y[b.y != IGNORED], label_smoothing=0.1),
    "ce_weighted_of_labelled": lambda z, b, p: F.cross_entropy(
        z[b.y >= 0], b.y[b.y >= 0], weight=p.w.detach().exp()),
    "nll_of_labelled": lambda z, b, p: F.nll_loss(
        z.log_softmax(1)[b.y >= 0], b.y[b.y >= 0], ignore_index=3),
    "ce_of_projected": lambda z, b, p: F.cross_entropy(z[b.mask > 0] @ p.mix, b.c[b.mask > 0]),
    "ce_of_others_labels": lambda z, b, p: F.cross_entropy(
        z[b.mask == 0], b.c[b.mask > 0][:4]),
    "ce_of_two_masks": lambda z, b, p: F.cross_entropy(
        z[b.mask > 0], b.c[b.mask.nonzero().squeeze(1)]),
    "ce_of_index_select": lambda z, b, p: F.cross_entropy(
        z.index_select(0, (i := b.mask.nonzero().view(-1))), b.c.index_select(0, i)),
    "mse_of_chosen": lambda z, b, p: F.mse_loss(z[b.mask > 0], b.target[b.mask > 0]),
    "mse_of_masked_select": lambda z, b, p: F.mse_loss(
        z[:, 0].masked_select(b.mask > 0), b.time.masked_select(b.mask > 0)),
    "mean_of_places": lambda z, b, p: square(z, b)[b.mask.nonzero().squeeze(1)].mean(),
    "mean_of_nonzero_tuple": lambda z, b, p: square(z, b)[
        b.mask.nonzero(as_tuple=True)].mean(),
    "mean_of_index_select": lambda z, b, p: square(z, b).index_select(
        0, b.mask.nonzero().flatten()).mean(),
    "sum_of_chosen_by_their_number": lambda z, b, p: (
        (chosen := square(z, b)[b.mask > 0]).sum() / len(chosen)),
    "positives_against_negatives": lambda z, b, p: F.softplus(
        z[b.mask == 0, 0].mean() - z[b.mask > 0, 0].mean()),
    "pairs_of_chosen": lambda z, b, p: F.softplus(
        z[b.mask == 0, 0][None] - z[b.mask > 0, 0][:, None]).mean(),
    "variance_of_chosen": lambda z, b, p: z[b.mask > 0].var(0).sum(),
    "norm_of_chosen": lambda z, b, p: F.normalize(z[b.mask > 0], dim=1).sum(0).norm(),
    "chosen_elements": lambda z, b, p: F.binary_cross_entropy_with_logits(
        z[b.multi >= 0], b.bits[b.multi >= 0]),
    "chosen_and_all": lambda z, b, p: (
        F.cross_entropy(z, b.c) + 0.1 * F.mse_loss(z[b.y >= 0], b.target[b.y >= 0])),
    "sum_by_float": lambda z, b, p: _masked(z, b) / float(b.mask.sum()),
    "sum_by_item": lambda z, b, p: _masked(z, b) / b.mask.sum().item(),
    "sum_by_int": lambda z, b, p: _masked(z, b) / int(b.mask.sum()),
    "sum_by_max_of_item": lambda z, b, p: _masked(z, b) / max(1, b.mask.sum().item()),
    "sum_by_max_of_count": lambda z, b, p: (
        _masked(z, b) / max((b.y != IGNORED).sum().item(), 1)),
    "sum_by_max_of_tensor": lambda z, b, p: _masked(z, b) / max(b.mask.sum(), 1.0),
    "sum_by_int_of_count": lambda z, b, p: _masked(z, b) / int((b.y != IGNORED).sum()),
    "sum_by_float_of_weights": lambda z, b, p: _masked(z, b) / float(b.weight.sum()),
    "sum_by_len_of_nonzero": lambda z, b, p: _masked(z, b) / len(b.mask.nonzero()),
    "sum_by_size_of_nonzero": lambda z, b, p: _masked(z, b) / (b.mask > 0).nonzero().shape[0],
    "sum_if_any": lambda z, b, p: (
        _masked(z, b) / b.mask.sum() if b.mask.sum() > 0 else 0.0 * z.sum()),
    "largest_weight_item": lambda z, b, p: (
        square(z, b) * b.weight / b.weight.max().item()).mean(),
    "mean_weight_item": lambda z, b, p: (square(z, b) * b.weight).mean() / b.weight.mean().item(),
})  # fmt: skip

TOKENS = formulas("chosen rows", {
    "masked_lm": lambda h, b, p: F.cross_entropy(*_labelled(h, b)),
    "masked_lm_by_places": lambda h, b, p: F.cross_entropy(*_positions(h, b)),
    "masked_lm_by_view": lambda h, b, p: F.cross_entropy(
        h.view(-1, WORDS)[b.valid.view(-1) == 1], b.labels.view(-1)[b.valid.view(-1) == 1]),
    "masked_lm_selected": lambda h, b, p: _selected(h, b),
    "masked_lm_sum_by_count": lambda h, b, p: F.cross_entropy(
        *_labelled(h, b), reduction="sum") / max(1, (b.labels != IGNORED).sum().item()),
    "entropy_of_chosen": lambda h, b, p: -(
        (q := h[b.valid.bool()].log_softmax(-1)).exp() * q).sum(-1).mean(),
    "steps_by_item": lambda h, b, p: (
        h.logsumexp(-1) * b.valid).sum() / float(b.valid.sum()),
    "steps_by_longest_item": lambda h, b, p: (
        h.logsumexp(-1) * b.valid).sum() / b.valid.sum(1).max().item(),
}, tokens=True)  # fmt: skip

FORMULAS = (*ROWS, *TOKENS)
