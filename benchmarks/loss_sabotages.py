"""Wrong rules of the algebra of batches for each kind of operation, and what each claims."""

from __future__ import annotations

from benchmarks.sabotage import (
    Sabotage,
    a_mean,
    a_sum,
    as_it_is,
    calls,
    constant,
    counting_all,
    drawn_alike,
    each_time,
    filled_with_others,
    in_dim_0,
    innermost,
    joined_as,
    made_by_parts,
    mean_as_it_is,
    numbers_each_time,
    of_others,
    outermost,
    own,
    rows,
    rows_backwards,
    scaled,
    unscaled,
    without,
    without_places,
    without_rule,
)
from merakc.ir.batches import ShareKind
from merakc.passes.batches import analyse, normalise, part, reader, routed, split
from merakc.passes.batches.states import Kind

ALONG = "softmax log_softmax cumsum logcumsumexp cumprod sort argsort topk roll flip"
LARGEST = "max amax min amin median logsumexp"
SPREAD = "var std norm linalg_vector_norm prod"
VIEWS = "reshape view flatten unflatten transpose permute t squeeze unsqueeze expand"
PRODUCTS = "matmul mm bmm mv dot linear addmm einsum"
POINT = "add sub mul div where maximum minimum pow exp log tanh sqrt abs clamp relu sigmoid"
CURVED = (
    "tanh exp log sqrt pow abs clamp clamp_min relu sigmoid neg_log softplus reciprocal cosh rsqrt "
    "log1p nan_to_num sign round"
)
LOSSES = (
    "mse_loss l1_loss huber_loss smooth_l1_loss kl_div binary_cross_entropy soft_margin_loss "
    "binary_cross_entropy_with_logits"
)
LABELLED = (
    "cross_entropy_loss nll_loss_forward nll_loss2d_forward multi_margin_loss "
    "multilabel_margin_loss_forward"
)
C, S, R = Kind.COUPLED, Kind.SUM, Kind.ROWS

SABOTAGES: tuple[Sabotage, ...] = (
    # the sharding row: rows
    calls("softmax, sort, roll, … over samples", ALONG, C, rows),
    calls("softmax of rows", "softmax log_softmax", R, constant),
    calls("reshape that mixes samples", VIEWS, C, rows),
    calls("views of rows", VIEWS, R, outermost),
    calls("views of rows", VIEWS, R, innermost),
    calls("picked samples", "index index_select gather take_along_dim", C, rows),
    calls("picked from a sum", "index index_select gather", C, rows, meeting=S),
    calls("products of samples with samples", PRODUCTS, C, in_dim_0),
    calls("samples beside other samples", POINT, C, rows),
    calls("samples beside other samples", POINT, C, in_dim_0),
    calls("a part of the samples", "slice select", C, in_dim_0),
    calls("a part of the samples", "slice select", C, a_sum),
    calls("elementwise on rows", POINT, R, constant),
    calls("rows of any call", "", R, constant),
    # the sharding row: sums
    calls("sum over samples", "sum", S, a_mean),
    calls("sum over samples", "sum", S, constant),
    calls("mean over samples", "mean", S, unscaled),
    calls("mean over samples", "mean", S, constant),
    calls("largest, median, logsumexp over samples", LARGEST, C, a_sum),
    calls("largest, median, logsumexp over samples", LARGEST, C, a_mean),
    calls("variance and norm over samples", SPREAD, C, a_sum),
    calls("variance and norm over samples", SPREAD, C, a_mean),
    calls("contraction over samples", PRODUCTS, S, a_mean),
    calls("contraction over samples", PRODUCTS, S, constant),
    calls("mean of a loss", LOSSES, S, unscaled),
    calls("sum of a loss", LOSSES, S, scaled),
    # linear maps of sums
    calls("a function of a sum", CURVED, C, a_sum, meeting=S),
    calls("a function of a sum", CURVED, C, constant, meeting=S),
    calls("product or quotient of sums", "mul div matmul dot mm", C, a_sum, meeting=S),
    calls("product or quotient of sums", "mul div matmul dot mm", C, a_mean, meeting=S),
    calls("rows that meet a sum", POINT, C, rows, meeting=S),
    calls("a choice by a sum", "where maximum minimum index_put max amax", C, a_sum, meeting=S),
    calls("a sum made whole numbers", "to floor_divide round floor", C, a_sum, meeting=S),
    calls("softmax, sort, norm of a sum", f"{ALONG} {SPREAD} {LARGEST}", C, a_sum, meeting=S),
    calls("a sum plus a constant", "add sub rsub", S, each_time, meeting=S),
    calls("a sum beside constants", "stack cat", S, each_time, meeting=S),
    calls("a sum put into constants", "where index_put select_scatter", S, each_time),
    calls("a sum times a constant", "mul div", S, a_mean, meeting=S),
    calls("a sum times a constant", "mul div", S, constant, meeting=S),
    # what couples stays so
    calls("what couples", "", C, rows, meeting=C),
    calls("what couples", "", C, a_sum, meeting=C),
    calls("what couples", "", C, constant, meeting=C),
    # rules of their own
    calls("labels beside scores", LABELLED, S, scaled),
    calls("labels beside scores", LABELLED, C, a_sum),
    without_rule("labels beside scores", *LABELLED.split()),
    without_rule("views joined", "cat"),
    without_rule("views cut apart", "slice"),
    without_rule("copies for each sample", "expand", "repeat"),
    calls("copies for each sample", "expand repeat", R, constant),
    calls("copies for each sample", "expand repeat", R, innermost),
    calls("rows of a table", "embedding", C, rows),
    without_rule("rows of a table", "embedding"),
    without_rule("sums into places", "scatter_add", "index_add"),
    calls("sums into places", "scatter_add index_add", S, each_time),
    calls("sums into places", "scatter_add index_add histc bincount", S, constant),
    without_rule("`x[arange(n), i]`", "index"),
    calls("`x[arange(n), i]`", "index", R, without_places),
    without_rule("histograms", "histc"),
    calls("rows by their expert", "sort argsort", R, rows),
    without("rows by their expert", "groups end anywhere", routed, "_end_where_experts_do",
            lambda *_: True),
    without("rows by their expert", "any rows are taken back", routed, "_is_count",
            lambda *_: True),
    # both recordings
    without("sizes in both recordings", "are not compared", reader.Reader, "checked", as_it_is),
    without("sizes among arguments", "are those of any batch", reader.Reader, "other_sizes",
            lambda *_: False),
    without("calls in both recordings", "are not compared", analyse, "check_alike",
            lambda *_: None),
    without("tensors made in Python", "are the same for all sizes", reader, "same_constant",
            lambda *_: True),
    # numbers and shares
    without("numbers in arithmetic", "are those of the part", part, "with_numbers",
            lambda node, args, twin: args),
    without("the share of a part", "is one", analyse.Analysis, "share", property(lambda _: 1.0)),
    without("the share of a part", "is that of even parts", analyse.Analysis, "share",
            property(lambda self: 1 / round(self.total / self.samples))),
    without("numbers beside a sum", "count in every part", part.PartWriter, "_once",
            numbers_each_time),
    # what is known of the batch
    without("known values", "each part computes its own", reader.Reader, "known", own),
    without("tensors made of nothing", "each part makes its own", reader.Reader, "made",
            made_by_parts),
    without("known values", "each part sees other samples'", split._Split, "known", of_others),
    without("mean over valid labels", "is one of even parts", normalise._Writer,
            "mean_over_labels", mean_as_it_is),
    without("mean over valid labels", "all labels count", normalise._Writer, "_count",
            counting_all),
    without("tensors like others", "hold something else", normalise._Writer, "filled",
            filled_with_others),
    # the head, and draws
    without("sums that the head reads", "are the same in every part", split, "share_of",
            joined_as(ShareKind.SUM, ShareKind.CONSTANT)),
    without("constants that the head reads", "are added up", split, "share_of",
            joined_as(ShareKind.CONSTANT, ShareKind.SUM)),
    without("rows that the head reads", "stand innermost", split, "share_of", rows_backwards),
    without("draws", "all samples of a part alike", part, "keyed", drawn_alike, split),
    calls("draws of one sample each", "uniform normal", R, constant),
)  # fmt: skip
