"""Cluster files and presets: what they say, and what is said of those that are wrong."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from merakc.errors import ClusterError
from merakc.machines.cluster import NOMINAL_CPU, Factors
from merakc.machines.cluster_files import (
    PRESETS,
    cluster_text,
    find_cluster,
    hardware_for,
    load_cluster,
    parse_cluster,
    preset,
    preset_names,
)

TEXT = """
name = "two kinds"
link_share = 0.5

[devices.old]
peak_flops_per_s = { float32 = 1e13 }
bytes_per_s = 1e12
memory_bytes = 1e10

[[nodes]]
device = "old"
devices = 4
count = 3

[nodes.host]
memory_bytes = 64_000_000_000
bytes_per_s = 2e10
down_bytes_per_s = 1.2e10
up_bytes_per_s = 1.3e10
shared_by = 4

[[nodes]]
device = "h100"
devices = 8

[[links]]
name = "inside"
devices = 8
bytes_per_s = 1e11

[[links]]
name = "outside"
devices = 64
bytes_per_s = 1e10
shared_by = 8
latency_s = 1e-5
"""


def test_a_file_of_two_kinds_of_nodes() -> None:
    hardware = parse_cluster(TEXT)
    assert [n.device.name for n in hardware.nodes] == ["old", "h100"]
    assert len(hardware.devices) == 3 * 4 + 8
    assert hardware.nodes[0].device.memory_bytes == 10**10
    assert hardware.nodes[1].device == preset("h100").nodes[0].device
    assert hardware.level(9).bytes_per_s == 1e10


def test_a_host_is_shared_by_those_that_use_it() -> None:
    hardware = parse_cluster(TEXT)
    assert hardware.host is None  # of the other nodes nothing is known
    first = replace(hardware, nodes=hardware.nodes[:1])
    assert parse_cluster(cluster_text(first)) == first
    host = first.flat().host
    assert host is not None
    assert (host.down.seconds(3e9), host.up.seconds(0)) == (1.0, 0.0)
    assert first.flat().described(12).host == host
    one, all_at_once = (hardware_for("a100-80", n).flat().host for n in (1, 8))
    assert one is not None
    assert all_at_once is not None
    assert one.down_bytes_per_s == 2 * all_at_once.down_bytes_per_s
    assert NOMINAL_CPU.described(2).host == NOMINAL_CPU.host == preset("cpu").flat().host


def test_presets() -> None:
    assert preset_names() == (
        "a100-40", "a100-80", "b200", "cpu", "gh200", "h100", "h200", "rtx-3090", "rtx-4090",
        "v100",
    )  # fmt: skip


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_states_its_sources(name: str) -> None:
    hardware = preset(name, 3)
    assert len(hardware.devices) == (3 if name == "gh200" else 24)
    assert all(n.device.source and (not n.host or n.host.source) for n in hardware.nodes)
    assert all(link.source for link in hardware.links)
    for line in (PRESETS / f"{name}.toml").read_text().splitlines():
        key = line.partition(" = ")[0]
        if key.endswith(("_bytes", "_per_s", "_w", "_share", "_s", "units")):
            told = "#" in line or key == "peak_flops_per_s"  # whose source stands above it
            assert told or name == "cpu", f"{line}: where is this from?"


def test_gpus_on_nvlink_from_the_a100_on_read_each_others_memory() -> None:
    symmetric = {n for n in preset_names() if preset(n).level(8).symmetric_memory}
    assert symmetric == {"a100-40", "a100-80", "b200", "h100", "h200"}
    assert not any(preset(name).level(9).symmetric_memory for name in preset_names())
    assert cluster_text(preset("h100")).count("symmetric_memory = true") == 1
    assert "symmetric_memory" not in cluster_text(preset("cpu"))


def test_the_nominal_cpu_is_the_same_in_both_forms() -> None:
    flat = preset("cpu").flat("float32")
    for field in ("flops_per_s", "bytes_per_s", "op_overhead_s", "memory_bytes",
                  "link_latency_s", "link_bytes_per_s"):  # fmt: skip
        assert getattr(flat, field) == getattr(NOMINAL_CPU, field), field


def test_a_cluster_is_found_by_name_or_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    assert find_cluster(str(path)) == load_cluster(path) == parse_cluster(TEXT)
    assert find_cluster("h100:4") == preset("h100", 4)
    assert find_cluster("h100") == preset("h100")
    with pytest.raises(ClusterError, match=r"no-such\.toml: cannot be read as a cluster file"):
        find_cluster("no-such.toml")
    with pytest.raises(ClusterError, match="did you mean 'h100'"):
        preset("h10")
    with pytest.raises(ClusterError, match="h100:x: 'x' is no number of nodes; give h100:NODES"):
        find_cluster("h100:x")
    with pytest.raises(ClusterError, match="nodes is 0; a cluster has at least 1"):
        preset("h100", 0)


WRONG = {
    "unknown key": ("link_share", "link_shares",
                    r"link_shares: unknown key \(did you mean 'link_share'\?\); known are name, "),
    "unknown key of a device": ("bytes_per_s = 1e12", "bytes_per_sec = 1e12",
                                r"bytes_per_sec: unknown key \(did you mean 'bytes_per_s'\?\).*"
                                r"1 more thing is wrong"),
    "GB/s": ("1e11", "100", r"links.0.bytes_per_s: 100 must be greater than or equal to 100000"),
    "microseconds": ("1e-5", "10", "links.1.latency_s: 10 must be less than or equal to 1; mend"),
    "negative latency": ("1e-5", "-1", "links.1.latency_s: -1 must be greater than or equal to 0"),
    "not a number": ("1e11", "nan", "links.0.bytes_per_s: nan must be a finite number"),
    "a share above 1": ("0.5", "1.5", "link_share: 1.5 must be less than or equal to 1"),
    "no memory": ("memory_bytes = 1e10", "", "memory_bytes: is missing; add memory_bytes = "),
    "a text": ("1e13", '"fast"', "float32: 'fast': .* valid number"),
    "unknown dtype": ("float32 = 1e13", "float31 = 1e13", "float31.*: 'float31': .*'float32'"),
    "unknown device": ('device = "old"', 'device = "odl"',
                       r"nodes.0.device: 'odl' is no device .*did you mean 'old'\?"),
    "no device": ('device = "old"', "", "nodes.0.device: None is no device of the file"),
    "levels in disorder": ("devices = 64", "devices = 8",
                           "links.1.devices: 8, but the level inside it joins 8; order"),
    "too small": ("devices = 64", "devices = 16",
                  "links.1.devices: the outermost level joins 16 devices, and there are 20"),
    "shared by more than there are": ("shared_by = 8", "shared_by = 65",
                                      "links.1.shared_by: 65 devices share a link that joins 64"),
    "a truth value": ("1e11", "true", "links.0.bytes_per_s: true is no number; give one, in"),
    "no rates": ("{ float32 = 1e13 }", "{ }", "peak_flops_per_s: names no dtype; give rates"),
    "more than anyone has": ("count = 3", "count = 99_999_999_999",
                             "[0-9]{12} devices in all, more than 1048576; "),
    "a host of too many": ("shared_by = 4", "shared_by = 5",
                           "nodes.0.host.shared_by: 5 devices share a link of a node of 4"),
    "an unknown key of a host": ("up_bytes_per_s", "up_bytes", r"up_bytes: unknown key .*'up_byt"),
    "no TOML": ("[[links]]", "[[links", "no TOML: .*line"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_its_place_and_a_remedy(case: str) -> None:
    old, new, message = WRONG[case]
    assert old in TEXT
    with pytest.raises(ClusterError, match=f"mine.toml: .*{message}"):
        parse_cluster(TEXT.replace(old, new, 1), "mine.toml")


PROFILE = """
[devices.old.profile]
products = { float32 = [[1e6, 1e9], [1e9, 2e9]] }
traffic = [[1e3, 1e9], [1e6, 1e10]]

[factors]
forward = 1.25
source = "runs"
"""
WRONG_PROFILES = {
    "sizes in disorder": ("[1e9, 2e9]", "[1e5, 2e9]",
                          "devices.old.profile.products.float32: 100000 stands behind 1e.06"),
    "no rate": ("[1e9, 2e9]", "[1e9, 0]", "float32.1.1: 0 must be greater than 0"),
    "an unknown curve": ("traffic =", "trafic =", r"trafic: unknown key \(did you mean 'traffic'"),
    "an unknown factor": ("forward", "forwards", r"forwards: unknown key \(did you mean 'forward'"),
    "a factor of nothing": ("1.25", "0", "factors.forward: 0 must be greater than 0"),
}  # fmt: skip


def test_what_was_measured_is_read_and_written() -> None:
    hardware = parse_cluster(TEXT + PROFILE)
    profile = hardware.nodes[0].device.profile
    assert profile is not None
    assert profile.products["float32"] == ((1e6, 1e9), (1e9, 2e9))
    assert hardware.factors == Factors(1.25, source="runs")
    nodes = tuple(replace(n, together=(1.0, 0.5)) for n in hardware.nodes)
    shared = replace(hardware, nodes=nodes, step_error=0.05)
    assert parse_cluster(cluster_text(shared)) == shared


@pytest.mark.parametrize("case", WRONG_PROFILES)
def test_what_is_wrong_with_a_profile_is_said(case: str) -> None:
    old, new, message = WRONG_PROFILES[case]
    assert old in PROFILE
    with pytest.raises(ClusterError, match=message):
        parse_cluster(TEXT + PROFILE.replace(old, new, 1), "mine.toml")


@pytest.mark.parametrize("name", preset_names())
def test_a_cluster_is_the_same_after_it_was_written(name: str) -> None:
    assert parse_cluster(cluster_text(preset(name, 2))) == preset(name, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nodes: none are given"),
        ("nodes = 3", "nodes: none are given"),
        ('name = "x"\nnodes = [3]\nlinks = [4]', "nodes.0"),
        (TEXT.partition("[[links]]")[0], "links: none are given"),
        ("devices = 3", "devices: must be tables"),
        (TEXT.replace('name = "two kinds"', "name = 3"), "name: 3: .* valid string"),
    ],
)
def test_files_that_are_not_of_this_kind(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse_cluster(text)


def test_no_mutated_file_gives_a_traceback() -> None:
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        text = list(TEXT)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(text))
            text[place : place + rng.randint(0, 3)] = rng.choice('0-".[]=\n{}a')
        try:
            parse_cluster("".join(text))
        except ClusterError:
            refused += 1
    assert refused > 100


def test_products_of_32_bits_are_rounded_where_that_is_asked_for(tmp_path: Path) -> None:
    """torch computes them in full unless it is told otherwise: an A100 an eighth as fast."""
    plain, rounded = (find_cluster(name).slowest for name in ("a100-80:2", "a100-80:2+tf32"))
    assert plain.flops_per_s("float32") == pytest.approx(19.5e12 * plain.product_share)
    assert rounded.flops_per_s("float32") == pytest.approx(156e12 * plain.product_share)
    assert rounded.flops_per_s("bfloat16") == plain.flops_per_s("bfloat16")
    assert len(hardware_for("a100-80+tf32", 16).devices) == 16
    assert hardware_for("a100-80+tf32", 16).slowest == rounded
    with pytest.raises(ClusterError, match=r"v100\+tf32: no rate of TF32 is known of v100"):
        find_cluster("v100+tf32")
    written = tmp_path / "mine+tf32"
    written.write_text(cluster_text(find_cluster("a100-80")))
    assert find_cluster(str(written)).slowest == plain


def test_as_many_devices_as_ranks() -> None:
    assert len(hardware_for("h100").devices) == 8
    assert len(hardware_for("h100", 64).devices) == 64
    assert len(hardware_for("h100", 2).devices) == 2
    assert len(hardware_for("h100:4", 16).devices) == 16


def test_devices_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(TEXT)
    assert len(hardware_for(str(path)).devices) == 20
    assert [n.count for n in hardware_for(str(path), 8).nodes] == [2]
    with pytest.raises(ClusterError, match="21 ranks are asked for and it has 20 devices"):
        hardware_for(str(path), 21)
    with pytest.raises(ClusterError, match="there would be 4 ranks on a node of 8 devices"):
        hardware_for(str(path), 16)


def test_a_device_that_no_node_has_is_not_passed_over() -> None:
    text = (
        cluster_text(preset("h100")) + "\n[devices.h200]\npeak_flops_per_s = { float32 = 1e12 }\n"
    )
    with pytest.raises(ClusterError, match=r"devices.h200: no node has it .*name it in \[\[nodes"):
        parse_cluster(text)
