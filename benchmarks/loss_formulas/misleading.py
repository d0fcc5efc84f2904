"""Losses that are made to mislead an analysis of what depends on the samples, and how."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss_formulas.formula import CLASSES, SAMPLES, Named, formulas, square


def _wide(z: Tensor, p: Named) -> Tensor:
    return z @ p.widen


def _by_loop(z: Tensor, b: Named) -> Tensor:
    total = torch.zeros((), dtype=z.dtype)
    for i in range(len(z)):
        total = total + F.mse_loss(z[i], b.target[i])
    return total / len(z)


def _scattered(z: Tensor, b: Named) -> Tensor:
    return torch.zeros(CLASSES, dtype=z.dtype).scatter_add(0, b.c, z[:, 0]).pow(2).sum()


def _written(z: Tensor, b: Named) -> Tensor:
    buffer = torch.zeros(z.shape[0], 3, dtype=z.dtype)
    buffer[:, 0] = z[:, 0]
    buffer[1:, 1] = z[:-1, 1]
    return (buffer - b.target[:, :3]).pow(2).mean()


def _twice_if(z: Tensor, b: Named, asked: object) -> Tensor:
    return square(z, b).mean() * (2 if asked else 1)


ROWS = formulas("misleading", {
    "twice_if_middle_weight": lambda z, b, p: _twice_if(
        z, b, b.weight[len(b.weight) // 2] > b.weight[0]),
    "twice_if_middle_of_view": lambda z, b, p: _twice_if(z, b, b.mask.view(2, -1)[1, 0] > 0),
    "twice_if_more_than_samples": lambda z, b, p: _twice_if(z, b, b.multi.max() >= len(z) - 3),
    "twice_if_weights_spread": lambda z, b, p: _twice_if(
        z, b, b.weight.max().item() - b.weight.min().item() > 3),
    "twice_if_class_is_usual": lambda z, b, p: _twice_if(
        z, b, F.one_hot(b.c, CLASSES).sum(0)[2].item() > 2),
    "twice_if_all_but_last": lambda z, b, p: _twice_if(z, b, (b.y[:-1] < 0).any()),
    "square_parameter": lambda z, b, p: (_wide(z, p) @ p.square).pow(2).mean(),
    "square_parameter_first": lambda z, b, p: (p.square @ _wide(z, p).T).tanh().mean(),
    "square_parameter_over_samples": lambda z, b, p: (p.square @ z).tanh().mean(),
    "eight_features": lambda z, b, p: (_wide(z, p) * p.eight).tanh().mean(),
    "eight_for_samples": lambda z, b, p: (square(z, b) * p.eight).sum(),
    "softmax_of_transposed_features": lambda z, b, p: _wide(z, p).T.softmax(0)[0].mean(),
    "softmax_of_transposed_samples": lambda z, b, p: _wide(z, p).T.softmax(1)[0].pow(2).sum(),
    "parameter_penalty_of_eight": lambda z, b, p: F.mse_loss(z, b.target) + p.square.mean(),
    "eight_by_eight_rows": lambda z, b, p: (
        _wide(z, p)[:, None] * p.square[None]).tanh().sum((1, 2)).mean(),
    "sum_over_dim_of_eight": lambda z, b, p: _wide(z, p).sum(1).tanh().mean(),
    "table_of_eight_rows": lambda z, b, p: F.mse_loss(
        z + F.embedding(b.c, p.square)[:, :CLASSES], b.target),
    "cumsum_over_samples": lambda z, b, p: z.cumsum(0).tanh().mean(),
    "cumsum_over_features": lambda z, b, p: z.cumsum(1).tanh().mean(),
    "cumprod_over_samples": lambda z, b, p: z[:, 0].sigmoid().cumprod(0).sum(),
    "reshape_mixes_samples": lambda z, b, p: z.reshape(CLASSES, -1).softmax(1).pow(2).sum(),
    "reshape_pairs_samples": lambda z, b, p: z.reshape(-1, 2 * CLASSES).logsumexp(1).mean(),
    "flatten_and_back": lambda z, b, p: F.mse_loss(
        z.flatten().view(-1, CLASSES) * 2, b.target),
    "flatten_and_softmax": lambda z, b, p: (z.flatten().softmax(0) * b.target.flatten()).sum(),
    "int_of_sum": lambda z, b, p: F.mse_loss(z, b.target) * z.pow(2).sum().long(),
    "count_of_positives": lambda z, b, p: (F.relu(z).sum() / (z > 0).sum()),
    "round_of_mean": lambda z, b, p: F.mse_loss(z, b.target) + (z * 10).mean().round() * p.tau,
    "sign_of_sum": lambda z, b, p: z.sum().sign() * F.mse_loss(z, b.target),
    "size_as_class_weight": lambda z, b, p: F.cross_entropy(
        z, b.y, weight=torch.linspace(1, z.shape[0], CLASSES, dtype=z.dtype)),
    "size_as_factor": lambda z, b, p: F.mse_loss(z, b.target) * len(z),
    "size_as_temperature": lambda z, b, p: F.cross_entropy(z / len(z), b.y),
    "size_as_exponent": lambda z, b, p: z.sigmoid().pow(1 / z.shape[0]).mean(),
    "size_as_slice": lambda z, b, p: z[:, : z.shape[0] // 2].pow(2).sum(1).mean(),
    "size_as_roll": lambda z, b, p: (z * z.roll(z.shape[0] // 2, 1)).mean(),
    "size_as_number_of_classes": lambda z, b, p: (
        z * torch.arange(CLASSES, dtype=z.dtype).remainder(len(z) // 3 + 1)).mean(),
    "branch_on_size": lambda z, b, p: square(z, b).mean() * (3 if len(z) > 4 else 1),
    "arange_as_index": lambda z, b, p: -z.log_softmax(1)[torch.arange(len(z)), b.c].mean(),
    "arange_as_weight": lambda z, b, p: (
        square(z, b) * torch.arange(z.shape[0], dtype=z.dtype)).mean(),
    "arange_as_target": lambda z, b, p: F.mse_loss(
        z[:, 0], torch.arange(z.shape[0], dtype=z.dtype)),
    "linspace_as_weight": lambda z, b, p: (
        square(z, b) * torch.linspace(0, 1, len(z), dtype=z.dtype)).sum(),
    "any_over_features": lambda z, b, p: torch.where(
        (z > 1).any(), z.pow(2), z.abs()).mean(),
    "bincount_of_predictions": lambda z, b, p: F.cross_entropy(
        z, b.c, weight=1 / (1 + F.one_hot(z.argmax(1), CLASSES).sum(0)).to(z.dtype)),
    "prefix": lambda z, b, p: z[:3].pow(2).sum() / 3,
    "last_sample": lambda z, b, p: z[-1].pow(2).sum() + F.mse_loss(z, b.target),
    "every_other_sample": lambda z, b, p: z[::2].pow(2).mean(),
    "first_half_against_second": lambda z, b, p: F.mse_loss(z.chunk(2)[0], z.chunk(2)[1]),
    "all_but_first": lambda z, b, p: square(z, b)[1:].mean(),
    "ones_of_batch": lambda z, b, p: torch.ones(len(z), dtype=z.dtype) @ square(z, b),
    "full_of_1_by_n": lambda z, b, p: (
        square(z, b) * torch.full((len(z),), 1 / len(z), dtype=z.dtype)).sum(),
    "eye_of_batch": lambda z, b, p: (torch.eye(len(z), dtype=z.dtype) @ z).pow(2).mean(),
    "list_of_eight": lambda z, b, p: (
        square(z, b) * torch.tensor([float(i) for i in range(SAMPLES)])).sum(),
    "division_by_eight": lambda z, b, p: square(z, b).sum() / SAMPLES,
    "broadcast_by_mistake": lambda z, b, p: (z[:, :1] - b.time).pow(2).mean(),
    "outer_by_mistake": lambda z, b, p: (
        square(z, b)[:, None] * b.weight[None]).mean(),
    "mean_expanded": lambda z, b, p: F.mse_loss(z.mean(0).expand_as(z), b.target),
    "repeated_rows": lambda z, b, p: F.mse_loss(z.repeat(2, 1), b.target.repeat(2, 1)),
    "interleaved_rows": lambda z, b, p: F.mse_loss(
        z.repeat_interleave(2, 0), b.target.repeat_interleave(2, 0)),
    "cat_of_views": lambda z, b, p: torch.cat([z, z @ p.mix]).pow(2).mean(),
    "cat_sliced_back": lambda z, b, p: F.mse_loss(
        torch.cat([z, z @ p.mix])[len(z):], b.target),
    "stack_first": lambda z, b, p: torch.stack([z, z @ p.mix]).sum(0).pow(2).mean(),
    "unsqueezed": lambda z, b, p: z[None].tanh().mean(0).pow(2).mean(),
    "einsum_over_features": lambda z, b, p: torch.einsum("nd,nd->n", z, b.target).mean(),
    "einsum_over_samples": lambda z, b, p: torch.einsum("nd,ne->de", z, b.target).tanh().sum(),
    "gram_linear": lambda z, b, p: (torch.einsum("nd,ne->de", z, b.target) * p.mix).sum(),
    "python_loop": lambda z, b, p: _by_loop(z, b),
    "python_sum_of_rows": lambda z, b, p: sum(
        (row.pow(2).sum() for row in z.unbind(0)), start=torch.zeros((), dtype=z.dtype)),
    "sum_indexed": lambda z, b, p: z.sum(0)[b.c].mean(),
    "gather_of_samples": lambda z, b, p: z.index_select(0, b.group).pow(2).mean(),
    "scatter_of_samples": lambda z, b, p: _scattered(z, b),
    "written_in_place": lambda z, b, p: _written(z, b),
    "boolean_index": lambda z, b, p: square(z, b)[b.y >= 0].mean(),
    "diagonal_of_pairs": lambda z, b, p: (z @ (z @ p.mix).T).diagonal().mean(),
    "max_with_constant": lambda z, b, p: torch.maximum(
        square(z, b).sum(), torch.tensor(1.0, dtype=z.dtype)),
    "mean_and_parameter_in_where": lambda z, b, p: torch.where(
        p.tau > 0, F.mse_loss(z, b.target), F.l1_loss(z, b.target)),
    "parameter_alone_clamped": lambda z, b, p: F.mse_loss(z, b.target) + p.tau.clamp(min=-9) ** 2,
    "constant_in_stack": lambda z, b, p: torch.stack(
        [F.mse_loss(z, b.target), p.tau, torch.tensor(2.0, dtype=z.dtype)]).sum(),
    "constant_in_index_put": lambda z, b, p: torch.ones(3, dtype=z.dtype).index_put(
        (torch.tensor([1]),), F.mse_loss(z, b.target).reshape(1)).sum(),
    "sorted_by_labels": lambda z, b, p: F.mse_loss(z[b.c.argsort(stable=True)], b.target),
    "sum_detached": lambda z, b, p: square(z, b).mean() / square(z, b).sum().detach(),
    "own_norm_detached": lambda z, b, p: F.mse_loss(z / z.norm().detach(), b.target),
})  # fmt: skip

EXTRA = (
    *formulas("misleading", {
        "time_first_input": lambda h, b, p: F.cross_entropy(
            b.frame_features.flatten(0, 1), b.frame_labels.flatten()) + h.pow(2).mean(),
    }, tokens=True, extra=("frames", "frame_labels")),
    *formulas("misleading", {
        "two_images_a_sample": lambda z, b, p: F.mse_loss(
            z, b.image_features.view(-1, 2, CLASSES).mean(1)),
    }, extra=("images",)),
    *formulas("misleading", {
        "one_vector_for_all": lambda z, b, p: F.cross_entropy(z, b.y, weight=b.class_weight),
        "one_vector_normalised": lambda z, b, p: (
            z.pow(2) * b.class_weight / b.class_weight.sum()).sum(1).mean(),
    }, extra=("class_weight",)),
)  # fmt: skip

FORMULAS = (*ROWS, *EXTRA)
