"""The table of sharding rules: one row an op.

A row names the dims of the op's tensor arguments and outputs, like an einsum: in
`"... i, o i, ?o -> ... o"` (linear) the letter `i` is summed, so that a split of `i` leaves partial
sums. Marks:

- `!` behind a letter: the op needs the dim whole;
- `?` before an argument: it may be None;
- `...` leading dims, the same in every place.

A dim of size 1 broadcasts. Ops whose dims depend on their arguments have a kind instead
(`merakc.passes.sharding.rows`): `POINTWISE`, `Along` one dim, the `Last` dims, `Reduce`, `Loss`, or
a `Shape` rule of its own, which is a function. `Whole` says why an op runs whole on every rank. An
op that is not here has no rule: it runs whole too, and is reported.
"""

from __future__ import annotations

from typing import Final

from merakc.kernels.ops import is_pointwise
from merakc.passes.sharding.rows import POINTWISE, Along, Last, Loss, Reduce, Row, Shape, Whole


def _all(row: Row, ops: str) -> dict[str, Row]:
    """One row for several ops of aten; `.default` may be left out."""
    names = (op if "." in op else f"{op}.default" for op in ops.split())
    return {f"aten.{name}": row for name in names}


GATHERED: Final = "composite.gathered"  # a product that is whole behind it
ROWS: Final[dict[str, Row]] = {
    # products
    "aten.linear.default": "... i, o i, ?o -> ... o",
    "merakc.scaled_linear.default": "... i, o i -> ... o",
    "aten.addmm.default": Shape("addmm"),
    "aten.mm.default": "m i, i n -> m n",
    "aten.mv.default": "m i, i -> m",
    "aten.dot.default": "i, i ->",
    "aten.vdot.default": "i, i ->",
    "aten.bmm.default": "b m i, b i n -> b m n",
    "aten.baddbmm.default": "b m n, b m i!, b i! n -> b m n",
    "aten.addbmm.default": "m n, b! m i!, b! i! n -> m n",
    "aten.addmv.default": "m, m i!, i! -> m",
    "aten.addr.default": "m n, m, n -> m n",
    "aten._cdist_forward.default": "... m d!, ... n d! -> ... m n",
    "aten.matmul.default": Shape("matmul"),
    "merakc.grouped_mm.default": "r! i, g! i o, g! -> r o",
    "merakc.attention.default": Shape("attention"),
    GATHERED: Shape("gathered"),
    "aten.convolution.default": Shape("convolution"),
    # tables
    "aten.embedding.default": Shape("embedding"),
    "aten.bucketize.Tensor": "..., n! -> ...",
    "aten.searchsorted.Tensor": Shape("searchsorted"),
    # losses
    "aten.cross_entropy_loss.default": Shape("cross_entropy"),
    **_all(Loss(), "mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy"),
    **_all(Loss(), "binary_cross_entropy_with_logits"),
    # norms
    "aten.layer_norm.default": Shape("norm"),
    "aten.native_layer_norm.default": Shape("norm"),
    "aten.rms_norm.default": Shape("norm"),
    "aten.group_norm.default": Shape("group_norm"),
    "aten.batch_norm.default": Shape("batch_norm"),
    "aten._weight_norm_interface.default": Shape("weight_norm"),
    # along one dim
    **_all(Along(cut=True), "softmax.int log_softmax.int _softmax _log_softmax _safe_softmax"),
    **_all(Along(cut=True), "scatter.src scatter.value"),
    **_all(Along(), "cumsum cumprod cummax cummin logcumsumexp linalg_cross"),
    **_all(Along(), "sort sort.stable topk"),
    **_all(Along(), "gather scatter.reduce scatter.value_reduce"),
    **_all(Along(), "scatter_add scatter_reduce.two index_add index_copy index_reduce"),
    **_all(Along(), "index_fill.int_Scalar index_fill.int_Tensor slice_scatter"),
    **_all(Along(), "_fft_c2c _fft_r2c _fft_c2r"),
    **_all(Along("dims"), "flip roll"),
    # the last dims, which are space or a matrix
    **_all(Last(1), "reflection_pad1d replication_pad1d upsample_nearest1d upsample_linear1d"),
    **_all(Last(1), "_upsample_nearest_exact1d"),
    **_all(Last(2), "reflection_pad2d replication_pad2d upsample_nearest2d upsample_bilinear2d"),
    **_all(Last(2), "_upsample_nearest_exact2d upsample_bicubic2d _upsample_bicubic2d_aa"),
    **_all(Last(2), "_upsample_bilinear2d_aa avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d"),
    **_all(Last(2), "max_pool2d_with_indices max_unpool2d"),
    **_all(Last(3), "reflection_pad3d replication_pad3d upsample_nearest3d upsample_trilinear3d"),
    **_all(Last(3), "_upsample_nearest_exact3d avg_pool3d _adaptive_avg_pool3d"),
    **_all(Last(3), "adaptive_max_pool3d max_pool3d_with_indices max_unpool3d"),
    **_all(Last(2), "tril triu linalg_inv_ex linalg_cholesky_ex linalg_qr linalg_matrix_exp"),
    **_all(Last(2), "_linalg_det _linalg_slogdet _linalg_eigh _linalg_svd"),
    **_all(Last(2), "linalg_solve_triangular"),
    "aten.im2col.default": Shape("im2col"),
    "aten.col2im.default": Shape("col2im"),
    "aten.pixel_shuffle.default": Shape("pixel_shuffle"),
    "aten.pixel_unshuffle.default": Shape("pixel_unshuffle"),
    "aten.channel_shuffle.default": Shape("channel_shuffle"),
    "aten.grid_sampler_2d.default": "n c h! w!, n a! b! e! -> n c a b",
    "aten.grid_sampler_3d.default": "n c d! h! w!, n a! b! f! e! -> n c a b f",
    # reductions
    **_all(Reduce("sum"), "sum sum.dim_IntList nansum"),
    **_all(Reduce("mean"), "mean mean.dim"),
    **_all(Reduce(), "prod prod.dim_int any any.dim any.dims all all.dim all.dims"),
    **_all(Reduce(), "amax amin max min max.dim min.dim aminmax argmax argmin logsumexp"),
    **_all(Reduce(), "var.correction var_mean.correction std.correction std_mean.correction"),
    **_all(Reduce(), "linalg_vector_norm norm.Scalar norm.ScalarOpt_dim dist"),
    **_all(Reduce(), "median median.dim nanmedian nanmedian.dim mode kthvalue"),
    # views and layouts
    "aten.reshape.default": Shape("reshape"),
    "aten.expand.default": Shape("expand"),
    "aten.repeat.default": Shape("repeat"),
    "aten.transpose.int": Shape("transpose"),
    "aten.permute.default": Shape("permute"),
    "aten.t.default": Shape("t"),
    "aten.unsqueeze.default": Shape("unsqueeze"),
    "aten.squeeze.dim": Shape("squeeze"),
    "aten.squeeze.dims": Shape("squeeze"),
    "aten.squeeze.default": Shape("reshape"),
    "aten.view_as_real.default": Shape("view_as_real"),
    "aten.view_as_complex.default": Shape("view_as_complex"),
    # parts of dims
    "aten.slice.Tensor": Shape("slice"),
    "aten.select.int": Shape("select"),
    "aten.unbind.int": Shape("select"),
    "aten.select_scatter.default": Shape("select_scatter"),
    "aten.diagonal.default": Shape("diagonal"),
    "aten.unfold.default": Shape("unfold"),
    **_all(Shape("split"), "split.Tensor split_with_sizes unsafe_split.Tensor"),
    **_all(Shape("split"), "unsafe_split_with_sizes"),
    "aten.glu.default": Shape("glu"),
    "aten.index_select.default": Shape("index_select"),
    **_all(Shape("index"), "index.Tensor _unsafe_index.Tensor"),
    **_all(Shape("index_put"), "index_put _unsafe_index_put"),
    "aten.cat.default": Shape("cat"),
    "aten.stack.default": Shape("stack"),
    "aten.constant_pad_nd.default": Shape("pad"),
    # tensors from nothing
    **_all(Shape("fresh"), "arange arange.start arange.start_step linspace logspace eye eye.m"),
    **_all(Shape("fresh"), "full zeros ones scalar_tensor empty.memory_format empty_strided"),
    **_all(Shape("fresh"), "new_ones new_zeros new_full new_empty new_empty_strided"),
    **_all(Shape("fresh"), "tril_indices triu_indices hann_window hamming_window"),
    # elementwise ops that torch does not tag as such
    **_all(POINTWISE, "to.dtype to.dtype_layout to.device to.other contiguous copy"),
    **_all(POINTWISE, "detach alias fill.Tensor fill.Scalar full_like zeros_like ones_like"),
    **_all(POINTWISE, "empty_like masked_fill.Tensor complex polar"),
    **_all(POINTWISE, "log_sigmoid_forward _prelu_kernel rsub.Tensor"),
    **_all(POINTWISE, "floor_divide floor_divide.Scalar hardswish _conj"),
    "merakc.dropout.default": POINTWISE,
    "merakc.overwritten.default": POINTWISE,
    "merakc.reached.default": POINTWISE,
    "merakc.uniform.default": Shape("fresh"),
    "merakc.normal.default": Shape("fresh"),
    # kept whole on purpose
    **_all(Whole("each step of a recurrence reads the whole hidden state"),
           "mkldnn_rnn_layer _cudnn_rnn miopen_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell"),
    **_all(Whole("a loss reads one class of each sample, and averages over their weights"),
           "nll_loss_forward nll_loss2d_forward multi_margin_loss multilabel_margin_loss_forward"),
    **_all(Whole("the alignment of a sequence reads all of its classes"),
           "_ctc_loss _ctc_loss.Tensor"),
    **_all(Whole("which elements go where depends on all of the mask"),
           "masked_scatter masked_select nonzero nonzero_static"),
    "merakc.counted.default": Whole("all of the mask is counted"),
    "merakc.local.default": Whole("places count through the whole tensor"),
    **_all(Whole("positions count through the whole tensor"),
           "take put trace bincount histc rot90"),
    **_all(Whole("strides see memory, not dims"),
           "as_strided as_strided_scatter view.dtype view"),
    **_all(Whole("bags are sums over rows of any place"),
           "_embedding_bag _embedding_bag_forward_only segment_reduce"),
    **_all(Whole("groups of columns, or of matrices: groups of rows are merakc.grouped_mm"),
           "_grouped_mm"),
    **_all(Whole("all pairs of all rows"), "_pdist_forward _euclidean_dist"),
    **_all(Whole("values are looked up in all of the others"),
           "searchsorted.Scalar isin.Tensor_Tensor _unique2"),
    **_all(Whole("it scatters into a dim of its own making"),
           "diag_embed diagonal_scatter block_diag affine_grid_generator _trilinear"),
    **_all(Whole("sizes or hidden statistics among its arguments; the torch.nn.functional "
                 "that calls it has a rule"),
           "native_group_norm native_batch_norm _native_batch_norm_legit "
           "_native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training "
           "_native_multi_head_attention _transformer_encoder_layer_fwd"),
    **_all(Whole("a derivative: those are made after sharding"),
           "_adaptive_avg_pool2d_backward _cdist_backward _pdist_backward avg_pool2d_backward "
           "avg_pool3d_backward convolution_backward embedding_dense_backward "
           "grid_sampler_2d_backward max_pool2d_with_indices_backward native_group_norm_backward "
           "max_pool3d_with_indices_backward native_layer_norm_backward"),
}  # fmt: skip

# Collectives over cp, in the graph of one of its ranks: what tp splits goes through as it is.
OVER_CP: Final[dict[str, Row]] = {
    "merakc.all_reduce.default": POINTWISE,
    "merakc.copy_to.default": POINTWISE,
    "merakc.divide_gradient.default": POINTWISE,
    "merakc.all_gather.default": Along(),
    "merakc.gather_to.default": Along(),
    "merakc.scatter.default": Along(),
    "merakc.reduce_scatter.default": Along(),
    "merakc.exchange.default": Along("dims"),
    "merakc.ring_attention.default": Shape("attention"),
    "merakc.swap.default": Along("dim"),
    # Rows that go to experts and come back, and where the groups of a rank's rows end.
    "merakc.dispatch.default": Shape("sent"),
    "merakc.combine.default": Shape("sent"),
    "merakc.own_ends.default": Shape("sent"),
}
# Rows of users' ops: `merakc.register_sharding`.
_registered: dict[str, Row] = {}


def row_of(op: str) -> Row | None:
    """The row of an op; elementwise ops that torch tags so need none in the table."""
    if op in ROWS:
        return ROWS[op]
    if op in _registered:
        return _registered[op]
    if op in OVER_CP:
        return OVER_CP[op]
    return POINTWISE if is_pointwise(op) else None


def add_row(op: str, row: Row) -> None:
    """Adds the row of an op that has none."""
    assert row_of(op) in (None, row), op
    _registered[op] = row


def is_registered(op: str) -> bool:
    """Whether a user gave the op its row."""
    return op in _registered
