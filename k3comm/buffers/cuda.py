"""Device memory that ranks share: torch's symmetric memory, as `SymmetricMemory`. The one file that knows its API.

That API is alpha (`torch.distributed._symmetric_memory`, `torch.ops.symm_mem`), so the versions that this file was
written against are stated, and others are refused.

Allocation, export and map are local stages as everywhere. The rendezvous is not: torch allocates, exchanges and imports
in one opaque collective that talks over the group's store and sockets of its own. So `import_` first looks at the
handles, which all ranks have, and refuses on every rank alike what torch would hang or fail in. What fails after that
is fatal on this rank (`RendezvousError`): nobody can tell where in the collective the peers are.

- Torch before the change of its issue 196082 numbers the keys of a rendezvous by what *this process* has done, not the
  group. Ranks with different histories (one was in a rendezvous of a subgroup) look for different keys and hang. The
  handles carry how many each process has been through here. What an engine does with torch's module by itself is not
  counted.
- Torch frees with a synchronisation of the device. A kernel that waits for a dead peer never ends, nor does `release`.
  In a CUDA context that an error has ended (a kernel's trap) freeing would abort the process: such memory is kept.
- Multicast is what torch's handle offers. Torch makes the object inside its rendezvous where every GPU of the group has
  multicast, unless TORCH_SYMM_MEM_DISABLE_MULTICAST or TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is set. Nothing here
  makes one.
- One signal pad an allocation: the operators below, on views of one block, must run in one order on every rank. On two
  streams at once they deadlock.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

from k3comm.buffers.symmetric import HANDLE_BYTES, SymmetricMemory, describe
from k3comm.errors import ClosedError, InputError, RendezvousError

VERSIONS: Final = ((2, 11), (2, 15))
"""Torch from the first, below the second."""

BACKEND: Final = "CUDA"
"""The one of torch's allocators whose blocks are addresses in this process; the others map peers by their own rules."""

ELEMENTS: Final = 8
"""The operators take any number of BF16 elements that fills words of 4 bytes; multiples of 8 (16 bytes) are fastest."""

_HANDLE = struct.Struct("<8sQQ")  # magic, nbytes, rendezvous of this process so far
_MAGIC = b"k3cuda.1"


class TorchHandle(Protocol):
    """What a rendezvous gives."""

    rank: int
    world_size: int
    multicast_ptr: int

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A rank's memory; it does not keep the mapping alive."""


class TorchModule(Protocol):
    """What is used of `torch.distributed._symmetric_memory`."""

    def get_backend(self, device: torch.device) -> str | None:
        """The allocator for a device, by name."""

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that can be shared. Local."""

    def rendezvous(self, tensor: torch.Tensor, group: str) -> TorchHandle | None:
        """Maps every rank's tensor. Collective, and torch's own."""


class Torch:
    """torch's module in one process, its version, and how many rendezvous this process has been in by `CudaMemory`."""

    def __init__(self, load: Callable[[], TorchModule], version: str) -> None:
        self._load = load
        self._module: TorchModule | None = None
        self.version = version
        self.met = 0

    @property
    def module(self) -> TorchModule:
        """The module, loaded when first asked for."""
        if self._module is None:
            self._module = self._load()
        return self._module

    def refusal(self, device: torch.device) -> str | None:
        """Why this torch can't share memory of a device; None if it can. Never raises."""
        first, end = VERSIONS
        try:
            version = tuple(int(part) for part in self.version.split("+")[0].split(".")[:2])
        except ValueError:
            version = (0, 0)
        if not first <= version < end:
            return (
                f"torch {self.version}: its symmetric memory is an alpha API; this version of k3comm knows it from "
                f"torch {first[0]}.{first[1]} to below {end[0]}.{end[1]}"
            )
        try:
            backend = self.module.get_backend(device)
        except Exception as error:  # an alpha API: whatever it raises, the answer is no
            return f"torch's symmetric memory can't be asked: {describe(error)}"
        if backend != BACKEND:
            return f"torch's symmetric memory on {device.type} is {backend or 'absent'}; accepted is {BACKEND}"
        return None


def _module() -> Any:
    import torch.distributed._symmetric_memory as module

    return module


TORCH: Final = Torch(_module, str(torch.__version__))
"""This process's."""


class CudaMemory(SymmetricMemory):
    """`SymmetricMemory` over torch's: one GPU a rank (or shared, for tests), blocks on this rank's device.

    Blocks of peers are addresses without an owner: unlike on the host they are good until `release` only.

    Args:
        rank, world_size: place in the group, and its size W.
        group_name: torch's name of the process group (`group.group_name`), whose store carries the rendezvous.
        device: this rank's, with its index.
        torch_api: another module than torch's own, for tests.

    Attributes:
        pointers: the address of every rank's block as this rank sees it, in rank order; empty until mapped.
        multicast_ptr: one address for the blocks of all ranks, as torch's handle has it; 0 without.

    Raises:
        InputError: a rank outside the group.
    """

    def __init__(
        self, rank: int, world_size: int, *, group_name: str, device: torch.device, torch_api: Torch = TORCH
    ) -> None:
        if not 0 <= rank < world_size:
            raise InputError(f"rank: {rank!r} given for {world_size!r} ranks; accepted are 0 to world_size - 1")
        self.rank = rank
        self.world_size = world_size
        self.pointers: tuple[int, ...] = ()
        self.multicast_ptr = 0
        self._group_name = group_name
        self._device = device
        self._torch = torch_api
        self._own: torch.Tensor | None = None
        self._handle: TorchHandle | None = None
        self._blocks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's block; 0 before `allocate` and after `release`."""
        return 0 if self._own is None else self._own.numel()

    def allocate(self, nbytes: int) -> None:
        """See `SymmetricMemory`.

        Raises:
            InputError: nbytes below 1, or a second call.
            OSError: no memory (ENOMEM), a torch that is not accepted (ENOTSUP), or what torch says (EIO).
        """
        if type(nbytes) is not int or nbytes < 1:
            raise InputError(f"nbytes: {nbytes!r} given; accepted are whole numbers from 1")
        if self._own is not None:
            raise InputError(f"allocate: called again, {self.nbytes} bytes are there; accepted is one call")
        why = self._torch.refusal(self._device)
        if why is not None:
            raise OSError(errno.ENOTSUP, why)
        try:
            with torch.inference_mode(False):  # tensors made inside it could not be written to outside
                own = self._torch.module.empty(nbytes, dtype=torch.uint8, device=self._device)
                own.zero_()
            if own.is_cuda:  # peers write before any stream of theirs could wait for this one
                torch.cuda.current_stream(own.device).synchronize()
        except RuntimeError as error:  # torch.OutOfMemoryError is one; its driver calls raise the bare class
            number = errno.ENOMEM if "out of memory" in str(error).lower() else errno.EIO
            raise OSError(number, f"{nbytes} bytes on {self._device}: {describe(error)}") from error
        self._own = own

    def export(self) -> bytes:
        """See `SymmetricMemory`: nothing to be opened, but what makes torch's rendezvous safe to enter.

        Raises:
            ClosedError: nothing is allocated.
        """
        if self._own is None:
            raise ClosedError("export: no block is allocated; allocate() comes first")
        return _HANDLE.pack(_MAGIC, self.nbytes, self._torch.met).ljust(HANDLE_BYTES, b"\0")

    def import_(self, handles: Sequence[bytes]) -> None:
        """Torch's rendezvous. Collective, unlike other memories' imports, once the handles are found to be in order.

        Raises:
            InputError: on every rank alike, before anything is collective: handles that don't go together.
            RendezvousError: torch's collective failed on this rank. Fatal.
            ClosedError: nothing is allocated.
        """
        if self._own is None:
            raise ClosedError("import: no block is allocated; allocate() comes first")
        why = handles_refusal(handles, self.world_size)
        if why is not None:
            raise InputError(why)
        self._torch.met += 1
        try:
            handle = self._torch.module.rendezvous(self._own, self._group_name)
            if handle is None:
                raise LookupError("torch does not know the memory")
        except Exception as error:
            raise RendezvousError(
                f"rank {self.rank} of {self.world_size}: torch's rendezvous of {self.nbytes} bytes on {self._device} "
                f"failed: {describe(error)}. It is one collective that nobody can leave in order: the peers may wait "
                "in it until their own deadlines. Start all ranks anew"
            ) from error
        self._handle = handle
        self.multicast_ptr = int(handle.multicast_ptr or 0)
        self.multicast_objects = int(self.multicast_ptr != 0)

    def map(self) -> None:
        """See `SymmetricMemory`.

        Raises:
            ClosedError: not imported.
            InputError: torch numbers the ranks otherwise, or gives this rank another address than its memory's.
        """
        own, handle = self._own, self._handle
        if own is None or handle is None:
            raise ClosedError("map: not every rank's block is imported; import_() comes first")
        if (handle.rank, handle.world_size) != (self.rank, self.world_size):
            raise InputError(
                f"torch's rendezvous: rank {handle.rank} of {handle.world_size} given; accepted is rank {self.rank} of "
                f"{self.world_size}"
            )
        with torch.inference_mode(False):
            blocks = [handle.get_buffer(rank, (own.numel(),), torch.uint8) for rank in range(self.world_size)]
        if blocks[self.rank].data_ptr() != own.data_ptr():
            raise InputError(
                f"torch's rendezvous: address {blocks[self.rank].data_ptr():#x} given for this rank's block; accepted "
                f"is {own.data_ptr():#x} (symmetric memory from a pool?)"
            )
        blocks[self.rank] = own  # torch's operators find an allocation by the storage of a view's tensor
        self._blocks = blocks
        self.pointers = tuple(block.data_ptr() for block in blocks)

    def release(self) -> None:
        """See `SymmetricMemory`. Waits for all work on the device, as torch frees.

        If that has failed, and the CUDA context with it, the memory is kept until the process ends.
        """
        if self._own is not None and not _works(self._own.device):
            for kept in (self._own, self._handle):
                # Not a list: the interpreter empties modules at its exit, and torch would free then.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._blocks = []
        self._handle = None
        self._own = None
        self.pointers = ()
        self.multicast_ptr = self.multicast_objects = 0


def _works(device: torch.device) -> bool:
    """Whether work on a device can still be waited for; waits for it."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def handles_refusal(handles: Sequence[bytes], world_size: int) -> str | None:
    """Why no rank may enter torch's rendezvous; the same on every rank, since all have the same handles. None: none."""
    if len(handles) != world_size:
        return f"handles: {len(handles)} given; accepted is one a rank, {world_size}"
    sizes, histories = [], []
    for peer, handle in enumerate(handles):
        if len(handle) != HANDLE_BYTES or not handle.startswith(_MAGIC):
            return f"rank {peer}: {bytes(handle[:8])!r}... is not the handle of a block on a GPU"
        _, nbytes, met = _HANDLE.unpack_from(handle)
        sizes.append(nbytes)
        histories.append(met)
    if len(set(sizes)) > 1:
        return f"blocks of {', '.join(map(str, sizes))} bytes on ranks 0 to {world_size - 1}; accepted are equal sizes"
    if len(set(histories)) > 1:
        return (
            f"the ranks' processes have been in {', '.join(map(str, histories))} rendezvous of torch's symmetric "
            "memory, and torch hangs where these numbers differ (its issue 196082); communicators over subgroups come "
            "after those over larger groups, or equally many on every rank"
        )
    return None


def two_shot_all_reduce_(x: torch.Tensor, group_name: str) -> None:
    """Sums x over the ranks, in place, over peer pointers; on the current stream. Collective.

    Each rank sums its 1/W of x over all ranks' blocks and writes it to all of them: the same bits everywhere. BF16 is
    rounded after every addition (W - 1 times).

    Args:
        x: a view of this rank's block, contiguous, at the same offset on every rank; BF16 or fp32, a multiple of
            4 bytes in offset and size.
    """
    torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group_name)


def multimem_all_reduce_(x: torch.Tensor, group_name: str) -> None:
    """Sums x over the ranks in the switch: `two_shot_all_reduce_` for a block with a multicast address.

    The switch accumulates BF16 in fp32, in its own order, and rounds once.
    """
    torch.ops.symm_mem.multimem_all_reduce_(x, "sum", group_name)
