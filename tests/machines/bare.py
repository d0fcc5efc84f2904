"""Devices whose memory is all for tensors."""

from __future__ import annotations

from dataclasses import replace

from merakc.machines.cluster import Device


def bare(device: Device, memory_bytes: int | None = None) -> Device:
    """The device with nothing reserved of its memory, or of so much."""
    have = device.memory_bytes if memory_bytes is None else memory_bytes
    return replace(
        device, memory_bytes=have, context_bytes=0, communicator_bytes=0, fragmentation=0.0
    )
