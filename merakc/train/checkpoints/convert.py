"""Checkpoints from and to other programs' files: Hugging Face folders, and one file of torch's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from merakc.errors import CheckpointError
from merakc.files.reading import read_text
from merakc.train.checkpoints.codec import decode, encode
from merakc.train.checkpoints.manifest import (
    EXTRA,
    MOST_BYTES,
    NAME,
    OPTIMIZER,
    WEIGHTS,
    check_files,
    read_manifest,
    stored_name,
)
from merakc.train.checkpoints.run_state import MEMBERS
from merakc.train.checkpoints.saving import write
from merakc.train.checkpoints.storage import Writer

Tensors = dict[str, torch.Tensor]
TORCH = (".pt", ".pth", ".bin")
EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<number>\d+)\.(?P<rest>.+)")
PACKED = re.compile(r"(?P<before>.*\.experts)\.(?P<rest>.+)")


@dataclass
class Contents:
    """What a checkpoint holds: tensors as in its manifest, mapped from their files; the run; the
    texts of other files.
    """

    tensors: Tensors
    run: dict[str, Any] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)


def read_contents(path: Path) -> Contents:
    """Of a checkpoint, a folder of safetensors files, or a file of torch's.

    Raises `CheckpointError` where it is none of these, or damaged.
    """
    if path.is_dir():
        return _of_checkpoint(path) if (path / NAME).exists() else _of_weights(path)
    if path.suffix in TORCH:
        return _of_torch(path)
    raise CheckpointError(f"{path} is neither a folder nor a file of torch's ({', '.join(TORCH)})")


def _of_checkpoint(folder: Path) -> Contents:
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    files = {name: _tensors(folder / name) for name in {t.file for t in manifest.tensors.values()}}
    tensors = {n: files[t.file][stored_name(n)] for n, t in manifest.tensors.items()}
    texts = (name for name in manifest.files if name.endswith(".json"))
    others = {n: _text(folder / n) for n in texts if not n.endswith(".index.json")}
    return Contents(tensors, manifest.run, others)


def _of_weights(folder: Path) -> Contents:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(_text(index))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {error!r}") from None
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise CheckpointError(f"{folder} holds no checkpoint and no safetensors files")
    tensors: Tensors = {}
    for name in names:
        tensors |= {WEIGHTS + key: t for key, t in _tensors(folder / Path(name).name).items()}
    configs = (folder / n for n in ("config.json", "generation_config.json"))
    others = {path.name: _text(path) for path in configs if path.exists()}
    return Contents(tensors, _bare_run(tensors), others)


def _bare_run(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What is known of a run of which there are weights alone."""
    names = [stored_name(n) for n in tensors if n.startswith(WEIGHTS)]
    return {"parameters": names, "optimizers": [], "extras": [{"scheduler": [], "extra": None}]}


def _text(path: Path) -> str:
    try:
        return read_text(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _tensors(path: Path) -> Tensors:
    try:
        with safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _of_torch(path: Path) -> Contents:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, UnpicklingError) as error:
        why = str(error).splitlines()[0] if isinstance(error, OSError) else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read ({why}): it is no file of torch.save, or holds objects that "
            "are more than data"
        ) from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state dict")
    model = found.get("model", found)
    if not isinstance(model, dict) or not all(isinstance(v, torch.Tensor) for v in model.values()):
        raise CheckpointError(f"{path} holds no state dict of tensors, nor one under 'model'")
    tensors: Tensors = {WEIGHTS + name: value for name, value in _first_of_tied(model).items()}
    run = _bare_run(tensors)
    run["parameters"] = found.get("parameters", run["parameters"])
    run["parallel"] = {
        "step": found.get("step", 0),
        "seed": found.get("seed", 0),
        "loss_scale": None,
    }
    extras: Tensors = {}
    run["extras"] = [encode({k: found.get(k, []) for k in ("scheduler", "extra")}, extras, "extra")]
    tensors |= {EXTRA + name: value for name, value in extras.items()}
    kinds = found.get("optimizer_kinds", [])
    for state, kind in zip(found.get("optimizer", []), kinds, strict=True):
        run["optimizers"].append(_named_state(state, kind, run["parameters"], tensors))
    return Contents(tensors, run)


def _first_of_tied(model: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors of a state dict, those that are one and the same under their first name."""
    found: Tensors = {}
    seen = set()
    for name, value in model.items():
        key = value.data_ptr(), value.shape, value.stride(), value.dtype
        if not value.numel() or key not in seen:
            found[name] = value
        seen.add(key)
    return found


def _named_state(
    state: Mapping[str, Any], kind: str, parameters: list[str], tensors: Tensors
) -> dict[str, Any]:
    """An optimizer's record, of torch's own state dict with `param_names` in its groups."""
    names = dict(enumerate(n for group in state["param_groups"] for n in group["param_names"]))
    if unknown := set(names.values()) - set(parameters):
        raise CheckpointError(f"the optimizer has '{unknown.pop()}', which is no parameter")
    scalars: dict[str, Any] = {}
    for number, own in state["state"].items():
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER}state.{names[number]}.{key}"] = value
            else:
                scalars.setdefault(names[number], {})[key] = encode(value, {}, key)
    groups = [
        {
            "options": encode({k: v for k, v in g.items() if k not in MEMBERS}, {}, ""),
            "names": list(g["param_names"]),
        }
        for g in state["param_groups"]
    ]
    return {"kind": kind, "groups": groups, "scalars": scalars}


def write_torch(contents: Contents, path: Path) -> None:
    """One file that `torch.load` reads: `model`, `optimizer` (a list of torch's own state dicts),
    `scheduler`, `extra`, `step`, and the names of the parameters in the model's order.
    """
    run = contents.run
    model = {stored_name(n): t for n, t in contents.tensors.items() if n.startswith(WEIGHTS)}
    given = {stored_name(n): t for n, t in contents.tensors.items() if n.startswith(EXTRA)}
    extras = decode(run["extras"][0], given)
    order = {name: k for k, name in enumerate(run["parameters"])}
    found = {
        "model": model,
        "optimizer": [_torch_state(r, contents.tensors, order) for r in run["optimizers"]],
        "optimizer_kinds": [record["kind"] for record in run["optimizers"]],
        "parameters": run["parameters"],
        "step": run.get("parallel", {}).get("step", 0),
        "seed": run.get("parallel", {}).get("seed", 0),
        **extras,
    }
    aside = path.with_name(f".{path.name}.writing")
    try:
        torch.save(found, aside)
        aside.rename(path)
    except OSError as error:
        raise CheckpointError(f"{path} was not written: {error}") from None


def _torch_state(
    record: Mapping[str, Any], tensors: Tensors, order: Mapping[str, int]
) -> dict[str, Any]:
    """An optimizer's state dict as torch's, parameters in the model's order."""
    groups: list[Any] = []
    numbers: dict[str, int] = {}
    for group in record["groups"]:
        names = sorted(group["names"], key=order.__getitem__)
        params = list(range(len(numbers), len(numbers) + len(names)))
        numbers |= dict(zip(names, params, strict=True))
        groups.append({**decode(group["options"], {}), "params": params, "param_names": names})
    state: dict[int, Any] = {}
    for name, value in tensors.items():
        if name.startswith(OPTIMIZER):
            parameter, _, key = stored_name(name).removeprefix("state.").rpartition(".")
            if parameter in numbers:
                state.setdefault(numbers[parameter], {})[key] = value
    for parameter, own in record["scalars"].items():
        state.setdefault(numbers[parameter], {}).update(decode(own, {}))
    return {"state": state, "param_groups": groups}


def write_folder(contents: Contents, folder: Path) -> None:
    """A checkpoint."""
    write(contents.tensors, Writer(folder, contents.run, contents.others), None, None)


def weights_only(contents: Contents) -> Contents:
    """The weights, and what `from_pretrained` needs beside them."""
    tensors = {n: t for n, t in contents.tensors.items() if n.startswith(WEIGHTS)}
    others = {n: text for n, text in contents.others.items() if n != "plan.json"}
    return Contents(tensors, _bare_run(tensors), others)


def with_dtype(contents: Contents, dtype: torch.dtype) -> Contents:
    """Weights of floating point in another dtype; the optimizer's state stays."""
    tensors = {
        n: t.to(dtype) if n.startswith(WEIGHTS) and t.is_floating_point() else t
        for n, t in contents.tensors.items()
    }
    others = dict(contents.others)
    if "config.json" in others:
        config = json.loads(others["config.json"])
        config["dtype"] = str(dtype).removeprefix("torch.")
        others["config.json"] = json.dumps(config, indent=2) + "\n"
    return Contents(tensors, contents.run, others)


def with_experts(contents: Contents, *, packed: bool) -> Contents:
    """The experts of every layer in one tensor, expert by expert along its first dim, or each in
    tensors of its own: `experts.gate.weight` and `experts.3.gate.weight`.

    Of weights alone. Raises `CheckpointError` where there are none, or their shapes differ.
    """
    found = Contents(dict(_packed(contents.tensors) if packed else _parted(contents.tensors)))
    if found.tensors.keys() == contents.tensors.keys():
        how = "in tensors of their own" if packed else "in one tensor a layer"
        raise CheckpointError(f"there are no experts {how} ('.experts.' in a name)")
    return Contents(found.tensors, _bare_run(found.tensors), contents.others)


def _packed(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    groups: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in tensors.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            yield name, value
        else:
            whole = f"{match['before']}.{match['rest']}"
            groups.setdefault(whole, {})[int(match["number"])] = value
    for name, members in groups.items():
        alike = len({t.shape for t in members.values()}) == 1
        if sorted(members) != list(range(len(members))) or not alike:
            raise CheckpointError(f"the experts of '{name}' are not all there, or differ in shape")
        yield name, torch.stack([members[k] for k in range(len(members))])


def _parted(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tensors.items():
        match = PACKED.fullmatch(name)
        if match is None or EXPERT.fullmatch(name) or value.dim() < 2:
            yield name, value
        else:
            for k, part in enumerate(value):
                yield f"{match['before']}.{k}.{match['rest']}", part
