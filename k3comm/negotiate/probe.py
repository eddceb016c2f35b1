"""A rank looks at itself: in process, without touching a peer, and without ever raising."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from k3comm import __version__
from k3comm.facts import Facts, Unknown

T = TypeVar("T")


def probe(device: torch.device, *, world_size: int, backend: str, host_identity: str | None = None) -> Facts:
    """The facts of this rank.

    Args:
        device: where the tensors will live.
        world_size, backend: of the group.
        host_identity: what to call this machine; None detects it.
    """
    on_gpu = device.type == "cuda"
    return Facts(
        host=host_identity or detect_host(),
        device=device.type,
        device_name=_ask(lambda: torch.cuda.get_device_name(device)) if on_gpu else platform.machine(),
        device_uuid=_ask(lambda: str(torch.cuda.get_device_properties(device).uuid)) if on_gpu else "",
        compute_capability=_ask(lambda: torch.cuda.get_device_capability(device)) if on_gpu else None,
        free_memory=_ask((lambda: torch.cuda.mem_get_info(device)[0]) if on_gpu else _host_memory),
        host_memory=_ask(_can_share_memory),
        driver=_ask(_driver_version),
        world_size=world_size,
        backend=backend,
        versions={"k3comm": __version__, "python": platform.python_version(), "torch": str(torch.__version__)},
    )


def detect_host() -> str:
    """Boot id, host name and PID namespace: two containers of one machine differ, two processes of one don't."""
    parts = [
        _ask(lambda: Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()),
        _ask(platform.node),
        _ask(lambda: os.readlink("/proc/self/ns/pid")),
    ]
    return " ".join(map(str, parts))


def _ask(question: Callable[[], T]) -> T | Unknown:
    try:
        return question()
    except Exception as error:  # whatever a driver, a container or a shim raises: an unknown, not an end
        return Unknown(str(error) if isinstance(error, LookupError) else f"{type(error).__name__}: {error}")


def _host_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _can_share_memory() -> bool:
    file = os.memfd_create("k3comm-probe", os.MFD_CLOEXEC)
    try:
        os.close(os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC))
    finally:
        os.close(file)
    return True


def _driver_version() -> str:
    try:  # where there is no driver this fails at once, and the large module is not loaded
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise LookupError(f"no NVIDIA driver here ({error})") from None
    import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
