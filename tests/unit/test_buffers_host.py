"""Host memory: no name, no descriptor, no byte left, and a clear word for whatever stands in the way."""

from __future__ import annotations

import gc
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from buffer_groups import descriptors, mapped, mappings, over_gloo

from k3comm.buffers import host
from k3comm.buffers.host import HostMemory
from k3comm.buffers.symmetric import HANDLE_BYTES, establish
from k3comm.errors import ClosedError, InputError
from k3comm.testing import RanksFailed, assert_identical, run_ranks


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 << 20])
def test_sizes(nbytes: int) -> None:
    before = mappings()
    first, second = mapped(2, nbytes)
    block = first.block(1)
    assert block.numel() == first.nbytes == nbytes
    block[-1] = 77
    assert second.block(1)[-1] == 77
    assert second.block(0)[-1] == 0
    # What proves a handle lies behind the block, and nobody maps it.
    assert mappings() == before + 4
    for memory in (first, second):
        memory.release()


def test_no_descriptor_is_left_after_mapping() -> None:
    before = descriptors()
    memories = mapped(3, 5000)
    assert descriptors() == before
    for memory in memories:
        memory.release()
        memory.release()
    gc.collect()
    assert descriptors() == before


def test_release_is_right_after_any_stage() -> None:
    before = descriptors(), mappings()
    for stages in range(4):
        memory = HostMemory(0, 2)
        peer = HostMemory(1, 2)
        peer.allocate(64)
        if stages > 0:
            memory.allocate(64)
        if stages > 1:
            handles = [memory.export(), peer.export()]
        if stages > 2:
            memory.import_(handles)
        memory.release()
        peer.release()
        assert memory.nbytes == 0
        assert (descriptors(), mappings()) == before
        with pytest.raises(ClosedError, match="not mapped, or released"):
            memory.block(0)


def test_what_is_dropped_unreleased_closes_its_descriptors() -> None:
    before = descriptors()
    memory = HostMemory(0, 1)
    memory.allocate(64)
    assert descriptors() != before
    del memory
    gc.collect()
    assert descriptors() == before


def test_a_mapping_lives_as_long_as_a_tensor() -> None:
    before = mappings()
    (memory,) = mapped(1, 8192)
    view = memory.block(0)[4096:].view(torch.int32)
    memory.release()
    del memory
    gc.collect()
    assert mappings() == before + 1
    view.fill_(5)
    assert int(view.sum()) == 5 * 1024
    del view
    gc.collect()
    assert mappings() == before


def test_the_memory_is_private_and_can_not_shrink() -> None:
    memory = HostMemory(0, 1)
    memory.allocate(10_000)
    (path,) = (f"/proc/self/fd/{line.split()[0]}" for line in descriptors() if "/memfd:k3comm" in line)
    status = os.stat(path)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_nlink == 0
    # Its pages are there: running out of memory later can't end the process.
    assert status.st_blocks * 512 >= 10_000
    file = os.open(path, os.O_RDWR)
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    os.close(file)
    memory.release()


def forbidden(*arguments: object) -> None:
    raise AssertionError("the kernel sets no limit: this must not be reached")


@pytest.mark.parametrize("nbytes", [1 << 48, 1 << 62, 1 << 63, 1 << 70])
def test_too_much_is_refused_before_the_kernel_is_asked(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", forbidden)
    memory = HostMemory(0, 1)
    with pytest.raises(
        OSError, match=rf"^\[Errno 12\] {nbytes + 4096} bytes for each of 1 ranks, and \d+ are available"
    ):
        memory.allocate(nbytes)
    memory.release()
    assert descriptors() == before


def test_there_must_be_room_for_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 3 * 8192)
    memory = HostMemory(0, 3)
    with pytest.raises(OSError, match="12288 bytes for each of 3 ranks, and 24576 are available"):
        memory.allocate(4097)
    memory.allocate(4096)
    memory.release()


def test_available_memory() -> None:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < host.available_bytes() <= pages


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        ({}, 1000 << 10),
        ({"a/b": (600, 500, 100)}, 200),
        ({"a/b": (600, 900, 100)}, 0),
        ({"a/b": (600, 100, 0), "a": (5000, 4900, 50), "": (10**9, 0, 0)}, 150),
        ({"a/b": ("max", 100, 0)}, 1000 << 10),
        ({"elsewhere": (0, 0, 0)}, 1000 << 10),
    ],
)
def test_limits_of_every_cgroup_above_count(
    limits: dict[str, tuple[int | str, int, int]], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n",
        "/proc/self/cgroup": "4:memory:/v1\n0::/a/b\n",
    }
    for group, (limit, used, cache) in limits.items():
        for name, content in (
            ("max", limit),
            ("current", used),
            ("stat", f"anon 1\ninactive_file {cache}\nactive_file 7"),
        ):
            files[str(Path("/sys/fs/cgroup", group, f"memory.{name}"))] = f"{content}\n"

    def read(path: Path, encoding: str) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert host.available_bytes() == room
    files.clear()
    assert host.available_bytes() == 0


def test_wrong_use() -> None:
    for rank, world_size in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(InputError, match=f"^rank: {rank} given for {world_size} ranks"):
            HostMemory(rank, world_size)
    memory = HostMemory(0, 2)
    for early, what in ((memory.export, "export"), (lambda: memory.import_([b"", b""]), "import")):
        with pytest.raises(ClosedError, match=f"^{what}: no block is allocated"):
            early()
    with pytest.raises(ClosedError, match=r"^map: not every rank's block is imported"):
        memory.map()
    for nbytes in (0, -1, 1.0, True):
        with pytest.raises(InputError, match=r"^nbytes: "):
            memory.allocate(nbytes)  # type: ignore[arg-type]
    memory.allocate(64)
    with pytest.raises(InputError, match=r"^allocate: called again, 64 bytes are there"):
        memory.allocate(64)
    with pytest.raises(InputError, match=r"^handles: 1 given; accepted is one a rank, 2"):
        memory.import_([memory.export()])
    memory.release()
    (alone,) = mapped(1, 64)
    for rank in (-1, 1):
        with pytest.raises(InputError, match=f"^rank: {rank} given; accepted are 0 to 0"):
            alone.block(rank)
    alone.release()


# Handles that lie

HANDLE = struct.Struct("<8sqqQQ16s")
FIELDS = ("magic", "pid", "number", "namespace", "nbytes", "nonce")


def altered(handle: bytes, **changes: int | bytes) -> bytes:
    values = dict(zip(FIELDS, HANDLE.unpack_from(handle), strict=True))
    return HANDLE.pack(*{**values, **changes}.values()).ljust(HANDLE_BYTES, b"\0")


def refused(changes: dict[str, int | bytes], error: type[Exception], text: str) -> None:
    """An import of a peer's handle with these changes fails with that text, and leaks nothing."""
    memory, peer = HostMemory(0, 2), HostMemory(1, 2)
    memory.allocate(5000)
    peer.allocate(5000)
    before = descriptors()
    with pytest.raises(error, match=text):
        memory.import_([memory.export(), altered(peer.export(), **changes)])
    assert descriptors() == before
    memory.release()
    peer.release()


def test_a_handle_is_of_fixed_length() -> None:
    memory = HostMemory(0, 1)
    memory.allocate(1)
    assert len(memory.export()) == HANDLE_BYTES
    for wrong in (memory.export()[:-1], memory.export() + b"\0", b"", b"\0" * HANDLE_BYTES):
        other = HostMemory(0, 2)
        other.allocate(1)
        with pytest.raises(InputError, match="the handle of rank 1 is not one of this version's host memory"):
            other.import_([other.export(), wrong])


def test_lying_handles() -> None:
    refused({"magic": b"k3comm.9"}, InputError, "the handle of rank 1 is not one of")
    refused({"nbytes": 4999}, InputError, "^rank 1 allocated 4999 bytes and this rank 5000")
    refused({"namespace": 1}, OSError, r"^the block of rank 1: it is in another PID namespace \(1, this rank in ")
    refused({"nonce": b"x" * 16}, OSError, "^the block of rank 1: process .* has exited, its number is another")
    refused({"number": 100_000}, OSError, "the block of rank 1: process .* has closed its descriptor")
    refused({"pid": 2**22 + 1}, OSError, "the block of rank 1: process 4194305 has exited, or /proc hides it")


def test_what_is_not_a_memfd_is_not_opened(tmp_path: Path) -> None:
    """A FIFO would block an open, a device could act."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    ends = [os.open(fifo, os.O_RDWR), os.open("/dev/null", os.O_RDWR), os.open(tmp_path, os.O_RDONLY)]
    (tmp_path / "file").write_bytes(bytes(12288))
    ends.append(os.open(tmp_path / "file", os.O_RDWR))
    for number in ends:
        refused({"number": number}, OSError, "^the block of rank 1: what its handle names is not a memfd")
        os.close(number)


def test_a_strange_memfd_is_refused() -> None:
    number = os.memfd_create("other")
    os.ftruncate(number, 4096)
    refused({"number": number}, OSError, "^the block of rank 1: it has 4096 bytes instead of 12288")
    os.ftruncate(number, 12288)
    refused({"number": number}, OSError, "^the block of rank 1: it is not sealed as a block of this library is")
    os.close(number)


def test_an_owner_that_has_exited() -> None:
    program = (
        "from k3comm.buffers.host import HostMemory; import os, sys, signal\n"
        "memory = HostMemory(1, 2); memory.allocate(64)\n"
        "print(memory.export().hex(), flush=True)\n"
        "sys.stdin.read(1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    names = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        handle = bytes.fromhex(owner.stdout.readline().decode())
        memory = HostMemory(0, 2)
        memory.allocate(64)
        memory.import_([memory.export(), handle])
        memory.release()
        owner.stdin.write(b"x")
        owner.stdin.close()
        assert owner.wait(30) == -signal.SIGKILL
    memory.allocate(64)
    with pytest.raises(OSError, match=f"the block of rank 1: process {owner.pid} has exited, or /proc hides it"):
        memory.import_([memory.export(), handle])
    memory.release()
    assert {name for name in set(os.listdir("/dev/shm")) - names if "k3comm" in name} == set()


# Real processes


def survive(nbytes: int) -> tuple[int, bool]:
    """The last rank is killed while it maps everybody's memory; the others keep theirs, and see what it wrote."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    exchange = over_gloo()
    memory = HostMemory(rank, world_size)
    assert establish(memory, nbytes, exchange) is None
    last = world_size - 1
    pid = int.from_bytes(exchange.gather(os.getpid().to_bytes(8, "little"))[last], "little")
    if rank == last:
        for peer in range(world_size):
            memory.block(peer)[-1] = 200
        exchange.min([0])
        os.kill(pid, signal.SIGKILL)
    exchange.min([0])
    while Path(f"/proc/{pid}/exe").exists():
        os.sched_yield()
    memory.block(last)[rank] = 1
    raise SystemExit(int(memory.block(last)[-1]) - int(memory.block(rank)[-1]) + int(memory.block(last)[rank]))


def test_nothing_is_left_of_ranks_that_are_killed() -> None:
    names = set(os.listdir("/dev/shm"))
    with pytest.raises(RanksFailed) as caught:
        run_ranks(survive, 3, 1 << 20, deadline=60)
    assert "SIGKILL" in caught.value.failures[2]
    for rank in (0, 1):
        assert "SystemExit: 1" in caught.value.failures[rank], "they went on, with its bytes and theirs"
    assert {name for name in set(os.listdir("/dev/shm")) - names if "k3comm" in name} == set()


def as_another_user() -> str | None:
    exchange = over_gloo()
    if dist.get_rank():
        os.seteuid(65534)
    try:
        return establish(HostMemory(dist.get_rank(), 2), 64, exchange)
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_with_a_word() -> None:
    text = assert_identical(run_ranks(as_another_user, 2, deadline=60))
    assert text is not None
    first, second = text.split("; ")
    assert first == "rank 0: import: OSError: the block of rank 1: it belongs to user 65534 and this rank to user 0"
    assert second.startswith("rank 1: import: PermissionError: [Errno 13] the block of rank 0: no permission to open")
