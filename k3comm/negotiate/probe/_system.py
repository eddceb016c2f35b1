"""What the operating system and the environment say."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from k3comm.errors import InputError
from k3comm.facts import Imex, Unknown
from k3comm.negotiate.probe._ask import ask

PACKAGES = ("cuda-bindings", "cuda-core", "nvidia-ml-py", "flashinfer-python")
"""Packages whose versions are facts, besides torch and this one; by the names of their distributions."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The names of torch's allocator configuration; the first that is set counts."""


def host_identity(root: Path) -> str | Unknown:
    """Boot id, host name and PID namespace: two containers of one machine differ, two processes of one don't.

    A part that can't be had makes the whole unknown: a text with a hole would be another host to peers who filled it.
    """
    parts = [
        ask(lambda: (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()),
        ask(platform.node),
        ask(lambda: os.readlink(root / "proc/self/ns/pid")),
    ]
    lost = [part for part in parts if isinstance(part, Unknown)]
    return lost[0] if lost else " ".join(map(str, parts))


def free_host_memory() -> int:
    """Bytes that the operating system could give now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def can_share_memory(root: Path) -> bool:
    """Makes anonymous memory and opens it the way a peer would. OSError if that is not allowed, or nothing is free."""
    file = os.memfd_create("k3comm-probe", os.MFD_CLOEXEC)
    try:
        os.close(os.open(root / f"proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC))
    finally:
        os.close(file)
    return True


def imex_channel(root: Path, access: Callable[[Path, int], bool]) -> Imex:
    """What there is of IMEX channels: the driver's major number, a device file, the right to open it."""
    devices = (root / "proc/devices").read_text(encoding="utf-8")
    if re.search(r"^\s*\d+\s+nvidia-caps-imex-channels\s*$", devices, re.MULTILINE) is None:
        return Imex.NO_MAJOR
    channels = sorted((root / "dev/nvidia-caps-imex-channels").glob("channel*"))
    if not channels:
        return Imex.NO_CHANNEL
    return Imex.READY if any(access(path, os.R_OK | os.W_OK) for path in channels) else Imex.NO_PERMISSION


def package_versions() -> dict[str, str]:
    """The version of each of PACKAGES that is installed."""
    found = {name: ask(lambda name=name: metadata.version(name)) for name in PACKAGES}  # type: ignore[misc]
    return {name: version for name, version in found.items() if not isinstance(version, Unknown)}


def visible_devices(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """CUDA_VISIBLE_DEVICES as tokens: numbers, GPU-... and MIG-... UUIDs, also short ones; None where it is not set.

    As CUDA reads it: nothing after a -1 counts, and an empty text hides all devices, as does the NoDevFiles of batch
    systems.

    Raises:
        InputError: a token that is none of these, or twice the same, for which CUDA shows no device at all.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    tokens: list[str] = []
    for token in (part.strip() for part in text.split(",")):
        if token in ("", "-1", "NoDevFiles"):
            break
        if re.fullmatch(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+", token) is None:
            raise InputError(
                f"CUDA_VISIBLE_DEVICES: {token!r} given; accepted are numbers, and UUIDs that start with GPU- or MIG-"
            )
        if token in tokens:
            raise InputError(f"CUDA_VISIBLE_DEVICES: {token!r} given twice; accepted is every device once")
        tokens.append(token)
    return tuple(tokens)


def expandable_segments(environment: Mapping[str, str]) -> bool:
    """Whether torch's allocator makes expandable segments: the last such key of the configuration counts.

    Raises:
        InputError: a value that is neither True nor False.
    """
    name = next((name for name in ALLOCATOR_VARIABLES if name in environment), None)
    if name is None:
        return False
    values = re.findall(r"(?:^|,)\s*expandable_segments\s*:\s*([^,\s]*)", environment[name])
    if not values:
        return False
    if values[-1] not in ("True", "False"):
        raise InputError(f"{name}: expandable_segments:{values[-1]} given; accepted are True and False")
    return bool(values[-1] == "True")
