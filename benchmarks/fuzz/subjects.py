"""The kinds of files: sound ones, how they are signed, what reads them, and what they then mean."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typer.testing import CliRunner

import merakc
from benchmarks.fuzz.mutations import (
    PLAN_HEAD,
    damaged_bytes,
    damaged_json,
    damaged_lines,
    rehashed,
)
from merakc.cli.app import app
from merakc.equality.ranks import run_ranks
from merakc.ir.ledger import DIGEST_LENGTH, read_ledger
from merakc.ir.plan_file import load_plan
from merakc.machines.cluster_files import cluster_text, load_cluster, preset
from merakc.planner.sources.source import load_source
from merakc.train.checkpoints.manifest import NAME, _body_crc, read_manifest

MODEL = "benchmarks.fuzz.subjects:small"
CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
     "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
     "max_position_embeddings": 16, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
     "hidden_act": "silu", "architectures": ["LlamaForCausalLM"]},
    {"model_type": "gpt2", "vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2,
     "n_positions": 16, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"},
    {"model_type": "t5", "vocab_size": 32, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_heads": 2,
     "num_layers": 1, "decoder_start_token_id": 0, "feed_forward_proj": "relu"},
    {"model_type": "vit", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
     "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "num_channels": 3},
)  # fmt: skip


class Small(nn.Module):
    """Two layers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """A mean of squares."""
        return {"loss": self.second(torch.tanh(self.first(x))).square().mean()}


def small() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and a batch."""
    return Small(), {"x": torch.ones(4, 8)}


@dataclass(frozen=True)
class Subject:
    """A kind of file. `texts` are sound ones, `sign` makes checksums anew; `means` reads a file and
    says of which value it is, `said` what value its text says; `commands` read it too where it
    is taken, and of every 20th that is refused; `slow` ones of every 16th.
    """

    name: str
    file: str
    texts: tuple[str, ...]
    means: Callable[[Path], Any]
    said: Callable[[str], Any]
    commands: Callable[[Path], list[list[str]]]
    sign: Callable[[Any], Any] = lambda body: body
    is_toml: bool = False
    slow: Callable[[Path], list[list[str]]] = lambda path: []
    share: int = 1  # of all mutants

    def mutant(self, seed: int) -> bytes:
        """A damaged file."""
        rng = random.Random(seed)
        text = rng.choice(self.texts)
        kind = rng.randrange(4)
        if kind == 0:
            return damaged_bytes(text, rng)
        if self.is_toml:
            return damaged_lines(text, rng)
        sign = self.sign if kind > 1 else lambda body: body
        if self.name != "ledger":
            return damaged_json(text, rng, sign)
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        found = [line.encode() for line in lines]
        found[at] = damaged_json(lines[at], rng, lambda body: body)
        return b"\n".join(_signed_lines(found) if kind > 1 else found) + b"\n"


def subjects(folder: Path) -> list[Subject]:
    """All kinds; sound files that take work are made under `folder`."""
    plans = tuple(_plans(folder))
    plan, checkpoint = folder / "base.json", folder / "saved"
    plan.write_text(plans[0], encoding="utf-8")
    ledger, used = folder / "run.jsonl", folder / "used.json"
    run_ranks(2, partial(_train, checkpoint, ledger, used))
    page, trace = str(folder / "page.html"), str(folder / "trace.json")
    return [
        Subject(
            "plan", "plan.json", plans, lambda p: _values(load_plan(p)), _plan_said,
            lambda p: [["show", str(p)], ["show", str(p), "--html", page, "--trace", trace],
                       ["diff", str(plan), str(p), "--json"]],
            sign=lambda body: json.loads(rehashed(body)),
            slow=lambda p: [["simulate", str(p), MODEL]], share=5,
        ),
        Subject(
            "cluster", "cluster.toml",
            tuple(cluster_text(preset(n)) for n in ("h100", "cpu", "a100-40", "v100")),
            lambda p: tomllib.loads(cluster_text(load_cluster(p))), _cluster_said,
            lambda p: [], is_toml=True,
            slow=lambda p: [["plan", MODEL, "--ranks", "2", "--batch", "8", "--cluster", str(p),
                             "-o", str(folder / "of_cluster.json")]],
            share=5,
        ),
        Subject(
            "ledger", "run.jsonl", (ledger.read_text(encoding="utf-8"),),
            lambda p: _values(read_ledger(p), "path"), _ledger_said,
            lambda p: [["diff", str(used), str(p)], ["diff", str(used), str(p), "--json"]], share=4,
        ),
        Subject(
            "config", "config.json", tuple(map(json.dumps, CONFIGS)),
            lambda p: load_source(str(p)).config.to_dict(), json.loads, lambda p: [],
            slow=lambda p: [["plan", str(p), "--ranks", "1", "--batch", "2", "--cluster", "cpu",
                             "-o", str(folder / "of_config.json")]],
            share=2,
        ),
        Subject(
            "manifest", NAME, ((checkpoint / NAME).read_text(encoding="utf-8"),),
            lambda p: read_manifest(p.parent).model_dump(mode="json"),
            lambda text: json.loads(text)["checkpoint"],
            lambda p: [["checkpoint", "show", str(p.parent), "--tensors"],
                       ["checkpoint", "show", str(p.parent), "--json"]],
            sign=_signed_manifest, share=4,
        ),
    ]  # fmt: skip


def run(arguments: list[str]) -> None:
    """One command; raises what it does not tell in a message of its own."""
    found = CliRunner().invoke(app, arguments)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    told = found.output
    assert "Traceback" not in told, told
    assert not any(c in told for c in ("\x1b]", "\x1b[2J", "\u202e", "\x00")), "steers the terminal"
    assert found.exit_code in (0, 1, 2), f"exit code {found.exit_code}"


def changed(subject: Subject, path: Path) -> str:
    """What a file that is read means otherwise than it says, if anything. Raises `MerakError` where
    it is refused.
    """
    means = subject.means(path)
    said = subject.said(path.read_text(encoding="utf-8"))
    return "; ".join(list(_differences(said, means, subject.name))[:3])


def _differences(said: Any, means: Any, where: str) -> Iterator[str]:
    """Where what is read is not what stands in the file; defaults may be added."""
    if isinstance(said, Mapping) and isinstance(means, Mapping):
        for key, value in said.items():
            if key in means:
                yield from _differences(value, means[key], f"{where}.{key}")
            elif value not in ("", [], {}, False, None) and key not in _TOLD_OTHERWISE:
                yield f"{where}.{key} is passed over"
    elif isinstance(said, list) and isinstance(means, (list, tuple)) and len(said) == len(means):
        for k, (one, other) in enumerate(zip(said, means, strict=True)):
            yield from _differences(one, other, f"{where}[{k}]")
    elif isinstance(said, int) and isinstance(means, float):
        if float(said) != means:
            yield f"{where} says {said} and is {means}"
    elif said != means and not (said in ("", [], {}, None) and not means):
        yield f"{where} says {str(said)[:60]!r} and is {str(means)[:60]!r}"


# transformers says these under other names, or makes them part of others.
_TOLD_OTHERWISE = ("profile", "rope_theta", "attn_implementation")


def _values(value: Any, *without: str) -> Any:
    found = json.loads(json.dumps(dataclasses.asdict(value)))
    return {k: v for k, v in found.items() if k not in without}


def _plan_said(text: str) -> Any:
    return {k: v for k, v in json.loads(text).items() if k not in PLAN_HEAD}


def _cluster_said(text: str) -> Any:
    """With devices under the names that they give themselves."""
    body = tomllib.loads(text)
    named = {key: own.get("name", key) for key, own in body.get("devices", {}).items()}
    for node in body["nodes"]:
        node["device"] = named.get(node["device"], node["device"])
    body["devices"] = {named[key]: own for key, own in body.get("devices", {}).items()}
    for own in body["devices"].values():
        own.pop("name", None)
    return body


def _ledger_said(text: str) -> Any:
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        del line["digest"]
    return {"header": lines[0], "steps": lines[1:]}


def _signed_manifest(body: Any) -> Any:
    if "checkpoint" not in body:
        return body
    return {**body, "crc32": _body_crc(body["checkpoint"])}


def _signed_lines(lines: list[bytes]) -> Iterator[bytes]:
    """With digests that follow each other, as far as they can be made."""
    before = ""
    for line in lines:
        try:
            body = json.loads(line)
            body.pop("digest", None)
            text = before + json.dumps(body, sort_keys=True)
            before = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
            yield json.dumps({**body, "digest": before}).encode("utf-8", "surrogatepass")
        except (ValueError, AttributeError, TypeError):
            yield line


def _plans(folder: Path) -> Iterator[str]:
    """With a report and its timeline; over stages, sharded, and of mixed precision."""
    for k, more in enumerate((["--pp", "2"], ["--dp", "2", "--state-shards", "1,2,2"], ["--tp", "2",
                             "--precision", "bf16-mixed"])):  # fmt: skip
        path = folder / f"plan{k}.json"
        run(["plan", MODEL, "--ranks", "2", "--batch", "8", "--cluster", "cpu", *more, "-o",
             str(path)])  # fmt: skip
        yield path.read_text(encoding="utf-8")


def _train(checkpoint: Path, ledger: Path, used: Path) -> None:
    model, batch = small()
    model = merakc.auto_parallel(model, batch, dp=2, state_shards="zero-1", ledger=ledger)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    merakc.save(checkpoint, model, optimizer)
    if model.rank == 0:
        model.plan_file.save(used)
