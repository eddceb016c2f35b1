"""Ranks of any machine: `Facts` as a probe on it would give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from k3comm.facts import OPERATORS, Fabric, FabricState, Facts, Imex, PeerAccess, Unknown

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
    """One H200 (compute capability 9.0, 141 GB) with NCCL; `changes` are fields of `Facts`.

    It stands in a host of NVSwitches without IMEX: multicast within the host, nothing past it. It knows no peers.
    """
    facts = Facts(
        host="gpu-host",
        device="cuda",
        device_name="NVIDIA H200",
        device_uuid="",
        pci_address="00000000:19:00.0",
        ordinal=0,
        compute_capability=(9, 0),
        free_memory=139 * GIB,
        host_memory=True,
        nvlinks=18,
        fabric=Fabric(state=FabricState.COMPLETED),
        mig=False,
        confidential=False,
        multicast=True,
        fabric_handles=True,
        fabric_allocation=800,
        imex=Imex.NO_CHANNEL,
        operators=frozenset(OPERATORS),
        driver="580.159.04",
        world_size=8,
        backend="nccl",
        versions={"torch": "2.11.0+cu130", "nccl": "2.28.9"},
    )
    return attrs.evolve(facts, **changes)


def _h200s(hosts: int, each: int, **changes: Any) -> tuple[Facts, ...]:
    """`hosts` hosts of `each` H200s; every GPU reaches every other one of its host."""
    ranks = []
    for host in range(hosts):
        uuids = [f"GPU-{host:08x}-{gpu:04x}" for gpu in range(each)]
        for gpu, uuid in enumerate(uuids):
            facts = h200_facts(
                host=f"gpu-host-{host}",
                device_uuid=uuid,
                pci_address=f"00000000:{0x19 + gpu:02x}:00.0",
                ordinal=gpu,
                peers={other: PeerAccess.OK for other in uuids if other != uuid},
                world_size=hosts * each,
            )
            ranks.append(attrs.evolve(facts, **changes))
    return tuple(ranks)


def _one_changed(ranks: tuple[Facts, ...], rank: int, **changes: Any) -> tuple[Facts, ...]:
    return tuple(attrs.evolve(facts, **changes) if at == rank else facts for at, facts in enumerate(ranks))


_CROSSING: Mapping[str, Any] = {
    "fabric": Fabric(state=FabricState.COMPLETED, cluster="c1" * 16, clique=7),
    "imex": Imex.READY,
    "fabric_allocation": 0,
}
"""What lets memory cross hosts: a fabric past the host, and IMEX."""

_MACHINES: Mapping[str, Callable[[], tuple[Facts, ...]]] = {
    "laptop": lambda: (laptop_facts(),) * 4,
    "laptop_out_of_files": lambda: _one_changed(
        (laptop_facts(),) * 4, 2, host=Unknown("OSError: [Errno 24] Too many open files", 24)
    ),
    "laptop_short_of_memory": lambda: _one_changed((laptop_facts(),) * 4, 1, free_memory=1 << 20),
    "one_h200": lambda: _h200s(1, 1),
    "h200x8": lambda: _h200s(1, 8),
    "h200x8_no_multicast": lambda: _h200s(1, 8, multicast=False),
    "h200x8_vetoed": lambda: _h200s(1, 8, environment={"NCCL_NVLS_ENABLE": "0"}),
    "h200x8_one_pair_apart": lambda: _one_changed(
        _h200s(1, 8),
        3,
        peers={f"GPU-00000000-{gpu:04x}": PeerAccess(gpu == 5) for gpu in range(8) if gpu != 3},
    ),
    "h200x8_short_of_memory": lambda: _one_changed(_h200s(1, 8), 5, free_memory=1 << 20),
    "two_hosts_fabric": lambda: _h200s(2, 4, **_CROSSING),
    "two_hosts_two_cliques": lambda: (
        *_h200s(2, 4, **_CROSSING)[:4],
        *_h200s(2, 4, **{**_CROSSING, "fabric": Fabric(state=FabricState.COMPLETED, cluster="c1" * 16, clique=8)})[4:],
    ),
    "two_hosts_no_imex": lambda: _h200s(2, 4, **{**_CROSSING, "imex": Imex.NO_CHANNEL, "fabric_allocation": 800}),
    "two_hosts_no_fabric": lambda: _h200s(2, 4),
    "mig": lambda: tuple(
        attrs.evolve(facts, device_uuid=f"MIG-{rank}", mig=True, peers={}, nvlinks=0)
        for rank, facts in enumerate(_h200s(1, 2))
    ),
    "confidential": lambda: _h200s(1, 8, confidential=True),
    "pcie": lambda: _h200s(1, 4, nvlinks=0, multicast=False, fabric=Fabric(state=FabricState.NOT_SUPPORTED)),
    "masked": lambda: tuple(
        attrs.evolve(facts, ordinal=0, visible_devices=(str(rank),)) for rank, facts in enumerate(_h200s(1, 4))
    ),
    "no_nvml": lambda: _h200s(
        1, 2, **dict.fromkeys(("nvlinks", "fabric", "mig", "confidential"), Unknown("no NVML here")), peers={}
    ),
}

MACHINES = tuple(_MACHINES)
"""The names that `machine_facts` takes."""


def machine_facts(name: str) -> tuple[Facts, ...]:
    """The facts of every rank of a machine, or of several, in rank order.

    Args:
        name: of MACHINES. Laptops have 4 ranks; `one_h200` has 1; `h200x8...` are 8 H200s behind NVSwitches, where a
            suffix says what is amiss; `two_hosts_...` are 2 x 4 of them; `mig` is 2 instances; `confidential` has
            confidential computing on; `pcie` is 4 GPUs without NVLink; on `masked` every process sees one GPU only;
            on `no_nvml` NVML can't be asked.

    Raises:
        KeyError: no such name.
    """
    return _MACHINES[name]()
