"""A rank looks at itself: in process, without touching a peer, and without ever raising.

Every question goes through `ask`: an answer or an Unknown. NVML and the CUDA driver are loaded only where their
libraries are, so on a machine without a driver this takes about a millisecond the first time, and less afterwards.
Nothing here makes a multicast object: they are few on a machine, and whether one can be had shows when it is needed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from k3comm import __version__, settings
from k3comm.facts import OPERATORS, Facts, Unknown
from k3comm.negotiate.probe import _driver, _nvml, _system
from k3comm.negotiate.probe._ask import ask

__all__ = ["Sources", "detect_host", "probe"]


@attrs.frozen(kw_only=True)
class Sources:
    """Whom a probe asks; tests bring others.

    Attributes:
        nvml, driver: load pynvml and cuda.bindings.driver, or raise.
        cuda: stands for torch.cuda.
        root: where /proc and /dev are.
        access: stands for os.access.
        environment: the environment's variables that matter.
    """

    nvml: Callable[[], Any] = _nvml.load
    driver: Callable[[], Any] = _driver.load
    cuda: Any = torch.cuda
    root: Path = Path("/")
    access: Callable[[Path, int], bool] = os.access
    environment: Callable[[], Mapping[str, str]] = settings.environment


def probe(
    device: torch.device,
    *,
    world_size: int,
    backend: str,
    host_identity: str | None = None,
    sources: Sources | None = None,
) -> Facts:
    """The facts of this rank.

    Args:
        device: where the tensors will live.
        world_size, backend: of the group.
        host_identity: what to call this machine; None detects it.
        sources: whom to ask; this machine by default.
    """
    sources = sources or Sources()
    environment = ask(sources.environment)
    environment = {} if isinstance(environment, Unknown) else environment
    versions = {"k3comm": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    packages = ask(_system.package_versions)
    facts: dict[str, Any] = {
        "host": host_identity or _system.host_identity(sources.root),
        "device": device.type,
        "host_memory": ask(lambda: _system.can_share_memory(sources.root)),
        "world_size": world_size,
        "backend": backend,
        "versions": versions | ({} if isinstance(packages, Unknown) else packages),
        "environment": {name: environment[name] for name in settings.UNIFORM_VARIABLES if name in environment},
        "visible_devices": ask(lambda: _system.visible_devices(environment)),
        "expandable_segments": ask(lambda: _system.expandable_segments(environment)),
    }
    if device.type != "cuda":
        here: dict[str, Any] = {"device_name": platform.machine(), "free_memory": ask(_system.free_host_memory)}
        return Facts(**facts, **here, **_nvml.nvml_facts(sources.nvml, None))
    return Facts(**facts | _gpu_facts(device, sources, facts["versions"]))


def detect_host() -> str | Unknown:
    """What this machine is called where the settings don't say."""
    return _system.host_identity(Path("/"))


def _gpu_facts(device: torch.device, sources: Sources, versions: Mapping[str, str]) -> dict[str, Any]:
    cuda = sources.cuda
    # In this order: torch makes its context first, which the driver's calls then find.
    ordinal = ask(lambda: int(cuda.current_device() if device.index is None else device.index))
    free = ask(lambda: int(cuda.mem_get_info(device)[0]))
    uuid = ask(lambda: _prefixed(str(cuda.get_device_properties(device).uuid)))
    nccl = ask(lambda: ".".join(map(str, cuda.nccl.version())))
    facts: dict[str, Any] = {
        "device_name": ask(lambda: str(cuda.get_device_name(device))),
        "device_uuid": uuid,
        "ordinal": None if isinstance(ordinal, Unknown) else ordinal,
        "compute_capability": ask(lambda: _pair(cuda.get_device_capability(device))),
        "free_memory": free,
        "imex": ask(lambda: _system.imex_channel(sources.root, sources.access)),
        "operators": ask(_operators),
        "versions": {**versions, **({} if isinstance(nccl, Unknown) else {"nccl": nccl})},
        **_driver.driver_facts(sources.driver, 0 if isinstance(ordinal, Unknown) else ordinal, uuid),
    }
    return facts | _nvml.nvml_facts(sources.nvml, uuid)


def _operators() -> frozenset[str]:
    """Those of OPERATORS that this build of torch has for CUDA."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(name for name in OPERATORS if has_kernel(f"symm_mem::{name}", "CUDA"))


def _prefixed(uuid: str) -> str:
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _pair(capability: tuple[int, int]) -> tuple[int, int]:
    major, minor = capability
    return int(major), int(minor)
