"""Encoders and encoder-decoders of transformers for long texts, and with attention of their own."""

from __future__ import annotations

from functools import partial

from benchmarks.models import (
    HEADS,
    HIDDEN,
    LAYERS,
    ODD_VOCABULARY,
    SEQUENCE,
    WIDE,
    ModelCase,
    causal_batch,
    like_bart,
    like_t5,
    masked_batch,
    masked_case,
    transformers_model,
    unshifted,
)

_case = partial(masked_case, casts_float32=True)

NEW_TEXTS = (
    _case("longformer", "Longformer", attention_window=4, max_position_embeddings=SEQUENCE + 2),
    _case("big_bird", "BigBird", attention_type="original_full"),
    _case("fnet", "FNet", ("hidden_dropout_prob",), use_tpu_fourier_optimizations=False),
    _case("convbert", "ConvBert", embedding_size=16, head_ratio=2, conv_kernel_size=3),
    _case("mobilebert", "MobileBert", embedding_size=16, intra_bottleneck_size=16,
          true_hidden_size=16, num_feedforward_networks=2, use_bottleneck=True),
    _case("squeezebert", "SqueezeBert", embedding_size=HIDDEN, q_groups=2, k_groups=2, v_groups=2,
          post_attention_groups=1, intermediate_groups=2, output_groups=2),
    _case("deberta", "Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"],
          max_relative_positions=4, position_biased_input=False),
    _case("reformer", "Reformer",
          ("hidden_dropout_prob", "local_attention_probs_dropout_prob"), is_decoder=False,
          feed_forward_size=WIDE, attention_head_size=HIDDEN // HEADS, axial_pos_embds=True,
          axial_pos_shape=[3, 4], axial_pos_embds_dim=[16, 16], attn_layers=["local"] * LAYERS,
          local_attn_chunk_length=4, local_num_chunks_before=1, local_num_chunks_after=0),
    ModelCase(
        "flaubert",
        transformers_model(
            "FlaubertWithLMHeadModel", ("dropout", "attention_dropout"),
            vocab_size=ODD_VOCABULARY, emb_dim=HIDDEN, n_layers=LAYERS, n_heads=HEADS,
            max_position_embeddings=SEQUENCE, pad_index=0, bos_index=1, eos_index=2,
        ),
        masked_batch,
        unshifted,
    ),
    ModelCase(
        "xlnet",
        transformers_model(
            "XLNetLMHeadModel", ("dropout",), vocab_size=ODD_VOCABULARY,
            d_model=HIDDEN, n_layer=LAYERS, n_head=HEADS, d_inner=WIDE, pad_token_id=0,
        ),
        partial(causal_batch, ODD_VOCABULARY),
        unshifted,
    ),
    like_bart("led", "LED", attention_window=4, max_encoder_position_embeddings=SEQUENCE,
              max_decoder_position_embeddings=SEQUENCE),
    like_bart("pegasus_x", "PegasusX", block_size=4, num_global_tokens=2,
              max_position_embeddings=SEQUENCE),
    like_t5("longt5", "LongT5", encoder_attention_type="local", local_radius=3),
)  # fmt: skip
