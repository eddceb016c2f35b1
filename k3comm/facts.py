"""What a rank is able to do: frozen values that a test can build for any machine. `negotiate/probe.py` fills them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, unique

import attrs

from k3comm.tiers.select import UNLIMITED
from k3comm.tiers.windows import by_key


@attrs.frozen
class Unknown:
    """A fact that can't be had, and why. It is false: an unknown is never a yes."""

    why: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"unknown: {self.why}"


@attrs.frozen(kw_only=True)
class Facts:
    """One rank, as it sees itself.

    Attributes:
        host: identity of the machine (boot id, host name, PID namespace), or what the settings say.
        device: "cpu" or "cuda".
        device_name: as the driver or the kernel calls it.
        device_uuid: the GPU's UUID; "" on CPU. Never an ordinal: masks renumber them.
        compute_capability: (major, minor); None on CPU.
        free_memory: bytes on the device.
        host_memory: processes of this host can share anonymous memory (memfd and /proc), found by making some.
        driver: the NVIDIA driver's version.
        world_size: ranks in the group.
        backend: the process group's backend for the device ("gloo", "nccl"); "" without a group.
        versions: version by package name.
    """

    host: str
    device: str
    device_name: str | Unknown = Unknown("not asked")
    device_uuid: str | Unknown = ""
    compute_capability: tuple[int, int] | Unknown | None = None
    free_memory: int | Unknown = Unknown("not asked")
    host_memory: bool | Unknown = Unknown("not asked")
    driver: str | Unknown = Unknown("not asked")
    world_size: int = 1
    backend: str = ""
    versions: Mapping[str, str] = attrs.field(factory=dict, converter=by_key, hash=False)

    @property
    def family(self) -> str:
        """The device family that windows are measured for: "host" on CPU, else like "sm90"; "unknown" if unknown."""
        if self.device == "cpu":
            return "host"
        if isinstance(self.compute_capability, tuple):
            return "sm{}{}".format(*self.compute_capability)
        return "unknown"


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

    def text(self, detail: int) -> str:
        """The reason in words."""
        return _TEXTS[self].format(detail)


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
    Reason.HOST_MEMORY: "this host's processes can't share memory",
    Reason.OUT_OF_MEMORY: "no memory for its block of {} MiB",
    Reason.TRANSPORT: "the settings leave it no transport (transport, K3COMM_TRANSPORT)",
    Reason.DEVICE: "no transport of this version reaches this device",
    Reason.BFLOAT16: "it serves bfloat16 only",
    Reason.LATENT_MULTIPLE: "latent_size is not a multiple of {}",
}


@attrs.frozen
class Verdict:
    """One rank's word on one tier: the rows it can take (0: no) and, for a no, the reason."""

    capacity: int
    reason: Reason = Reason.NONE
    detail: int = 0

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
