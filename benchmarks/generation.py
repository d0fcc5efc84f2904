"""What a token costs that a model generates with cached keys and values, beside the plain model.

    python -m benchmarks.generation

GPT-2, Llama and the decoder of a T5, of 12 layers, on one rank, in seconds of the CPU: the best of
several texts, once everything is compiled. It exits with 1 where tokens differ, or cost more than
they may.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from typing import Any

import torch
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

import merakc
from benchmarks.shapes import LAYERS, WIDTH, WORDS, batch, gpt2, llama

TOKENS, TEXTS, PROMPT = 50, 5, 8
MOST = 2.0  # times what the plain model takes


def t5() -> PreTrainedModel:
    """Whose encoder is called by itself, once for each text."""
    config = T5Config(vocab_size=WORDS, d_model=WIDTH, d_kv=WIDTH // 4, d_ff=4 * WIDTH,
                      num_layers=LAYERS, num_decoder_layers=LAYERS, num_heads=4,
                      decoder_start_token_id=0, tie_word_embeddings=False)  # fmt: skip
    return T5ForConditionalGeneration(config)


def tokens(model: Any, ids: torch.Tensor) -> tuple[list[list[int]], float]:
    """The tokens that follow, and the milliseconds that each takes."""
    start_s = time.process_time()
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
        min_new_tokens=TOKENS, max_new_tokens=TOKENS,
    )  # fmt: skip
    return found.tolist(), (time.process_time() - start_s) / TOKENS * 1e3


def main() -> None:
    """Prints a line for each model, and exits with 1 where one misses."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    missed = False
    for make in (gpt2, llama, t5):
        plain = make().eval()
        example, ids = batch(8, 16), batch(2, PROMPT)["input_ids"]
        ours = merakc.auto_parallel(copy.deepcopy(plain), example, dp=1, tp=1, pp=1).eval()
        pairs = [(tokens(plain, ids), tokens(ours, ids)) for _ in range(TEXTS)]
        equal = all(one == other for (one, _), (other, _) in pairs)
        plain_ms, ours_ms = (min(pair[k][1] for pair in pairs) for k in (0, 1))
        missed |= not equal or ours_ms > MOST * plain_ms
        print(
            f"{make.__name__}: {ours_ms:.1f} ms a token, {plain_ms:.1f} ms the plain model "
            f"({ours_ms / plain_ms:.2f} times, at most {MOST:.0f}); "
            f"tokens {'equal' if equal else 'differ'}",
            flush=True,
        )
    sys.exit(missed)


if __name__ == "__main__":
    main()
