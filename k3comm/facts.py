"""What a rank is able to do: frozen values that a test can build for any machine. `negotiate/probe.py` fills them."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, IntEnum, unique
from typing import Any

import attrs

from k3comm.errors import InputError
from k3comm.tiers.select import UNLIMITED
from k3comm.tiers.windows import by_key


@attrs.frozen
class Unknown:
    """A fact that can't be had, and why. It is false: an unknown is never a yes.

    `code`: the errno of an OSError, or the CUDA driver's result; 0 without one.
    """

    why: str
    code: int = attrs.field(default=0, eq=False)

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"unknown: {self.why}"


@unique
class FabricState(IntEnum):
    """Where a GPU is on its way into the NVLink fabric; the numbers are NVML's."""

    NOT_SUPPORTED = 0
    NOT_STARTED = 1
    IN_PROGRESS = 2
    COMPLETED = 3


@unique
class PeerAccess(IntEnum):
    """What NVML says of access from one GPU to another; the numbers are NVML's. Only OK is a yes."""

    OK = 0
    CHIPSET_NOT_SUPPORTED = 1
    GPU_NOT_SUPPORTED = 2
    TOPOLOGY_NOT_SUPPORTED = 3
    DISABLED_BY_REGISTRY_KEY = 4
    NOT_SUPPORTED = 5
    UNKNOWN = 6


@unique
class Imex(IntEnum):
    """What was found where the IMEX channels should be: without one no memory can be exported to another host."""

    READY = 0
    NO_MAJOR = 1
    NO_CHANNEL = 2
    NO_PERMISSION = 3

    def __str__(self) -> str:
        return _IMEX_TEXTS[self]


_IMEX_TEXTS = {
    Imex.READY: "an IMEX channel is there",
    Imex.NO_MAJOR: "/proc/devices has no nvidia-caps-imex-channels (load an NVIDIA driver that serves IMEX)",
    Imex.NO_CHANNEL: (
        "no /dev/nvidia-caps-imex-channels/channel* (start nvidia-imex, create a channel with nvidia-modprobe, and "
        "pass it into the container)"
    ),
    Imex.NO_PERMISSION: "this user can't open its IMEX channel for reading and writing (change its mode or owner)",
}


@attrs.frozen(kw_only=True)
class Fabric:
    """A GPU's place in the NVLink fabric.

    Attributes:
        state: how far its registration is.
        status: NVML's result of the registration, valid once it is completed; 0 is success.
        cluster: the cluster's UUID, 32 hexadecimal digits; "" for a fabric that ends at this host (all zeros).
        clique: the clique within the cluster. GPUs reach one another within a clique.
    """

    state: FabricState
    status: int = 0
    cluster: str = ""
    clique: int = 0

    @property
    def ready(self) -> bool:
        """Whether the GPU is in the fabric."""
        return self.state is FabricState.COMPLETED and self.status == 0


def _yes_or_no(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    # An integer or a NaN that passes for a yes on one rank is how votes go wrong.
    if not (value is None or isinstance(value, bool | Unknown)):
        raise InputError(f"{attribute.name}: {value!r} given; accepted are True, False, None and Unknown")


@attrs.frozen(kw_only=True)
class Facts:
    """One rank, as it sees itself. What a CPU has no use for is None there.

    Attributes:
        host: identity of the machine (boot id, host name, PID namespace), or what the settings say.
        device: "cpu" or "cuda".
        device_name: as the driver or the kernel calls it.
        device_uuid: the GPU's UUID, with its prefix GPU- or MIG-; "" on CPU. Never an ordinal: masks renumber them.
        pci_address: domain:bus:device.function; "" on CPU.
        ordinal: the number by which this process knows the GPU. A fact only because torch's symmetric memory takes
            equal numbers on one host for one GPU.
        compute_capability: (major, minor); None on CPU.
        free_memory: bytes on the device.
        host_memory: processes of this host can share anonymous memory (memfd and /proc), found by making some.
        nvlinks: NVLinks that are up.
        peers: access from this GPU to every other one that NVML sees on this host, by UUID: the worse of read and
            write.
        fabric: the place in the NVLink fabric.
        mig: the GPU is split into instances.
        confidential: confidential computing is on.
        multicast, fabric_handles: what the driver's attributes say. They may say yes where IMEX is absent.
        fabric_allocation: the driver's result of a real allocation with a fabric handle; 0 is success. None where
            the attribute says no.
        imex: what was found of the IMEX channels.
        operators: torch's symmetric-memory operators that have a CUDA kernel.
        driver: the NVIDIA driver's version.
        world_size: ranks in the group.
        backend: the process group's backend for the device ("gloo", "nccl"); "" without a group.
        versions: version by package name; "nccl" is the one torch runs. What is not installed is absent.
        environment: the variables of other libraries that must be equal on all ranks, those that are set.
        visible_devices: CUDA_VISIBLE_DEVICES as its tokens; None where it is not set.
        expandable_segments: torch's allocator makes expandable segments.
    """

    host: str | Unknown
    device: str
    device_name: str | Unknown = Unknown("not asked")
    device_uuid: str | Unknown = ""
    pci_address: str | Unknown = ""
    ordinal: int | None = None
    compute_capability: tuple[int, int] | Unknown | None = None
    free_memory: int | Unknown = Unknown("not asked")
    host_memory: bool | Unknown = attrs.field(default=Unknown("not asked"), validator=_yes_or_no)
    nvlinks: int | Unknown | None = None
    peers: Mapping[str, PeerAccess] = attrs.field(factory=dict, converter=by_key, hash=False)
    fabric: Fabric | Unknown | None = None
    mig: bool | Unknown | None = attrs.field(default=None, validator=_yes_or_no)
    confidential: bool | Unknown | None = attrs.field(default=None, validator=_yes_or_no)
    multicast: bool | Unknown | None = attrs.field(default=None, validator=_yes_or_no)
    fabric_handles: bool | Unknown | None = attrs.field(default=None, validator=_yes_or_no)
    fabric_allocation: int | Unknown | None = None
    imex: Imex | Unknown | None = None
    operators: frozenset[str] | Unknown = frozenset()
    driver: str | Unknown = Unknown("not asked")
    world_size: int = 1
    backend: str = ""
    versions: Mapping[str, str] = attrs.field(factory=dict, converter=by_key, hash=False)
    environment: Mapping[str, str] = attrs.field(factory=dict, converter=by_key, hash=False)
    visible_devices: tuple[str, ...] | Unknown | None = None
    expandable_segments: bool | Unknown = attrs.field(default=False, validator=_yes_or_no)

    @property
    def family(self) -> str:
        """The device family that windows are measured for: "host" on CPU, else like "sm90"; "unknown" if unknown."""
        if self.device == "cpu":
            return "host"
        if isinstance(self.compute_capability, tuple):
            return "sm{}{}".format(*self.compute_capability)
        return "unknown"

    @property
    def nccl_capture_race(self) -> str:
        """Why symmetric NCCL collectives are not safe in captured graphs here; "" where they are.

        NCCL 2.28.0 to 2.30.6 may race with programmatic dependent launch there; a version that can't be read counts.
        """
        version = self.versions.get("nccl", "")
        match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\D.*)?", version)
        if match is None:
            return f"NCCL's version is unknown ({version!r})"
        if (2, 28, 0) <= tuple(map(int, match.groups()[:3])) <= (2, 30, 6):
            return f"NCCL {version} races in captured graphs; 2.27 and 2.30.7 don't"
        return ""

    def is_set(self, variable: str) -> bool:
        """Whether a switch of another library is on. What is not a clear no counts as on."""
        return self.environment.get(variable, "").strip().lower() not in OFF


OFF = ("", "0", "n", "no", "off", "false")
"""The words by which a switch in the environment is off."""


@unique
class ErrorClass(Enum):
    """What a driver's error calls for. UNKNOWN is never a yes either."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    NOT_PERMITTED = "not permitted"
    UNKNOWN = "unknown"


# Numbers and names: CUresult in cuda.h (CUDA 13).
_DRIVER_ERRORS: Mapping[int, tuple[str, ErrorClass, str]] = {
    1: (
        "INVALID_VALUE",
        ErrorClass.PERMANENT,
        "what was asked for is invalid here; in a container, device files may lack",
    ),
    2: ("OUT_OF_MEMORY", ErrorClass.TRANSIENT, "no memory, or no slot for the object, is free"),
    3: ("NOT_INITIALIZED", ErrorClass.PERMANENT, "the driver was not initialised"),
    34: ("STUB_LIBRARY", ErrorClass.PERMANENT, "the library found is a stub, not the driver"),
    36: ("CALL_REQUIRES_NEWER_DRIVER", ErrorClass.PERMANENT, "the driver is too old for the call"),
    46: ("DEVICE_UNAVAILABLE", ErrorClass.TRANSIENT, "the device is busy or unavailable"),
    100: ("NO_DEVICE", ErrorClass.PERMANENT, "no device is visible"),
    101: ("INVALID_DEVICE", ErrorClass.PERMANENT, "the device is not visible to this process"),
    304: ("OPERATING_SYSTEM", ErrorClass.UNKNOWN, "a call of the operating system failed"),
    400: ("INVALID_HANDLE", ErrorClass.PERMANENT, "the handle is invalid"),
    401: (
        "ILLEGAL_STATE",
        ErrorClass.PERMANENT,
        "a resource is not in the state needed; is the Fabric Manager running?",
    ),
    800: (
        "NOT_PERMITTED",
        ErrorClass.NOT_PERMITTED,
        "not permitted; is there an IMEX channel that this user may open?",
    ),
    801: ("NOT_SUPPORTED", ErrorClass.PERMANENT, "not supported by this system"),
    802: ("SYSTEM_NOT_READY", ErrorClass.TRANSIENT, "the system is not ready; is the Fabric Manager running?"),
    803: ("SYSTEM_DRIVER_MISMATCH", ErrorClass.PERMANENT, "kernel driver and library have different versions"),
    999: ("UNKNOWN", ErrorClass.UNKNOWN, "the driver gives no cause"),
}


def driver_error(code: int) -> tuple[ErrorClass, str]:
    """The class and the text of a CUDA driver's result other than 0."""
    name, kind, text = _DRIVER_ERRORS.get(code, ("", ErrorClass.UNKNOWN, "an error that is not in this table"))
    return kind, f"CUDA_ERROR_{name} ({code}), {kind.value}: {text}" if name else f"CUDA error {code}, unknown: {text}"


OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""The variable that makes torch's symmetric memory take ranks on one GPU, and skip multicast."""

PEER_VETOES = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
MULTICAST_VETOES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS", OVERLAP)
VETOES = (*PEER_VETOES, *MULTICAST_VETOES)
"""The variables of other libraries by which an operator rules a transport out; the order is VETO's number."""

ASKED = {
    "device_uuid": "the GPU's UUID is",
    "compute_capability": "the compute capability is",
    "mig": "whether the GPU is split (MIG) is",
    "confidential": "whether confidential computing is on is",
    "nvlinks": "how many NVLinks are up is",
    "fabric": "the state of the NVLink fabric is",
    "multicast": "whether the GPU has multicast is",
    "fabric_handles": "whether the GPU has fabric handles is",
    "fabric_allocation": "the result of an allocation with a fabric handle is",
    "imex": "what there is of IMEX channels is",
    "operators": "what torch's symmetric memory has for CUDA is",
    "free_memory": "the free memory is",
}
"""The fields of `Facts` that a verdict asks for, and how their lack reads; the order is UNKNOWN_FACT's number."""

OPERATORS = ("two_shot_all_reduce_", "multimem_all_reduce_")
"""Operators that stand for the peer and the multicast half of torch's symmetric memory, in the reason's order."""


@unique
class Reason(IntEnum):
    """Why a rank says no to a tier. A code travels in the vote with one number, `detail`; the text is made here."""

    NONE = 0
    ABSENT = 1
    DISABLED = 2
    NOT_ENABLED = 3
    ONE_RANK = 4
    UNEQUAL_TOKENS = 5
    HIDDEN_MULTIPLE = 6
    ACROSS_HOSTS = 7
    SELF_CHECK = 8
    HOST_MEMORY = 9
    OUT_OF_MEMORY = 10
    TRANSPORT = 11
    DEVICE = 12
    BFLOAT16 = 13
    LATENT_MULTIPLE = 14
    HOST_UNKNOWN = 15
    ALLOCATION = 16
    UNKNOWN_FACT = 17
    VETO = 18
    NO_GPU = 19
    CAPABILITY = 20
    MIG = 21
    CONFIDENTIAL = 22
    NO_NVLINK = 23
    FABRIC_STATE = 24
    NO_MULTICAST = 25
    OPERATORS = 26
    NO_FABRIC_HANDLES = 27
    IMEX = 28
    FABRIC_ALLOCATION = 29
    NO_CLUSTER = 30
    PAIR_ACCESS = 31
    PAIR_DOMAIN = 32
    PAIR_SHARED = 33
    PAIR_ORDINAL = 34
    ARCHITECTURE = 35

    def text(self, detail: int) -> str:
        """The reason in words."""
        return _TEXTS[self].format(_DETAILS[self](detail) if self in _DETAILS else detail)


_TEXTS = {
    Reason.NONE: "nothing stands in its way",
    Reason.ABSENT: "not part of this version",
    Reason.DISABLED: "disabled in the settings (disabled, K3COMM_DISABLE)",
    Reason.NOT_ENABLED: "off unless asked for (enabled, K3COMM_ENABLE)",
    Reason.ONE_RANK: "one rank has nobody to talk to",
    Reason.UNEQUAL_TOKENS: "it needs equal m on all ranks, and the layout does not promise uniform_tokens",
    Reason.HIDDEN_MULTIPLE: "hidden_size is not a multiple of {}",
    Reason.ACROSS_HOSTS: "it can't cross hosts",
    Reason.SELF_CHECK: "its self-check gave wrong numbers",
    Reason.HOST_MEMORY: "this host's processes can't share memory{}",
    Reason.OUT_OF_MEMORY: "no memory for its block of {} MiB",
    Reason.TRANSPORT: "the settings leave it no transport (transport, K3COMM_TRANSPORT)",
    Reason.DEVICE: "no transport of this version reaches this device",
    Reason.BFLOAT16: "it serves bfloat16 only",
    Reason.LATENT_MULTIPLE: "latent_size is not a multiple of {}",
    Reason.HOST_UNKNOWN: "which host it is on could not be found out{}; host_identity (K3COMM_HOST_IDENTITY) says it",
    Reason.ALLOCATION: "its shared memory could not be allocated{}",
    Reason.UNKNOWN_FACT: "{} unknown",
    Reason.VETO: "{} in the environment rules it out",
    Reason.NO_GPU: "it needs a GPU",
    Reason.CAPABILITY: "the compute capability is below {}",
    Reason.MIG: "the GPU is split into instances (MIG), which can't reach one another",
    Reason.CONFIDENTIAL: "confidential computing is on, and multicast does not work with it",
    Reason.NO_NVLINK: "no NVLink is up",
    Reason.FABRIC_STATE: "{}",
    Reason.NO_MULTICAST: "the GPU has no multicast",
    Reason.OPERATORS: "this build of torch has no {} for CUDA",
    Reason.NO_FABRIC_HANDLES: "it can't cross hosts: the GPU has no fabric handles",
    Reason.IMEX: "it can't cross hosts: {}",
    Reason.FABRIC_ALLOCATION: "it can't cross hosts: memory with a fabric handle is refused: {}",
    Reason.NO_CLUSTER: "it can't cross hosts: the NVLink fabric ends at this one",
    Reason.PAIR_ACCESS: "{}",
    Reason.PAIR_DOMAIN: "it is not in the NVLink domain (cluster and clique) of rank {}",
    Reason.PAIR_SHARED: "it shares its GPU with rank {}, which torch's memory allows with " + OVERLAP + "=1 only",
    Reason.PAIR_ORDINAL: (
        "its GPU has the same number as rank {}'s, and torch's memory takes the two for one; let every process see all "
        "GPUs (CUDA_VISIBLE_DEVICES), or set " + OVERLAP + "=1, which gives up multicast"
    ),
    Reason.ARCHITECTURE: "its kernels are not made for compute capability {}",
}

# What a reason's number means, where it is not a number for people.
_DETAILS: Mapping[Reason, Callable[[int], str]] = {
    Reason.HOST_MEMORY: lambda code: _errno_text(code),
    Reason.HOST_UNKNOWN: lambda code: _errno_text(code),
    Reason.ALLOCATION: lambda code: _errno_text(code),
    Reason.UNKNOWN_FACT: lambda index: _word(tuple(ASKED.values()), index),
    Reason.VETO: lambda index: _word(VETOES, index),
    Reason.CAPABILITY: lambda number: f"{number // 10}.{number % 10}",
    Reason.ARCHITECTURE: lambda number: f"{number // 10}.{number % 10}",
    Reason.FABRIC_STATE: lambda state: _fabric_text(state),
    Reason.OPERATORS: lambda index: _word(OPERATORS, index),
    Reason.IMEX: lambda finding: _IMEX_TEXTS.get(finding, f"IMEX finding {finding}"),  # type: ignore[call-overload]
    Reason.FABRIC_ALLOCATION: lambda code: driver_error(code)[1],
    Reason.PAIR_ACCESS: lambda detail: _access_text(*divmod(detail, PAIR_SHIFT)),
}

PAIR_SHIFT = 16
"""PAIR_ACCESS's number is the peer's rank times this, plus the `PeerAccess`."""


def _word(words: Sequence[str], index: int) -> str:
    return words[index] if index < len(words) else f"number {index}"


def _errno_text(code: int) -> str:
    # Not strerror, whose language is the process's: the text must be the same on every rank.
    known = {errno.EMFILE: ", too many open files in this process", errno.ENFILE: ", too many open files"}
    return f" ({errno.errorcode.get(code, f'errno {code}')}{known.get(code, '')})" if code else ""


def _fabric_text(state: int) -> str:
    if state == FabricState.COMPLETED:
        return "the GPU's registration with the NVLink fabric failed"
    word = FabricState(state).name.lower().replace("_", " ") if state < FabricState.COMPLETED else f"state {state}"
    hint = "" if state == FabricState.NOT_SUPPORTED else "; is the Fabric Manager running?"
    return f"the GPU is not in an NVLink fabric ({word}{hint})"


def _access_text(rank: int, access: int) -> str:
    word = PeerAccess(access).name.lower().replace("_", " ") if access <= PeerAccess.UNKNOWN else f"status {access}"
    return f"no peer access to rank {rank}'s GPU ({word})"


def _whole(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    # A MIN over floats takes a NaN for nothing, and a bool for a row.
    if type(value) is not int or not 0 <= value < 2**32:
        raise InputError(f"{attribute.name}: {value!r} given; accepted are integers from 0 to {2**32 - 1}")


@attrs.frozen
class Verdict:
    """One rank's word on one tier: the rows it can take (0: no) and, for a no, the reason."""

    capacity: int = attrs.field(validator=_whole)
    reason: Reason = Reason.NONE
    detail: int = attrs.field(default=0, validator=_whole)

    @classmethod
    def yes(cls, capacity: int = UNLIMITED) -> Verdict:
        """It can, up to `capacity` rows."""
        return cls(capacity)

    @classmethod
    def no(cls, reason: Reason, detail: int = 0) -> Verdict:
        """It can't, because."""
        return cls(0, reason, detail)

    def __bool__(self) -> bool:
        return self.capacity > 0

    def __str__(self) -> str:
        return f"up to {self.capacity} rows" if self else self.reason.text(self.detail)
