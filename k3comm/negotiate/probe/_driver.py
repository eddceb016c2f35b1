"""What the CUDA driver says of a GPU, and what it does when it is taken at its word."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from k3comm.facts import Unknown
from k3comm.negotiate.probe._ask import DriverError, ask, yes_or_no


def load() -> Any:
    """The module cuda.bindings.driver.

    Raises:
        LookupError: there is no driver. Found out before the module is loaded.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LookupError(f"no CUDA driver here ({error})") from None
    from cuda.bindings import driver

    return driver


def driver_facts(load: Callable[[], Any], ordinal: int, uuid: str | Unknown) -> dict[str, Any]:
    """`multicast`, `fabric_handles` and `fabric_allocation` of `Facts`.

    Args:
        ordinal: the process's number of the device. That it is the right one is checked.
        uuid: the device's.
    """
    names = ("multicast", "fabric_handles", "fabric_allocation")
    driver = ask(load)
    if isinstance(driver, Unknown):
        return dict.fromkeys(names, driver)
    device = ask(lambda: _device(driver, ordinal, uuid))
    if isinstance(device, Unknown):
        return dict.fromkeys(names, device)
    attributes = driver.CUdevice_attribute

    def attribute(name: str) -> bool | Unknown:
        kind = ask(lambda: getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"))
        if isinstance(kind, Unknown):
            return kind
        return ask(lambda: yes_or_no(_call(driver, "cuDeviceGetAttribute", kind, device)))

    handles = attribute("HANDLE_TYPE_FABRIC_SUPPORTED")
    return {
        "multicast": attribute("MULTICAST_SUPPORTED"),
        "fabric_handles": handles,
        "fabric_allocation": ask(lambda: _allocation(driver, device)) if handles else None,
    }


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """The value that a call of the driver gives. DriverError otherwise."""
    code, *values = getattr(driver, name)(*arguments)
    if int(code):
        raise DriverError(name, int(code))
    return values[0] if values else None


def _device(driver: Any, ordinal: int, uuid: str | Unknown) -> Any:
    _call(driver, "cuInit", 0)
    device = _call(driver, "cuDeviceGet", ordinal)
    found = bytes(_call(driver, "cuDeviceGetUuid", device).bytes).hex()
    if not isinstance(uuid, str) or found != uuid.partition("-")[2].replace("-", "").lower():
        raise LookupError(f"the driver's device {ordinal} has the UUID {found}, and not {uuid}")
    return device


def _allocation(driver: Any, device: Any) -> int:
    """Takes the smallest memory that has a fabric handle, and frees it: the driver's result, 0 if that worked.

    The attribute says what the hardware can do; whether this process may depends on IMEX.
    """
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = int(device)
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    try:
        nbytes = _call(driver, "cuMemGetAllocationGranularity", properties, minimum)
        handle = _call(driver, "cuMemCreate", nbytes, properties, 0)
    except DriverError as error:
        return error.code
    _call(driver, "cuMemRelease", handle)
    return 0
