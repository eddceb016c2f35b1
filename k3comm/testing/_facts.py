"""Ranks of any machine: `Facts` as a probe on it would give them."""

from __future__ import annotations

from typing import Any

import attrs

from k3comm.facts import Facts, Unknown

GIB = 1 << 30


def laptop_facts(**changes: Any) -> Facts:
    """A CPU with gloo and no NVIDIA driver; `changes` are fields of `Facts`."""
    facts = Facts(
        host="laptop",
        device="cpu",
        device_name="x86_64",
        free_memory=8 * GIB,
        host_memory=True,
        driver=Unknown("NVMLError_LibraryNotFound: NVML Shared Library Not Found"),
        world_size=4,
        backend="gloo",
        versions={"torch": "2.13.0+cpu"},
    )
    return attrs.evolve(facts, **changes)


def h200_facts(**changes: Any) -> Facts:
    """One H200 (compute capability 9.0, 141 GB) with NCCL; `changes` are fields of `Facts`."""
    facts = Facts(
        host="gpu-host",
        device="cuda",
        device_name="NVIDIA H200",
        device_uuid="",
        compute_capability=(9, 0),
        free_memory=139 * GIB,
        host_memory=True,
        driver="580.159.04",
        world_size=8,
        backend="nccl",
        versions={"torch": "2.11.0+cu130"},
    )
    return attrs.evolve(facts, **changes)
