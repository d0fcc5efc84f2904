"""What new shapes of batch cost: 50 random ones in a row, of GPT-2 and Llama of 12 layers.

    python -m benchmarks.shapes

Of each shape one training step is taken, and then the same one again: what the first took longer,
in seconds of the CPU, is what the shape costs. Memory is what stays resident once what is free has
gone back to the system. It exits with 1 where the shapes cost more than they may.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
import random
import sys
import time
import warnings

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import merakc
from merakc.runtime.allocator import STATM

SHAPES, LAYERS, WIDTH, WORDS = 50, 12, 64, 256
MICRO_BATCHES, SAMPLES, LENGTHS = 4, (8, 12, 16), (16, 128)
MOST_S, MOST_MB = 10.0, 10.0


def gpt2() -> PreTrainedModel:
    """With dropout, as it is."""
    config = GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=256,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> PreTrainedModel:
    """With two heads for keys."""
    config = LlamaConfig(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=3 * WIDTH,
                         num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
                         max_position_embeddings=256)  # fmt: skip
    return LlamaForCausalLM(config)


def batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    """Random words."""
    ids = torch.randint(WORDS, (samples, length))
    return {"input_ids": ids, "labels": ids}


def resident_mb() -> float:
    """Megabytes that are resident when all that is free has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(STATM.read_text().split()[1]) * mmap.PAGESIZE / 2**20


def measured(model: PreTrainedModel) -> tuple[list[float], float]:
    """The seconds that each shape costs, and by how many megabytes the process has grown."""

    def step(given: dict[str, torch.Tensor]) -> float:
        start_s = time.process_time()
        parallel(**given).loss.backward()
        return time.process_time() - start_s

    first = batch(SAMPLES[0], LENGTHS[0])
    parallel = merakc.auto_parallel(model, first, dp=1, tp=1, pp=1, micro_batches=MICRO_BATCHES)
    step(first)
    before_mb, pick, seconds = resident_mb(), random.Random(0), []
    for _ in range(SHAPES):
        given = batch(pick.choice(SAMPLES), pick.randint(*LENGTHS))
        seconds.append(step(given) - step(given))
    return seconds, resident_mb() - before_mb


def main() -> None:
    """Prints a line for each model, and exits with 1 where one misses."""
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    missed = False
    for make in (gpt2, llama):
        seconds, grown_mb = measured(make())
        usual_s, total_s = sorted(seconds)[len(seconds) // 2], sum(seconds)
        missed |= total_s > MOST_S or grown_mb > MOST_MB
        print(
            f"{make.__name__}: {SHAPES} shapes cost {total_s:.1f} s (at most {MOST_S:.0f}): "
            f"{usual_s:.2f} s in the median, {max(seconds):.2f} s at most; "
            f"{grown_mb:+.1f} MB (at most {MOST_MB:.0f})",
            flush=True,
        )
    sys.exit(missed)


if __name__ == "__main__":
    main()
