"""`python -m benchmarks.real_jobs`: plans for jobs of real sizes, beside what was used for them.

Each job is planned cold in a process of its own, bound to one core, as `merakc plan` does it; then
with the degrees that were used in practice, and with `--neighbours` next to the plan: degrees that
are halved and doubled, other schedules, recomputation and shards. None of these, which leave less
open, may be faster by the same prediction.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from benchmarks.harness import (
    DocPath,
    JsonPath,
    finish,
    in_child,
    known,
    markdown,
    on_one_core,
    rich_table,
    tracked,
)
from benchmarks.plain_models import Around

MOST_S, MOST_BYTES, MOST_FASTER = 20.0, 1 << 30, 0.01
CHILD_TIMEOUT_S = 1800.0
AXES = ("dp", "tp", "pp")
# Beside the plan's degrees, what is tried in place of its other decisions.
OTHERS = {
    "recompute": ("none", "selective", "full", "stage"),
    "schedule": ("1f1b", "interleaved", "zb-h1", "zb-v"),
    "state_shards": ("zero-1", "zero-2", "zero-3"),
}
DEEPSEEK = "https://arxiv.org/abs/2412.19437"
BRIDGE = "github.com/NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md, BF16"
MEGATRON = "github.com/NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md"


@dataclass(frozen=True, slots=True)
class Job:
    """A model, by the fields of its configuration or MODULE:FUNCTION, and the machines and the
    batch that it is trained with. `used` says what was used in practice, with its source, and
    `degrees` what of that can be asked for.
    """

    model: Mapping[str, Any] | str
    machines: str
    ranks: int
    batch_size: int
    sequence: int | None = None
    used: str = ""
    degrees: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search took and found. `used_s` is the step under the degrees of practice, 0 where
    there are none; `faster` are the requests near the plan that gave a shorter step.
    """

    cpu_s: float
    peak_bytes: int
    plan: str = ""
    step_s: float = 0.0
    mfu: float = 0.0
    error: str = ""
    used_s: float = 0.0
    used_error: str = ""
    tried: int = 0
    faster: tuple[tuple[str, float], ...] = ()


LLAMA_405B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA_8B_LONG = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 128, "num_experts_per_tok": 4, "max_position_embeddings": 131072,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
# Sizes are those of the configurations that were published with the weights.
JOBS = {
    "Llama-3.1-405B": Job(
        LLAMA_405B, "h100", 16384, 2048, 8192,
        "dp 128 x tp 8 x pp 16, 41 % MFU (arXiv 2407.21783, table 4)",
        {"dp": 128, "tp": 8, "pp": 16},
    ),
    "Llama-3.1-405B on 2048": Job(LLAMA_405B, "h100", 2048, 1024, 8192),
    "Qwen3-235B-A22B": Job(
        {
            "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096,
            "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
            "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        },
        "h100", 512, 2048, 4096,
    ),
    "DeepSeek-V3": Job(
        {
            "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8, "topk_group": 4,
            "max_position_embeddings": 4096,
        },
        "h100", 2048, 15360, 4096,
        f"pp 16, 64 ranks of experts, ZeRO-1, on H800 ({DEEPSEEK}, section 3)",
    ),
    "gpt-oss-120b": Job(GPT_OSS, "h100", 128, 512, 4096),
    "gpt-oss-120b on 64": Job(
        GPT_OSS, "h100", 64, 1280, 4096,
        f"dp 2 x ep 8 x pp 4, one text of a device in each of 80 parts, 13.7 to 14.1 s ({BRIDGE})",
        {"dp": 2, "cp": 8, "expert_parallel": True, "tp": 1, "pp": 4, "micro_batches": 80},
    ),
    "Mixtral-8x7B": Job(MIXTRAL, "a100-80", 64, 256, 4096),
    "Mixtral-8x7B on H100": Job(
        MIXTRAL, "h100", 64, 256, 4096,
        "dp 2 x ep 8 x pp 4, 8 virtual stages, one text of a device in each of 16 parts, "
        f"468 TFLOP/s a device, attention counted whole: 2.90 s ({MEGATRON})",
        {"dp": 2, "cp": 8, "expert_parallel": True, "tp": 1, "pp": 4, "micro_batches": 16},
    ),
    "Gemma-3-27B": Job(
        {
            "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 5376,
            "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
            "max_position_embeddings": 131072,
        },
        "h100", 32, 128, 4096,
    ),
    "Llama-3-8B at 131072 tokens": Job(LLAMA_8B_LONG, "h100", 16, 16, 131072),
    "BLOOM-176B": Job(
        {
            "model_type": "bloom", "vocab_size": 250880, "hidden_size": 14336, "n_layer": 70,
            "n_head": 112,
        },
        "a100-80", 384, 2048, 2048,
        "dp 8 x tp 4 x pp 12, 150 TFLOP/s a device (arXiv 2211.05100, section 3.4)",
        {"dp": 8, "tp": 4, "pp": 12},
    ),
    "T5-11B": Job("t5-11b", "h100", 64, 512, 512),
    "mT5-XXL": Job(
        {
            "model_type": "mt5", "vocab_size": 250112, "d_model": 4096, "d_kv": 64, "d_ff": 10240,
            "num_layers": 24, "num_heads": 64, "decoder_start_token_id": 0,
        },
        "h100", 64, 512, 512,
    ),
    "Whisper large-v3": Job(
        {
            "model_type": "whisper", "vocab_size": 51866, "num_mel_bins": 128, "d_model": 1280,
            "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
            "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
        },
        "h100", 32, 256, 448,
    ),
    "ViT-22B": Job(
        {
            "model_type": "vit", "hidden_size": 6144, "intermediate_size": 24576,
            "num_hidden_layers": 48, "num_attention_heads": 48, "patch_size": 14,
            "architectures": ["ViTForImageClassification"], "num_labels": 29593,
        },
        "h100", 256, 65536, None, "65,536 images a step, on 1,024 TPUv4 (arXiv 2302.05442)",
    ),
    "CLIP bigG": Job(
        {
            "model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 1280,
            "text_config": {
                "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
                "num_attention_heads": 20, "projection_dim": 1280,
            },
            "vision_config": {
                "hidden_size": 1664, "intermediate_size": 8192, "num_hidden_layers": 48,
                "num_attention_heads": 16, "patch_size": 14, "projection_dim": 1280,
            },
        },
        "a100-80", 512, 159_744, None,
        "160,000 pairs a step on 512 A100 (laion.ai/blog/giant-openclip)",
    ),
    "DiT-XL/2": Job("benchmarks.real_jobs:dit", "h100", 32, 256),
}  # fmt: skip


class _Denoiser(Around):
    """Diffusers' DiT with the loss that it is trained with."""

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, class_labels: torch.Tensor,
        noise: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Samples and noise of [samples, 4, 32, 32]; the loss."""
        found = self.inner(sample, timestep, class_labels=class_labels).sample
        return F.mse_loss(found.chunk(2, dim=1)[0], noise)


def dit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """DiT-XL/2 for images of 256 x 256 (arXiv 2212.09748, table 1), and a batch of one sample."""
    from diffusers import DiTTransformer2DModel

    with torch.device("meta"):
        inner = DiTTransformer2DModel(
            num_attention_heads=16, attention_head_dim=72, in_channels=4, out_channels=8,
            num_layers=28, sample_size=32, patch_size=2, num_embeds_ada_norm=1000,
        )  # fmt: skip
    latents, one = torch.zeros(2, 4, 32, 32), torch.zeros(2, dtype=torch.long)
    batch = {"sample": latents, "timestep": one, "class_labels": one, "noise": latents}
    return _Denoiser(inner), batch


def run_job(name: str, *, neighbours: bool) -> Found:
    """Plans a job in a process of its own."""
    options = ["--child", name, *["--neighbours"] * neighbours]
    figures = in_child("benchmarks.real_jobs", *options, timeout_s=CHILD_TIMEOUT_S)
    return Found(**figures | {"faster": tuple(map(tuple, figures["faster"]))})


def plan_here(job: Job, *, neighbours: bool) -> Found:
    """The figures of this process, with all that is imported."""
    from merakc.cli.clusters import machines
    from merakc.ir.precision import parse_precision
    from merakc.planner.offers import Case, Offer, Offers
    from merakc.planner.request import Request
    from merakc.planner.sources.source import load_source

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        source = _source(job, Path(folder))
        offers = Offers(
            lambda sequence: load_source(source, None if ":" in source else sequence),
            Request(0, 0, precision=parse_precision("bf16-mixed")),
            lambda name, ranks: machines(name, "bfloat16", ranks),
        )
        case = Case(job.machines, job.ranks, job.batch_size, job.sequence)
        offer = offers.of(case)
        found = Found(
            time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            error=str(offer.error or ""),
        )  # fmt: skip
        if offer.error is not None:
            return found
        strategy, verdict = offer.made
        plan = f"{strategy}, {strategy.recompute}, {offer.shards}"
        found = dataclasses.replace(found, plan=plan, step_s=verdict.step_s, mfu=verdict.mfu)

        def at(fixed: Mapping[str, Any]) -> Offer:
            return offers.of(dataclasses.replace(case, fixed=fixed))

        if job.degrees:
            used = at(job.degrees)
            fits = used.verdict is not None and used.verdict.fits
            step_s = used.verdict.step_s if used.verdict is not None and fits else 0.0
            error = "" if fits else str(used.error or "does not fit")
            found = dataclasses.replace(found, used_s=step_s, used_error=error)
        if neighbours:
            axes = [*AXES, *["cp"] * (offers.tables[job.sequence].experts > 1)]
            near = list(_near({name: getattr(strategy, name) for name in axes}))
            every = [(str(fixed), at(fixed).verdict) for fixed in near]
            steps = [(text, v.step_s) for text, v in every if v and v.fits]
            limit_s = found.step_s * (1 - MOST_FASTER)
            faster = tuple((text, step_s) for text, step_s in steps if step_s < limit_s)
            found = dataclasses.replace(found, tried=len(steps), faster=faster)
        return found


def _source(job: Job, folder: Path) -> str:
    if isinstance(job.model, str):
        return job.model
    path = folder / "config.json"
    path.write_text(json.dumps(job.model))
    return str(path)


def _near(degrees: Mapping[str, int]) -> Iterator[Mapping[str, Any]]:
    """Degrees of which one is doubled and one halved, and these with other decisions. Ranks of cp
    share experts.
    """
    given = _with_experts(degrees)
    yield given
    for more, less in permutations(degrees, 2):
        if degrees[less] % 2 == 0:
            yield _with_experts({**degrees, more: 2 * degrees[more], less: degrees[less] // 2})
    for name, values in OTHERS.items():
        for value in values:
            yield {**given, name: value}


def _with_experts(degrees: Mapping[str, int]) -> Mapping[str, Any]:
    return {**degrees, "expert_parallel": degrees["cp"] > 1} if "cp" in degrees else degrees


def rows_of(found: Mapping[str, Found]) -> list[list[str]]:
    """The table."""
    rows = [
        ["model", "devices", "batch x tokens", "plan", "step s", "MFU", "used in practice",
         "priced here", "CPU s", "MiB", "near: faster"],
    ]  # fmt: skip
    for name, one in found.items():
        job = JOBS[name]
        tokens = f" x {job.sequence:,}" if job.sequence else ""
        used = f"{one.used_s:.3g} s" if one.used_s else one.used_error
        near = "; ".join(f"{text}: {step_s:.3g} s" for text, step_s in one.faster)
        rows.append([
            name, f"{job.ranks:,} {job.machines}", f"{job.batch_size:,}{tokens}",
            one.plan or one.error, f"{one.step_s:.3g}", f"{one.mfu:.0%}", job.used, used,
            f"{one.cpu_s:.1f}", str(one.peak_bytes >> 20),
            f"{len(one.faster)} of {one.tried} {near}" if one.tried else "",
        ])  # fmt: skip
    return rows


def problems(one: Found) -> list[str]:
    """What a job misses."""
    found = [one.error] if one.error else []
    found += [f"{one.cpu_s:.1f} CPU s, of {MOST_S:g}"] * (one.cpu_s > MOST_S)
    found += [f"{one.peak_bytes >> 20} MiB, of {MOST_BYTES >> 20}"] * (one.peak_bytes > MOST_BYTES)
    found += [f"{text} is faster" for text, _ in one.faster]
    if one.used_s and one.used_s < one.step_s * (1 - MOST_FASTER):
        found.append("what was used in practice is faster")
    return found


def main(
    jobs: Annotated[str, typer.Option(help="Only these, separated by commas.")] = "",
    neighbours: Annotated[bool, typer.Option("--neighbours", help="Look near the plans.")] = False,
    child: Annotated[str, typer.Option(hidden=True)] = "",
    json_path: JsonPath = None,
    doc: DocPath = None,
) -> None:
    """Plans the jobs; exits with 1 where one misses something."""
    if child:
        found = on_one_core(partial(plan_here, JOBS[child], neighbours=neighbours))
        print(json.dumps(dataclasses.asdict(found)))
        return
    console = Console(width=max(Console().width, 200))
    found: dict[str, Found] = {}
    for name in tracked(known(jobs, JOBS, "--jobs"), str, console):
        found[name] = run_job(name, neighbours=neighbours)
        for text in problems(found[name]):
            console.print(f"{name}: {text}", style="red", soft_wrap=True)
    rows = rows_of(found)
    console.print(rich_table(rows, left=4))
    missed = sum(bool(problems(one)) for one in found.values())
    finish(
        console, not missed, f"{len(found)} jobs, {missed} of which miss something",
        json_path=json_path, figures=found, doc=doc,
        page=lambda: markdown(rows),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
