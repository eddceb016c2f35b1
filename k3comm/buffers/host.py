"""Shared memory of the processes of one machine, without a name.

The bytes are a memfd: anonymous memory with a descriptor. A peer opens it through the owner's /proc/<pid>/fd/<n>, so
there is no name that a crash could leave behind, nothing in /dev/shm, and the kernel frees the pages with the last
process that maps them. The kernel's own check of /proc lets in the same user only (ptrace rules), and mode 0600 says it
again.

Pages are taken when allocating, so what is missing shows in this stage, which is voted, and not at the first touch. The
kernel sets anonymous files no limit: it would give all memory there is and then kill some process. So a rank asks first
whether there is room for the blocks of all ranks, which share the machine and allocate at the same time. The size is
sealed: no process can shrink it under another.

A handle holds a process id, which the kernel reuses, so an import believes nothing: it looks before it opens (opening a
FIFO could wait, a device could act), and it compares a random nonce that stands behind the block, where nobody maps it.

After `map` no descriptor is left. `release` drops the mappings; the pages of a block go when no tensor refers to it any
more, here and in every peer.

Decided against: shm_open and files (names), descriptors over a Unix socket (a connection per pair, and a name for the
socket), pidfd_getfd (needs the right to attach, which containers refuse more often than the right to look).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from k3comm.buffers.symmetric import HANDLE_BYTES, SymmetricMemory
from k3comm.errors import ClosedError, InputError

_HANDLE = struct.Struct("<8sqqQQ16s")  # magic, process id, descriptor, inode of the PID namespace, nbytes, nonce
_MAGIC = b"k3comm.1"
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NAME = "k3comm"  # shown in /proc/<pid>/maps; not a name that can be opened


class HostMemory(SymmetricMemory):
    """`SymmetricMemory` over memfd and /proc: Linux, one host, one PID namespace, one user; blocks on CPU.

    Args:
        rank, world_size: place in the group, and its size W.

    Raises:
        InputError: a rank outside the group.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise InputError(f"rank: {rank!r} given for {world_size!r} ranks; accepted are 0 to world_size - 1")
        self.rank = rank
        self.world_size = world_size
        self._nbytes = 0
        self._nonce = secrets.token_bytes(16)
        self._files: list[int | None] = [None] * world_size
        self._blocks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's block; 0 before `allocate` and after `release`."""
        return self._nbytes

    def allocate(self, nbytes: int) -> None:
        """See `SymmetricMemory`.

        Raises:
            InputError: nbytes below 1, or a second call.
            OSError: no memory, no descriptor.
        """
        if type(nbytes) is not int or nbytes < 1:
            raise InputError(f"nbytes: {nbytes!r} given; accepted are whole numbers from 1")
        if self._nbytes:
            raise InputError(f"allocate: called again, {self._nbytes} bytes are there; accepted is one call")
        size = _file_bytes(nbytes)
        if (room := available_bytes()) < size * self.world_size:
            raise OSError(
                errno.ENOMEM,
                f"{size} bytes for each of {self.world_size} ranks, and {room} are available on this machine",
            )
        file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._files[self.rank] = file
        os.fchmod(file, 0o600)
        os.posix_fallocate(file, 0, size)
        os.pwrite(file, self._nonce, _nonce_offset(nbytes))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        self._nbytes = nbytes

    def export(self) -> bytes:
        """See `SymmetricMemory`. Good while this process lives and has not gone past `map`.

        Raises:
            ClosedError: nothing is allocated.
        """
        file = self._files[self.rank]
        if file is None or not self._nbytes:
            raise ClosedError("export: no block is allocated; allocate() comes first")
        handle = _HANDLE.pack(_MAGIC, os.getpid(), file, _pid_namespace(), self._nbytes, self._nonce)
        return handle.ljust(HANDLE_BYTES, b"\0")

    def import_(self, handles: Sequence[bytes]) -> None:
        """See `SymmetricMemory`.

        Raises:
            InputError: a handle that is none, or of another size than this rank's block.
            OSError: a peer's block can't be opened; names the peer, and what stands in the way.
            ClosedError: nothing is allocated.
        """
        own = self._files[self.rank]
        if own is None or not self._nbytes:
            raise ClosedError("import: no block is allocated; allocate() comes first")
        if len(handles) != self.world_size:
            raise InputError(f"handles: {len(handles)} given; accepted is one a rank, {self.world_size}")
        for peer, handle in enumerate(handles):
            if peer != self.rank:
                self._files[peer] = _open(peer, handle, self._nbytes, os.fstat(own).st_dev)

    def map(self) -> None:
        """See `SymmetricMemory`. Closes the descriptors.

        Raises:
            ClosedError: not every rank's block is imported.
            OSError, RuntimeError: no address space.
        """
        if not all(file is not None for file in self._files):
            raise ClosedError("map: not every rank's block is imported; import_() comes first")
        # Not mmap.mmap: until Python 3.13 it keeps a descriptor of its own for as long as the mapping lives.
        with torch.inference_mode(False):  # tensors made inside it could not be written to outside
            self._blocks = [
                torch.from_file(f"/proc/self/fd/{file}", shared=True, size=self._nbytes, dtype=torch.uint8)
                for file in self._files
            ]
        self._close()

    def release(self) -> None:
        """See `SymmetricMemory`. A block is unmapped here when no tensor refers to it any more."""
        self._blocks = []
        self._nbytes = 0
        self._close()

    def _close(self) -> None:
        for place, file in enumerate(self._files):
            if file is not None:
                self._files[place] = None
                with contextlib.suppress(OSError):
                    os.close(file)

    def __del__(self) -> None:
        # A constructor that refused its arguments has left nothing to close.
        if hasattr(self, "_blocks"):
            self._close()


def available_bytes() -> int:
    """Memory that this process could take without others having to go: the machine's, within its cgroup's limits.

    0 where /proc does not say.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    machine = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
    return min([machine, *_cgroup_rooms()])


def _cgroup_rooms() -> Iterator[int]:
    """What is left under each limit that this process is subject to (cgroup v2; what v1 limits is not seen)."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if not line.startswith("0::"):
                continue
            own = root / line[3:].lstrip("/")
            for group in (own, *own.parents):
                with contextlib.suppress(OSError, ValueError):  # no limit: no file, or the word "max"
                    limit = int((group / "memory.max").read_text(encoding="utf-8"))
                    used = int((group / "memory.current").read_text(encoding="utf-8"))
                    statistics = (group / "memory.stat").read_text(encoding="utf-8").split()
                    cache = int(statistics[statistics.index("inactive_file") + 1])  # given back when memory is short
                    yield max(0, limit - used + cache)


def _nonce_offset(nbytes: int) -> int:
    """The page behind the block."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _file_bytes(nbytes: int) -> int:
    return _nonce_offset(nbytes) + mmap.PAGESIZE


def _pid_namespace() -> int:
    """Tells PID namespaces of one machine apart; 0 where /proc does not say."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _open(peer: int, handle: bytes, nbytes: int, device: int) -> int:
    """A descriptor of the block that the handle of `peer` means. `device`: where memfds live on this machine."""
    magic, pid, number, namespace, size, nonce = _HANDLE.unpack_from(handle.ljust(_HANDLE.size, b"\0"))
    if len(handle) != HANDLE_BYTES or magic != _MAGIC:
        raise InputError(f"the handle of rank {peer} is not one of this version's host memory")
    if size != nbytes:
        raise InputError(f"rank {peer} allocated {size} bytes and this rank {nbytes}; accepted are equal sizes")
    if namespace != (here := _pid_namespace()):
        raise OSError(
            f"the block of rank {peer}: it is in another PID namespace ({namespace}, this rank in {here}), as in "
            "another container; ranks that share host memory must see each other's processes"
        )
    path = f"/proc/{pid}/fd/{number}"
    try:
        _check(os.stat(path), nbytes, device)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise _failure(f"the block of rank {peer}", error, _explain(error, pid)) from error
    try:
        # Again, on what was opened: the process may have gone between the two and its number been given away.
        _check(os.fstat(file), nbytes, device)
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("it is not sealed as a block of this library is")
        if os.pread(file, len(nonce), _nonce_offset(nbytes)) != nonce:
            raise OSError(f"process {pid} has exited, its number is another process's now (the nonce differs)")
    except OSError as error:
        os.close(file)
        raise _failure(f"the block of rank {peer}", error) from error
    return file


def _failure(what: str, error: Exception, why: str = "") -> OSError:
    """The same kind of OSError with more words."""
    number = getattr(error, "errno", None)
    text = f"{what}: {why or error}"
    return OSError(text) if number is None else OSError(number, text)


def _check(status: os.stat_result, nbytes: int, device: int) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_dev != device or status.st_nlink:
        raise OSError("what its handle names is not a memfd: the descriptor was closed, or the process is another one")
    if status.st_uid != os.geteuid():
        raise OSError(f"it belongs to user {status.st_uid} and this rank to user {os.geteuid()}")
    if status.st_size != _file_bytes(nbytes):
        raise OSError(f"it has {status.st_size} bytes instead of {_file_bytes(nbytes)}")


def _explain(error: OSError, pid: int) -> str:
    if isinstance(error, PermissionError):
        return (
            f"no permission to open a descriptor of process {pid}: another user, a process that is not dumpable, or "
            "a container without the right to look into /proc"
        )
    if isinstance(error, FileNotFoundError | ProcessLookupError):
        there = os.path.exists(f"/proc/{pid}")
        return f"process {pid} {'has closed its descriptor' if there else 'has exited, or /proc hides it'}"
    return str(error)
