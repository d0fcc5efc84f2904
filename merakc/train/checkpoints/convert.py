"""Checkpoints from and to other programs' files: Hugging Face folders, and one file of torch's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open

from merakc.errors import CheckpointError
from merakc.files.reading import parse_json, read_text
from merakc.train.checkpoints.codec import decode, encode, extras_of
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
from merakc.train.checkpoints.placing import sync_folder
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


def read_contents(path: Path, *, weights_alone: bool = False) -> Contents:
    """Of a checkpoint, a folder of safetensors files, or a file of torch's; or its weights alone.

    Raises `CheckpointError` where it is none of these, or damaged.
    """
    if path.is_dir():
        found = _of_checkpoint(path) if (path / NAME).exists() else _of_weights(path)
        return weights_only(found) if weights_alone else found
    if path.suffix in TORCH:
        return _of_torch(path, weights_alone=weights_alone)
    raise CheckpointError(
        f"{path} is neither a folder nor a file of torch's ({', '.join(TORCH)}); give a "
        "checkpoint, a folder of safetensors files, or such a file"
    )


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
    listed: dict[str, str] | None = None
    if index.exists():
        try:
            named = json.loads(_text(index))["weight_map"].items()
            listed = {str(key): Path(name).name for key, name in named}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {error!r}") from None
        names = sorted(set(listed.values()))
    else:
        every = sorted(path.name for path in folder.glob("*.safetensors"))
        names = ["model.safetensors"] if "model.safetensors" in every else every
    if not names:
        raise CheckpointError(f"{folder} holds no checkpoint and no safetensors files")
    if len(names) > 1 and listed is None:
        raise CheckpointError(
            f"{folder} holds no checkpoint, no model.safetensors and no {index.name}, but "
            f"{len(names)} other safetensors files, of which one alone would be the weights"
        )
    tensors: Tensors = {}
    for name in names:
        found = _tensors(folder / name)
        keys = [*found] if listed is None else [key for key in listed if listed[key] == name]
        if lost := [key for key in keys if key not in found]:
            raise CheckpointError(f"{folder / name} has no '{lost[0]}', which {index.name} names")
        tensors |= {WEIGHTS + key: found[key] for key in keys}
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


def _of_torch(path: Path, *, weights_alone: bool) -> Contents:
    is_mapped = is_zipfile(path)  # as torch.save writes since version 1.6
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # whatever a damaged pickle leads to
        why = str(error).splitlines()[0] if isinstance(error, OSError) else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read ({why}): it is no file of torch.save, or holds objects that "
            "are more than data"
        ) from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state dict")
    model = found.get("model", found)
    if not isinstance(model, dict) or not all(_is_dense(k, v) for k, v in model.items()):
        raise CheckpointError(f"{path} holds no state dict of dense tensors, nor one under 'model'")
    if not found:
        raise CheckpointError(f"{path} holds nothing")
    tensors: Tensors = {WEIGHTS + name: value for name, value in _first_of_tied(model).items()}
    contents = Contents(tensors, _bare_run(tensors))
    if model is found or weights_alone:
        return contents
    if lacks := [k for k in ("optimizer_kinds", "parameters", "seed") if k not in found]:
        raise CheckpointError(
            f"{path} is not of `merakc checkpoint convert` (it has no '{lacks[0]}'), so that which "
            "state is of which parameter is not known: its weights alone can be read "
            "(--weights-only)"
        )
    try:
        _add_run(contents, found)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged beside its weights: {error!r}") from None
    return contents


def _is_dense(name: Any, value: Any) -> bool:
    """Whether this is a tensor under its name, whose elements lie in memory one by one."""
    is_tensor = isinstance(name, str) and isinstance(value, torch.Tensor)
    return is_tensor and value.layout is torch.strided and not value.is_quantized


def _add_run(contents: Contents, found: Mapping[str, Any]) -> None:
    """What `write_torch` wrote beside the weights."""
    tensors, run = contents.tensors, contents.run
    run["parameters"] = [str(name) for name in found["parameters"]]
    run["tied"] = dict(found.get("tied", {}))
    step = int(found.get("step", 0))
    run["parallel"] = {
        "step": step, "drawn": int(found.get("drawn", step)), "seed": int(found["seed"]),
        "loss_scale": found.get("loss_scale"),
    }  # fmt: skip
    extras: Tensors = {}
    run["extras"] = [encode({k: found.get(k, []) for k in ("scheduler", "extra")}, extras, "extra")]
    tensors |= {EXTRA + name: value for name, value in extras.items()}
    for state, kind in zip(found.get("optimizer", []), found["optimizer_kinds"], strict=True):
        run["optimizers"].append(_named_state(state, kind, run["parameters"], tensors))


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
    parallel = run.get("parallel", {})
    model = {stored_name(n): t for n, t in contents.tensors.items() if n.startswith(WEIGHTS)}
    tied = {name: of for name, of in run.get("tied", {}).items() if of in model}
    model |= {name: model[of] for name, of in tied.items()}  # as state dicts of torch have them
    given = {stored_name(n): t for n, t in contents.tensors.items() if n.startswith(EXTRA)}
    extras = extras_of(run["extras"], given)
    order = {name: k for k, name in enumerate(run["parameters"])}
    found = {
        "model": model,
        "optimizer": [_torch_state(r, contents.tensors, order) for r in run["optimizers"]],
        "optimizer_kinds": [record["kind"] for record in run["optimizers"]],
        "parameters": run["parameters"],
        "step": parallel.get("step", 0),
        "drawn": parallel.get("drawn", parallel.get("step", 0)),
        "seed": parallel.get("seed", 0),
        "loss_scale": parallel.get("loss_scale"),
        "tied": tied,
        **extras,
    }
    aside = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as opened:
            torch.save(found, opened)
            opened.flush()
            os.fsync(opened.fileno())
        aside.rename(path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
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
    writer = Writer(folder, contents.run, contents.others)
    write(contents.tensors, writer, None, None)


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
        try:
            config = dict(parse_json(others["config.json"]))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"config.json is damaged: {error}") from None
        config["dtype"] = str(dtype).removeprefix("torch.")
        others["config.json"] = json.dumps(config, indent=2) + "\n"
    return Contents(tensors, contents.run, others)


def with_experts(contents: Contents, *, packed: bool) -> Contents:
    """The experts of every layer in one tensor, expert by expert along its first dim, or each in
    tensors of its own: `experts.gate.weight` and `experts.3.gate.weight`.

    Of weights alone. Raises `CheckpointError` where there are none, or their shapes differ.
    """
    contents = weights_only(contents)
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
