"""What NVML knows of a GPU: found by its UUID, asked between one initialisation and one shutdown."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from k3comm.facts import Fabric, FabricState, PeerAccess, Unknown
from k3comm.negotiate.probe._ask import ask, yes_or_no

KINDS = (0, 1)
"""NVML_P2P_CAPS_INDEX_READ and _WRITE in nvml.h. Not by name: nvidia-ml-py 13.610 has a tuple for the first."""

QUESTIONS = ("pci_address", "nvlinks", "peers", "fabric", "mig", "confidential")


def load() -> Any:
    """The module pynvml.

    Raises:
        LookupError: there is no driver. Found out at once, before the large module is loaded.
    """
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise LookupError(f"no NVIDIA driver here ({error})") from None
    import pynvml

    return pynvml


def nvml_facts(load: Callable[[], Any], uuid: str | Unknown | None) -> dict[str, Any]:
    """The driver's version and, for the GPU with that UUID, the fields of `Facts` in QUESTIONS; None asks for no GPU.

    A UUID that NVML knows as that of a MIG instance comes back in "device_uuid".
    """
    nvml = ask(lambda: _started(load))
    if isinstance(nvml, Unknown):
        return {"driver": nvml, **({} if uuid is None else dict(_nothing(nvml)))}
    try:
        found: dict[str, Any] = {"driver": ask(lambda: _text(nvml.nvmlSystemGetDriverVersion()))}
        if uuid is not None:
            found |= _device(nvml, uuid)
        return found
    finally:
        with suppress(Exception):  # what was asked is known; NVML ends with the process at the latest
            nvml.nvmlShutdown()


def _started(load: Callable[[], Any]) -> Any:
    nvml = load()
    nvml.nvmlInit()
    return nvml


def _nothing(why: Unknown) -> dict[str, Any]:
    return {name: {} if name == "peers" else why for name in QUESTIONS}


def _device(nvml: Any, uuid: str | Unknown) -> dict[str, Any]:
    if isinstance(uuid, Unknown):
        return _nothing(uuid)
    found: dict[str, Any] = {}
    handle = ask(lambda: nvml.nvmlDeviceGetHandleByUUID(uuid))
    if isinstance(handle, Unknown) and uuid.startswith("GPU-"):
        # CUDA gives an instance's UUID without its prefix.
        instance = "MIG-" + uuid.removeprefix("GPU-")
        of_instance = ask(lambda: nvml.nvmlDeviceGetHandleByUUID(instance))
        if not isinstance(of_instance, Unknown):
            handle, uuid = of_instance, instance
            found["device_uuid"] = instance
    if isinstance(handle, Unknown):
        return _nothing(Unknown(f"NVML does not know {uuid}: {handle.why}"))
    if uuid.startswith("MIG-"):
        parent = ask(lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle))
        handle = handle if isinstance(parent, Unknown) else parent
    return found | {
        "pci_address": ask(lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        "nvlinks": ask(lambda: _nvlinks(nvml, handle)),
        "peers": _peers(nvml, handle, uuid),
        "fabric": ask(lambda: _fabric(nvml, handle)),
        "mig": uuid.startswith("MIG-")
        or ask(lambda: _unless(nvml, lambda: yes_or_no(nvml.nvmlDeviceGetMigMode(handle)[0]), False)),
        "confidential": ask(
            lambda: _unless(nvml, lambda: yes_or_no(nvml.nvmlSystemGetConfComputeState().ccFeature), False)
        ),
    }


def _unless(nvml: Any, question: Callable[[], Any], otherwise: Any) -> Any:
    """The answer; `otherwise` where the GPU has no such thing, which NVML says by an error of its own."""
    try:
        return question()
    except nvml.NVMLError_NotSupported:
        return otherwise


def _nvlinks(nvml: Any, handle: Any) -> int:
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            state = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            break  # past the GPU's last link
        active += state == nvml.NVML_FEATURE_ENABLED
    return active


def _peers(nvml: Any, handle: Any, uuid: str) -> dict[str, PeerAccess]:
    """The worse of read and write access by the peer's UUID. A GPU that can't be asked is UNKNOWN, or absent."""
    count = ask(nvml.nvmlDeviceGetCount)
    found = {}
    for index in range(count if isinstance(count, int) else 0):
        peer = ask(lambda index=index: nvml.nvmlDeviceGetHandleByIndex(index))  # type: ignore[misc]
        name = ask(lambda peer=peer: _text(nvml.nvmlDeviceGetUUID(peer)))  # type: ignore[misc]
        if isinstance(peer, Unknown) or isinstance(name, Unknown) or name == uuid:
            continue
        states = [ask(lambda peer=peer, kind=kind: nvml.nvmlDeviceGetP2PStatus(handle, peer, kind)) for kind in KINDS]  # type: ignore[misc]
        found[name] = max(_access(state) for state in states)
    return found


def _access(state: Any) -> PeerAccess:
    known = type(state) is int and state in list(PeerAccess)
    return PeerAccess(state) if known else PeerAccess.UNKNOWN


def _fabric(nvml: Any, handle: Any) -> Fabric:
    try:
        info = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except nvml.NVMLError_NotSupported:
        return Fabric(state=FabricState.NOT_SUPPORTED)
    cluster = bytes(info.clusterUuid)
    return Fabric(
        state=FabricState(info.state),
        status=int(info.status),
        cluster=cluster.hex() if any(cluster) else "",
        clique=int(info.cliqueId),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
