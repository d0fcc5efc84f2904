"""Cluster files: TOML that says which devices, nodes and links there are; and presets of them.

A file has `[devices.NAME]` tables, `[[nodes]]` that name a device (of the file, or of a preset),
and `[[links]]` from the inner to the outer level. docs/cluster-files.md shows one.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from merakc.errors import ClusterError
from merakc.files.printable import count_of
from merakc.files.reading import read_text
from merakc.machines.cluster import (
    NOMINAL_CPU,
    NOMINAL_GPU,
    Device,
    Factors,
    Hardware,
    Nodes,
    Profile,
)
from merakc.machines.links import Host, Level

# More than anyone has: beyond, a file is damaged, and a value for each device fills the memory.
MOST_DEVICES = 1 << 20
# Machines of which nominal figures are known, with as many devices as there are ranks.
NOMINAL = {"cpu": NOMINAL_CPU, "gpu": NOMINAL_GPU}
PRESETS = Path(__file__).parent / "presets"
_HARDWARE = TypeAdapter(Hardware)
_KEYS: dict[str, type] = {
    "profile": Profile, "devices": Device, "nodes": Nodes, "host": Host, "links": Level,
    "factors": Factors,
}  # fmt: skip


def preset_names() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def preset(name: str, nodes: int = 1) -> Hardware:
    """So many nodes of a preset. Raises `ClusterError` for a name that is none."""
    if not 1 <= nodes <= MOST_DEVICES:
        raise ClusterError(
            f"preset {name!r}: nodes is {nodes}; a cluster has at least 1, and at most "
            f"{MOST_DEVICES}"
        )
    hardware = _preset(name)
    return replace(hardware, nodes=tuple(replace(n, count=nodes) for n in hardware.nodes))


def load_cluster(path: str | Path) -> Hardware:
    """The hardware that a cluster file describes.

    Raises `ClusterError`, with the file, the key, its value and a remedy, for whatever is wrong.
    """
    place = Path(path)
    try:
        text = read_text(place)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ClusterError(
            f"{place}: cannot be read as a cluster file ({why}){_meant(str(path))}; give the "
            "path of a TOML file, or one of "
            f"{', '.join({**NOMINAL, **dict.fromkeys(preset_names())})}"
        ) from None
    return parse_cluster(text, str(place))


def find_cluster(name_or_path: str) -> Hardware:
    """The preset of that name, `NAME:NODES` of it, or what the file of that path says; with `+tf32`
    behind that, where products of 32 bits are in TF32.

    Raises `ClusterError` for a name that is none, and where no device has TF32.
    """
    base = without_rounding(name_or_path)
    if base != name_or_path:
        hardware = find_cluster(base)
        if not any("tf32" in n.device.peak_flops_per_s for n in hardware.nodes):
            raise ClusterError(
                f"{name_or_path}: no rate of TF32 is known of {hardware.nodes[0].device.name}; "
                f"ask for {base}, or give its rate as peak_flops_per_s.tf32"
            )
        return hardware.rounding()
    name, _, nodes = name_or_path.partition(":")
    if name in preset_names() and (nodes.isdecimal() or not nodes):
        return preset(name, int(nodes or 1))
    if name in preset_names() and not Path(name_or_path).exists():
        raise ClusterError(
            f"{name_or_path}: {nodes!r} is no number of nodes; give {name}:NODES, such as {name}:8"
        )
    return load_cluster(name_or_path)


def without_rounding(name_or_path: str) -> str:
    """The name without `+tf32`."""
    return name_or_path if Path(name_or_path).exists() else name_or_path.removesuffix("+tf32")


def hardware_for(name_or_path: str, ranks: int | None = None) -> Hardware:
    """What `find_cluster` finds, with as many devices as there are ranks; all where None.

    A preset without a number of nodes has as many as the ranks take. Of others the first nodes are
    used. Raises `ClusterError` where there are too few devices, or half a node would be used
    beside whole ones.
    """
    hardware = find_cluster(name_or_path)
    if ranks is None:
        return hardware
    if ranks > MOST_DEVICES:
        raise ClusterError(f"{ranks} ranks are more than {MOST_DEVICES}; ask for fewer")
    if without_rounding(name_or_path) in preset_names():
        count = -(-ranks // hardware.nodes[0].devices)
        hardware = replace(hardware, nodes=(replace(hardware.nodes[0], count=count),))
    total, found = len(hardware.devices), []
    if ranks > total:
        raise ClusterError(
            f"{name_or_path}: {count_of(ranks, 'rank')} are asked for and it has "
            f"{count_of(total, 'device')}; ask for fewer, or describe more nodes"
        )
    for own in hardware.nodes:
        count = min(own.count, ranks // own.devices)
        if count:
            found.append(replace(own, count=count))
            ranks -= count * own.devices
        if count < own.count:
            break
    if ranks and found:
        raise ClusterError(
            f"{name_or_path}: there would be {count_of(ranks, 'rank')} on a node of "
            f"{count_of(own.devices, 'device')}; give a number of ranks that fills whole nodes"
        )
    if ranks:
        found = [replace(hardware.nodes[0], devices=ranks, count=1)]
    return replace(hardware, nodes=tuple(found))


def parse_cluster(text: str, where: str = "cluster file") -> Hardware:
    """The hardware that the text of a cluster file describes; `where` stands in messages.

    Raises `ClusterError` as `load_cluster` does.
    """
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{where}: no TOML: {error}; mend that line") from None
    given = _resolve(given, where)
    _refuse_bools(given, where)
    try:
        hardware = _HARDWARE.validate_python(given)
    except ValidationError as error:
        raise ClusterError(_explain(error, where)) from None
    check_hardware(hardware, where)
    return hardware


def cluster_text(hardware: Hardware) -> str:
    """The text of a cluster file that describes this hardware."""
    devices = {n.device.name: n.device for n in hardware.nodes}
    named = "name", "link_share", "step_error", "overlap"
    figures = {name: getattr(hardware, name) for name in named}
    lines = _table("", figures)
    for name, device in devices.items():
        head = f"devices.{json.dumps(name)}"
        values = {f.name: getattr(device, f.name) for f in fields(device) if f.name != "name"}
        profile = values.pop("profile")
        lines += _table(f"[{head}]", values)
        if profile is not None:
            lines += _table(f"[{head}.profile]", asdict(profile))
    for own in hardware.nodes:
        values = _values(own) | {"device": own.device.name}
        host = values.pop("host")
        lines += _table("[[nodes]]", values)
        if host is not None:
            lines += _table("[nodes.host]", _values(host))
    for link in hardware.links:
        lines += _table("[[links]]", _values(link))
    if hardware.factors != Factors():
        lines += _table("[factors]", _values(hardware.factors))
    return "\n".join(lines) + "\n"


def _values(value: Nodes | Host | Level | Factors) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _table(head: str, values: Mapping[str, Any]) -> list[str]:
    """The lines of a table; what is empty is left out."""
    found = [
        f"{key} = {_toml(value)}"
        for key, value in values.items()
        if value not in ("", (), {}) and value is not False
    ]
    return [*(["", head] if head else []), *found]


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(own)}" for key, own in value.items()) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value) if isinstance(value, (str, bool)) else repr(value)


@cache
def _preset(name: str) -> Hardware:
    if name not in preset_names():
        raise ClusterError(
            f"preset {name!r} is not known{_like(name, preset_names())}; there are "
            f"{', '.join(preset_names())}"
        )
    return load_cluster(PRESETS / f"{name}.toml")


def _resolve(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The tables with each node's device in place of its name."""
    found = dict(given)
    named = found.pop("devices", {})
    if not isinstance(named, dict) or not all(isinstance(t, dict) for t in named.values()):
        raise ClusterError(f"{where}: devices: must be tables; write [devices.NAME]")
    nodes = found.get("nodes")
    if not isinstance(nodes, list) or not nodes:
        raise ClusterError(
            f"{where}: nodes: none are given; add [[nodes]] with device and devices, and count "
            "where there is more than one node"
        )
    if not found.get("links"):
        raise ClusterError(
            f"{where}: links: none are given; add [[links]] with name, devices and bytes_per_s, "
            "one for each level from the inside of a node outwards"
        )
    found["nodes"] = [
        {**n, "device": _device(n.get("device"), named, f"{where}: nodes.{k}.device")}
        if isinstance(n, dict)
        else n
        for k, n in enumerate(nodes)
    ]
    used = [n.get("device") for n in nodes if isinstance(n, dict)]
    idle = [name for name in named if name not in used]
    if idle:
        raise ClusterError(
            f"{where}: devices.{idle[0]}: no node has it{_like(idle[0], list(map(str, used)))}; "
            "name it in [[nodes]], or take it out"
        )
    return found


def _refuse_bools(value: Any, where: str, key: str = "") -> None:
    """Raises `ClusterError` for a truth value that would pass for the number 0 or 1."""
    if isinstance(value, bool) and not key.endswith("symmetric_memory"):
        raise ClusterError(
            f"{where}: {key}: {str(value).lower()} is no number; give one, in the unit of its name"
        )
    if isinstance(value, (dict, list)):
        for name, own in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_bools(own, where, f"{key}.{name}".removeprefix("."))


def _device(name: Any, named: Mapping[str, Any], where: str) -> Any:
    if isinstance(name, str) and name in named:
        return {"name": name, **named[name]}
    if isinstance(name, str) and name in preset_names():
        return _preset(name).nodes[0].device
    known = (*named, *preset_names())
    raise ClusterError(
        f"{where}: {name!r} is no device of the file and no preset{_like(str(name), known)}; name "
        f"one of {', '.join(known)}, or add [devices.{name or 'NAME'}]"
    )


def check_hardware(hardware: Hardware, where: str) -> None:
    """What holds between values. Raises `ClusterError`."""
    if not (hardware.nodes and hardware.links):
        raise ClusterError(f"{where}: no nodes or no links; give at least one of each")
    sizes = [link.devices for link in hardware.links]
    for k, (inner, outer) in enumerate(pairwise(sizes), 1):
        if outer <= inner:
            raise ClusterError(
                f"{where}: links.{k}.devices: {outer}, but the level inside it joins {inner}; "
                "order the levels from the inner to the outer, each of more devices"
            )
    for k, link in enumerate(hardware.links):
        if link.shared_by > link.devices:
            raise ClusterError(
                f"{where}: links.{k}.shared_by: {link.shared_by} devices share a link that joins "
                f"{link.devices}; give at most {link.devices}"
            )
    for k, own in enumerate(hardware.nodes):
        if own.host is not None and own.host.shared_by > own.devices:
            raise ClusterError(
                f"{where}: nodes.{k}.host.shared_by: {own.host.shared_by} devices share a link of "
                f"a node of {own.devices}; give at most {own.devices}"
            )
    for device in dict.fromkeys(n.device for n in hardware.nodes):
        if not device.peak_flops_per_s:
            raise ClusterError(
                f"{where}: devices.{device.name}.peak_flops_per_s: names no dtype; give rates, "
                "such as { float32 = 1e13, bfloat16 = 2e13 }"
            )
        _check_profile(device, where)
    total = sum(n.count * n.devices for n in hardware.nodes)  # it may be any number yet
    if total > MOST_DEVICES:
        raise ClusterError(
            f"{where}: nodes: {total} devices in all, more than {MOST_DEVICES}; mend "
            "count or devices"
        )
    if sizes[-1] < total:
        raise ClusterError(
            f"{where}: links.{len(sizes) - 1}.devices: the outermost level joins {sizes[-1]} "
            f"devices, and there are {total}; give it {total} or more, or add a level"
        )


def _check_profile(device: Device, where: str) -> None:
    """Raises `ClusterError` where sizes do not grow."""
    found = device.profile or Profile()
    curves = {"traffic": found.traffic}
    curves |= {f"products.{dtype}": points for dtype, points in found.products.items()}
    curves |= {f"attention.{dtype}": points for dtype, points in found.attention.items()}
    for name, points in curves.items():
        for (size, _), (larger, _) in pairwise(points):
            if larger <= size:
                raise ClusterError(
                    f"{where}: devices.{device.name}.profile.{name}: {larger:g} stands behind "
                    f"{size:g}; order the sizes from small to large"
                )


def _explain(error: ValidationError, where: str) -> str:
    """The first thing that is wrong, and how many more are."""
    unknown = ("unexpected_keyword_argument", "extra_forbidden")  # a misspelt key is missing too
    found = sorted(error.errors(), key=lambda e: e["type"] not in unknown)
    first, more = found[0], len(found) - 1
    place = ".".join(map(str, first["loc"]))
    text = f"{where}: {place}: {_problem(first)}"
    return text + (f" ({more} more {'thing is' if more == 1 else 'things are'} wrong)" * bool(more))


def _problem(found: Mapping[str, Any]) -> str:
    key, value = str(found["loc"][-1]), found["input"]
    rooms = [str(p) for p in found["loc"][:-1] if p in _KEYS]
    kind = _KEYS.get(rooms[-1] if rooms else "", Hardware)
    kind = Device if "device" in found["loc"][:-1] and kind is Nodes else kind
    names = [f.name for f in fields(kind)]
    match found["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            return f"unknown key{_like(key, names)}; known are {', '.join(names)}"
        case "missing":
            return f"is missing; add {key} = …"
        case "greater_than" | "greater_than_equal" | "less_than_equal" | "finite_number":
            message = str(found["msg"]).removeprefix("Input should be ")
            return f"{value!r} must be {message}; mend the value, in the unit of its name"
        case _:
            return f"{value!r}: {found['msg']}; mend the value"


def _meant(name: str) -> str:
    """The name of machines that a path may be instead, with its number of nodes and rounding."""
    base, nodes, rest = re.findall(r"([^:+]*)(:\d+)?(.*)", name)[0]
    found = difflib.get_close_matches(base.lower(), (*NOMINAL, *preset_names()), 1)
    if not found:
        return ""
    nodes = nodes if found[0] in preset_names() else ""  # others have as many as there are ranks
    return f" (did you mean {found[0] + nodes + '+tf32' * rest.startswith('+')!r}?)"


def _like(name: str, known: tuple[str, ...] | list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
