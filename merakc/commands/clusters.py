"""The machines that a command is asked about."""

from __future__ import annotations

from typing import cast

from merakc.cluster import NOMINAL_CPU, NOMINAL_GPU, Cluster, DtypeName
from merakc.cluster_files import find_cluster, preset_names
from merakc.errors import ConfigError

CLUSTERS = {"cpu": NOMINAL_CPU, "gpu": NOMINAL_GPU}
HELP = f"One of {', '.join(CLUSTERS)}, a preset, PRESET:NODES, or a cluster file."


def machines(name: str, dtype: str, ranks: int) -> Cluster:
    """The machines of that name, for products of a dtype.

    Raises `ClusterError` for a name that is none, and `ConfigError` where they are fewer than the
    ranks.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    hardware = find_cluster(name)
    if len(hardware.devices) < ranks:
        more = f"{name}:{-(-ranks // len(hardware.devices))}" if name in preset_names() else "more"
        raise ConfigError(
            f"cluster {name!r} has {len(hardware.devices)} devices, and the plan {ranks} ranks; "
            f"name {more}, or plan for fewer"
        )
    return hardware.flat(cast(DtypeName, dtype))
