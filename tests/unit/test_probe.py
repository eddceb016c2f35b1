"""A rank looks at itself: with NVML, driver, torch and files that say whatever a machine may say."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from k3comm import settings
from k3comm.errors import InputError
from k3comm.facts import ASKED, Fabric, FabricState, Facts, Imex, PeerAccess, Unknown
from k3comm.negotiate.probe import Sources, probe
from k3comm.negotiate.probe._ask import ask, yes_or_no
from k3comm.negotiate.probe._system import expandable_segments, host_identity, imex_channel, visible_devices

HEX = "64c2480496cc0f2b1ad6759bb71b8bc3"
UUID = f"GPU-{HEX[:8]}-{HEX[8:12]}-{HEX[12:16]}-{HEX[16:20]}-{HEX[20:]}"
OTHER = "GPU-70261904-d7a4-ab12-a409-1f2531a1bb3a"


class NotSupported(Exception):
    pass


class InvalidArgument(Exception):
    pass


class Nvml:
    """Two GPUs behind a switch, as NVML told it of two H200s. A change replaces a function."""

    NVMLError_NotSupported, NVMLError_InvalidArgument = NotSupported, InvalidArgument
    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 36, 1
    NVML_P2P_CAPS_INDEX_READ = (0,)  # as in nvidia-ml-py 13.610

    def __init__(self, **changes: Any) -> None:
        self.calls: list[str] = []
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return getattr(self, f"_{name}")
        self.calls.append(name)
        return self._changes.get(name) or getattr(self, f"_{name}")

    def _nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        pass

    def _nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def _nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.159.04"

    def _nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return [OTHER, UUID][index]

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in (UUID, OTHER):
            raise RuntimeError("Not Found")
        return uuid

    def _nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def _nvmlDeviceGetPciInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(busId="00000000:00:07.0")

    def _nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:  # noqa: N802
        if link >= 18:
            raise InvalidArgument
        return 1

    def _nvmlDeviceGetP2PStatus(self, handle: str, peer: str, kind: int) -> int:  # noqa: N802
        assert handle == UUID
        assert kind in (0, 1)
        return 0

    def _nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        return [0, 0]

    def _nvmlSystemGetConfComputeState(self) -> Any:  # noqa: N802
        return SimpleNamespace(ccFeature=0)

    def _c_nvmlGpuFabricInfoV_t(self) -> Any:  # noqa: N802
        from pynvml import c_nvmlGpuFabricInfoV_t

        return c_nvmlGpuFabricInfoV_t()

    def _nvmlDeviceGetGpuFabricInfoV(self, handle: str, info: Any) -> None:  # noqa: N802
        info._obj.state, info._obj.status, info._obj.cliqueId = 3, 0, 7


def driver(attributes: int = 1, allocation: int = 0, uuid: str = HEX, init: int = 0) -> Any:
    """The CUDA driver: every attribute has one value, an allocation gives one result."""
    named = SimpleNamespace
    calls: list[str] = []

    def called(name: str, *result: Any) -> Callable[..., tuple[Any, ...]]:
        return lambda *arguments: (calls.append(name), result)[1]

    return named(
        calls=calls,
        cuInit=called("cuInit", init),
        cuDeviceGet=lambda ordinal: (0, ordinal),
        cuDeviceGetUuid=lambda device: (0, named(bytes=bytes.fromhex(uuid))),
        cuDeviceGetAttribute=called("cuDeviceGetAttribute", 0, attributes),
        CUdevice_attribute=named(
            CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED=132, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED=128
        ),
        CUmemAllocationProp=lambda: named(location=named()),
        CUmemAllocationType=named(CU_MEM_ALLOCATION_TYPE_PINNED=1),
        CUmemLocationType=named(CU_MEM_LOCATION_TYPE_DEVICE=1),
        CUmemAllocationHandleType=named(CU_MEM_HANDLE_TYPE_FABRIC=8),
        CUmemAllocationGranularity_flags=named(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0),
        cuMemGetAllocationGranularity=called("cuMemGetAllocationGranularity", 0, 2 << 20),
        cuMemCreate=called("cuMemCreate", allocation, 99),
        cuMemRelease=called("cuMemRelease", 0),
    )


def cuda(uuid: str = UUID.removeprefix("GPU-")) -> Any:
    return SimpleNamespace(
        current_device=lambda: 1,
        mem_get_info=lambda device: (149 << 30, 150 << 30),
        get_device_properties=lambda device: SimpleNamespace(uuid=uuid),
        get_device_name=lambda device: "NVIDIA H200",
        get_device_capability=lambda device: (9, 0),
        nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
    )


def tree(root: Path, majors: str = "242 nvidia-caps-imex-channels\n", channels: int = 1) -> Path:
    """A machine's files under `root`."""
    (root / "proc").mkdir()
    (root / "proc/devices").write_text(f"Character devices:\n195 nvidia\n{majors}")
    (root / "dev/nvidia-caps-imex-channels").mkdir(parents=True)
    for channel in range(channels):
        (root / f"dev/nvidia-caps-imex-channels/channel{channel}").touch()
    return root


def sources(root: Path, **changes: Any) -> Sources:
    known = {
        "nvml": Nvml,
        "driver": driver,
        "cuda": cuda(),
        "root": root,
        "access": lambda path, mode: True,
        "environment": dict,
    }
    return Sources(**{**known, **changes})


def probed(root: Path, **changes: Any) -> Facts:
    where = sources(root, **changes)
    return probe(torch.device("cuda", 1), world_size=2, backend="nccl", host_identity="here", sources=where)


def test_a_gpu_in_full(tmp_path: Path) -> None:
    facts = probed(
        tree(tmp_path),
        environment=lambda: {"NCCL_NVLS_ENABLE": "0", "CUDA_VISIBLE_DEVICES": "3, 5"},
    )
    versions = {name: facts.versions[name] for name in ("nccl", "torch", "nvidia-ml-py", "cuda-bindings", "cuda-core")}
    assert versions["nccl"] == "2.28.9"
    assert attrs.evolve(facts, versions={}, host_memory=True, operators=frozenset()) == Facts(
        host="here",
        device="cuda",
        device_name="NVIDIA H200",
        device_uuid=UUID,
        pci_address="00000000:00:07.0",
        ordinal=1,
        compute_capability=(9, 0),
        free_memory=149 << 30,
        host_memory=True,
        nvlinks=18,
        peers={OTHER: PeerAccess.OK},
        fabric=Fabric(state=FabricState.COMPLETED, clique=7),
        mig=False,
        confidential=False,
        multicast=True,
        fabric_handles=True,
        fabric_allocation=0,
        imex=Imex.READY,
        operators=frozenset(),
        driver="580.159.04",
        world_size=2,
        backend="nccl",
        environment={"NCCL_NVLS_ENABLE": "0"},
        visible_devices=("3", "5"),
    )


def test_nvml_is_started_and_stopped_once_also_when_it_fails(tmp_path: Path) -> None:
    root = tree(tmp_path)
    for nvml in (Nvml(), Nvml(nvmlDeviceGetHandleByUUID=lambda uuid: 1 / 0)):
        probed(root, nvml=lambda nvml=nvml: nvml)  # type: ignore[misc]
        assert nvml.calls.count("nvmlInit") == nvml.calls.count("nvmlShutdown") == 1
        assert nvml.calls[-1] == "nvmlShutdown"


def test_the_memory_of_the_allocation_is_given_back_and_nothing_is_multicast(tmp_path: Path) -> None:
    one = driver()
    assert probed(tree(tmp_path), driver=lambda: one).fabric_allocation == 0
    assert one.calls.count("cuMemCreate") == one.calls.count("cuMemRelease") == 1
    package = Path(sys.modules["k3comm"].__file__ or "").parent
    assert [path for path in package.rglob("*.py") if "cuMulticast" in path.read_text(encoding="utf-8")] == []


def test_an_attribute_that_lies_is_found_out(tmp_path: Path) -> None:
    """B3: the attribute is 1, the allocation is not permitted."""
    facts = probed(tree(tmp_path), driver=lambda: driver(allocation=800))
    assert (facts.fabric_handles, facts.fabric_allocation) == (True, 800)


def test_no_allocation_without_the_attribute(tmp_path: Path) -> None:
    one = driver(attributes=0)
    facts = probed(tree(tmp_path), driver=lambda: one)
    assert (facts.multicast, facts.fabric_handles, facts.fabric_allocation) == (False, False, None)
    assert "cuMemCreate" not in one.calls


@pytest.mark.parametrize("value", [2, -1, 0.5, float("nan"), "yes", None])
def test_a_word_that_is_neither_0_nor_1_is_an_unknown(tmp_path: Path, value: Any) -> None:
    facts = probed(tree(tmp_path), driver=lambda: driver(attributes=value))
    assert isinstance(facts.multicast, Unknown)
    assert isinstance(facts.fabric_handles, Unknown)
    with pytest.raises(LookupError, match="where 0 or 1 was expected"):
        yes_or_no(value)


def test_the_wrong_device_is_not_believed(tmp_path: Path) -> None:
    facts = probed(tree(tmp_path), driver=lambda: driver(uuid="00" * 16))
    assert str(facts.multicast) == f"unknown: the driver's device 1 has the UUID {'00' * 16}, and not {UUID}"


def test_a_driver_that_does_not_start_says_why(tmp_path: Path) -> None:
    facts = probed(tree(tmp_path), driver=lambda: driver(init=802))
    assert isinstance(facts.multicast, Unknown)
    assert facts.multicast.code == 802
    assert "SYSTEM_NOT_READY (802), transient: the system is not ready" in facts.multicast.why


def test_an_instance_is_known_as_one(tmp_path: Path) -> None:
    instance = UUID.replace("GPU-", "MIG-")

    def by_uuid(uuid: str) -> str:
        if uuid != instance:
            raise RuntimeError("Not Found")
        return uuid

    nvml = Nvml(nvmlDeviceGetHandleByUUID=by_uuid, nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda handle: UUID)
    facts = probed(tree(tmp_path), nvml=lambda: nvml)
    assert (facts.device_uuid, facts.mig, facts.nvlinks) == (instance, True, 18)


def refuse(*arguments: Any) -> Any:
    raise NotSupported


def test_what_a_gpu_does_not_have_is_a_no(tmp_path: Path) -> None:
    names = ("MigMode", "NvLinkState", "GpuFabricInfoV")
    changes = {f"nvmlDeviceGet{name}": refuse for name in names} | {"nvmlSystemGetConfComputeState": refuse}
    facts = probed(tree(tmp_path), nvml=lambda: Nvml(**changes))
    assert (facts.mig, facts.confidential, facts.nvlinks) == (False, False, 0)
    assert facts.fabric == Fabric(state=FabricState.NOT_SUPPORTED)


def test_a_peer_that_can_not_be_asked_is_not_reached(tmp_path: Path) -> None:
    for answer in (refuse, lambda *a: 6, lambda *a: 77, lambda handle, peer, kind: 5 * kind, lambda *a: (0,)):
        root = tmp_path / str(id(answer))
        root.mkdir()
        facts = probed(tree(root), nvml=lambda answer=answer: Nvml(nvmlDeviceGetP2PStatus=answer))  # type: ignore[misc]
        assert facts.peers[OTHER] is not PeerAccess.OK


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


KINDS = (
    OSError(errno.EMFILE, "Too many open files"),
    KeyError("x"),
    SystemError("null"),
    Hostile(),
    LookupError("why"),
)


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_whatever_raises_is_an_unknown(tmp_path: Path, error: Exception) -> None:
    """Nothing that anybody throws ends the probe, and no unknown passes for a yes."""

    def fail(*arguments: Any, **named: Any) -> Any:
        raise error

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise error

    empty = tmp_path / "nothing"
    for changes in (
        {"nvml": fail, "driver": fail, "cuda": Broken(), "access": fail, "environment": fail},
        {"nvml": Broken, "driver": Broken, "cuda": Broken()},
    ):
        where = sources(empty, **changes)
        facts = probe(torch.device("cuda", 0), world_size=2, backend="nccl", sources=where)
        for name in (*ASKED, "host", "device_name", "host_memory", "driver", "pci_address"):
            value = getattr(facts, name)
            assert not value or name in ("operators", "imex"), name
        assert facts.peers == {}


def test_an_error_keeps_its_number() -> None:
    def full() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    answer = ask(full)
    assert isinstance(answer, Unknown)
    assert answer.code == errno.EMFILE


def test_a_machine_without_a_driver_loads_nothing_large(tmp_path: Path) -> None:
    loaded = set(sys.modules)
    facts = probe(torch.device("cpu"), world_size=2, backend="gloo")
    if isinstance(facts.driver, Unknown):
        assert {name.split(".")[0] for name in set(sys.modules) - loaded} & {"pynvml", "cuda"} == set()
        assert facts.driver.why.startswith("no NVIDIA driver here (libnvidia-ml.so.1")


@pytest.mark.parametrize(
    ("majors", "channels", "allowed", "finding", "remedy"),
    [
        ("", 1, True, Imex.NO_MAJOR, "load an NVIDIA driver"),
        ("242 nvidia-caps-imex-channels\n", 0, True, Imex.NO_CHANNEL, "start nvidia-imex"),
        ("242 nvidia-caps-imex-channels\n", 2, False, Imex.NO_PERMISSION, "change its mode or owner"),
        ("242 nvidia-caps-imex-channels\n", 2, True, Imex.READY, "is there"),
    ],
)
def test_imex(tmp_path: Path, majors: str, channels: int, allowed: bool, finding: Imex, remedy: str) -> None:
    """B6: three findings, each with its remedy."""
    root = tree(tmp_path, majors, channels)
    assert imex_channel(root, lambda path, mode: allowed) is finding
    assert remedy in str(finding)


def test_a_host_with_a_hole_in_its_name_is_unknown(tmp_path: Path) -> None:
    assert isinstance(host_identity(tmp_path), Unknown)
    assert isinstance(host_identity(Path("/")), str)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (None, None),
        ("", ()),
        ("0,1", ("0", "1")),
        (" 2 , 3", ("2", "3")),
        ("GPU-ab12", ("GPU-ab12",)),
        ("MIG-11aa/0/1", ("MIG-11aa/0/1",)),
        (f"MIG-{HEX}, GPU-1", (f"MIG-{HEX}", "GPU-1")),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        ("NoDevFiles", ()),
    ],
)
def test_visible_devices(text: str | None, tokens: tuple[str, ...] | None) -> None:
    assert visible_devices({} if text is None else {"CUDA_VISIBLE_DEVICES": text}) == tokens


@pytest.mark.parametrize(
    ("text", "why"), [("0,0", "'0' given twice"), ("x", "'x' given; accepted are numbers, and UUIDs"), ("0;1", "'0;1'")]
)
def test_visible_devices_that_nobody_can_read(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        visible_devices({"CUDA_VISIBLE_DEVICES": text})
    facts = probe(
        torch.device("cpu"),
        world_size=1,
        backend="",
        sources=Sources(environment=lambda: {"CUDA_VISIBLE_DEVICES": text}),
    )
    assert why in str(facts.visible_devices)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_the_allocator(name: str) -> None:
    """K6: a fact only."""
    assert not expandable_segments({})
    assert not expandable_segments({name: "max_split_size_mb:128"})
    assert expandable_segments({name: "max_split_size_mb:128, expandable_segments:True"})
    assert not expandable_segments({name: "expandable_segments:True,expandable_segments:False"})
    with pytest.raises(InputError, match=f"{name}: expandable_segments:maybe given"):
        expandable_segments({name: "expandable_segments:maybe"})


def test_the_new_name_of_the_allocator_wins() -> None:
    both = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    assert not expandable_segments(both)


def test_the_environment_is_read_by_name() -> None:
    given = {"NCCL_P2P_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "HOME": "/root", "NCCL_DEBUG": "INFO"}
    assert settings.environment(given) == {"NCCL_P2P_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
