"""Memory that ranks share: what a tier asks of it, the interface that makes it, and how ranks make it together.

A block comes about in stages, so that a failure on one rank is a vote and never a peer that waits:

    allocate   local: this rank's bytes
    export     local: a handle of fixed length
    exchange   collective, the caller's: every rank gets every handle
    import     local: the peers' handles are opened
    map        local: all blocks become addresses

`establish` goes through them with a vote after each local stage, so every rank goes on or every rank releases. The
votes are also what makes the next stage safe: a handle may need its owner to stay until every peer has imported it.

Decided against: one call that does it all (a rank that raises inside leaves its peers in the collective), and retries
(a stage that failed once fails again, at the price of a time-out each).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, unique
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import attrs

from k3comm.errors import ClosedError, InputError, RendezvousError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

STAGES: Final = ("allocate", "export", "exchange", "import", "map")
"""The stages in their order. All but "exchange" are local."""

HANDLE_BYTES: Final = 64
"""Length of every handle. Fixed, since the gather needs equally many bytes on every rank."""

TEXT_BYTES: Final = 384
"""What a rank can say about its failure, in UTF-8; the rest is cut off. Fixed for the same reason."""


@unique
class Block(Enum):
    """The two blocks a communicator allocates: each is one vote, so running out of one costs only its own tiers."""

    DECODE = "decode"
    STAGING = "staging"


@attrs.frozen(kw_only=True)
class BufferRequest:
    """Bytes in one block, laid out at the same offset on every rank.

    Attributes:
        block: which block.
        nbytes: size in bytes.
        alignment: of the offset, in bytes; a power of two.
        shared: requests of one block with the same name get one place together; "" is a place of its own.
        optional: the tier works without too, so it gets its place only in a block that is there for other tiers.
    """

    block: Block
    nbytes: int
    alignment: int = 16
    shared: str = ""
    optional: bool = False


class SymmetricMemory(ABC):
    """One block of `nbytes` bytes a rank, every rank's reachable from every rank. Made once, in stages.

    Any stage may raise any Exception; afterwards only `release` may be called. Nothing here is collective.

    Attributes:
        rank, world_size: place in the group, and its size W.
        multicast_objects: how many of the machine's multicast objects the block takes.
    """

    rank: int
    world_size: int
    multicast_objects: int = 0
    _blocks: Sequence[torch.Tensor] = ()

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of one rank's block, as allocated; 0 before."""

    @abstractmethod
    def allocate(self, nbytes: int) -> None:
        """Takes `nbytes` bytes for this rank; zeros. `nbytes` is the same on every rank."""

    @abstractmethod
    def export(self) -> bytes:
        """What a peer needs to import this rank's block: HANDLE_BYTES bytes."""

    @abstractmethod
    def import_(self, handles: Sequence[bytes]) -> None:
        """Opens every peer's block. `handles`: in rank order, this rank's own among them."""

    @abstractmethod
    def map(self) -> None:
        """Makes the blocks addressable. Called once every rank has imported."""

    def block(self, rank: int) -> torch.Tensor:
        """The block of `rank`: uint8 [nbytes]. On the host its mapping lives as long as a tensor refers to it.

        Raises:
            ClosedError: not mapped yet, or released.
            InputError: no such rank.
        """
        if not self._blocks:
            raise ClosedError("block: the memory is not mapped, or released")
        if not 0 <= rank < self.world_size:
            raise InputError(f"rank: {rank!r} given; accepted are 0 to {self.world_size - 1}")
        return self._blocks[rank]

    @abstractmethod
    def release(self) -> None:
        """Lets go of everything that any stage took. Idempotent and local; right after any stage, also a failed one."""


@runtime_checkable
class Exchange(Protocol):
    """What votes need of a group. Every member calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Place in the group, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Number of ranks W."""

    @property
    def store(self) -> Store | None:
        """A torch.distributed.Store that all ranks share, by which one is told who is missing; None: there is none.

        Without it the exchange's own deadlines are all there is: each rank ends when its collective does, in an error
        of its own.
        """

    def min(self, values: Sequence[int]) -> list[int]:
        """The element-wise minimum over ranks of int64 values; equally many on every rank. Collective."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order; equally many bytes on every rank. Collective."""


@attrs.frozen
class Limit:
    """A deadline of a stage: seconds, and the setting they come from."""

    seconds: float
    setting: str


def at(exchange: Exchange, stage: str, limit: Limit | None = None) -> Exchange:
    """The exchange, told what its next collectives are, and their deadline, if it is one that is watched."""
    named: Callable[[str, Limit | None], Exchange] | None = getattr(exchange, "at", None)
    return exchange if named is None else named(stage, limit)


def establish(
    memory: SymmetricMemory,
    nbytes: int,
    exchange: Exchange,
    stages: Sequence[str] = STAGES,
    *,
    what: str = "a block",
    limit: Limit | None = None,
) -> str | None:
    """`establish_all` for one block."""
    return establish_all([memory], [nbytes], exchange, stages, what=what, limit=limit)[0]


def establish_all(
    memories: Sequence[SymmetricMemory],
    nbytes: Sequence[int],
    exchange: Exchange,
    stages: Sequence[str] = STAGES,
    *,
    what: str = "the blocks",
    limit: Limit | None = None,
) -> list[str | None]:
    """Makes each of some blocks on every rank, or on none; all of them in the collectives of one. Collective.

    Args:
        memories: new; this rank's, equally many on every rank and in the same order.
        nbytes: bytes of one rank's part of each block, the same on every rank.
        exchange: the group.
        stages: what is left to do: all, or all but "allocate" where that was done, and voted on, before.
        what: what the memories are, for errors. limit: of each stage, where the exchange is watched.

    Returns:
        For each block None: every rank holds it, mapped. Else, the same text on every rank: which ranks failed, in
        which stage and why; then every rank has released that memory, and the other blocks go on without it.

    Raises:
        RendezvousError: an import that is a collective of its own failed in it; fatal.
        Exception: else only what the exchange raises, where a peer is gone or late; all memories are released then too.
    """
    refusals: list[str | None] = [None] * len(memories)
    handles: list[bytes] = [bytes(HANDLE_BYTES)] * len(memories)
    everyones: list[list[bytes]] = [[] for _ in memories]

    def export(place: int) -> None:
        handle = memories[place].export()
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"a handle of {len(handle)} bytes; {HANDLE_BYTES} are required")
        handles[place] = handle

    local: dict[str, Callable[[int], None]] = {
        "allocate": lambda place: memories[place].allocate(nbytes[place]),
        "export": export,
        "import": lambda place: memories[place].import_(everyones[place]),
        "map": lambda place: memories[place].map(),
    }
    try:
        for stage in stages:
            named = at(exchange, f"{stage} of {what}", limit)
            if stage in local:
                for place in _attempt(stage, local[stage], refusals, named):
                    memories[place].release()
                if None not in refusals:
                    break
                continue
            for of_rank in named.gather(b"".join(handles)):
                for place, of_block in enumerate(everyones):
                    of_block.append(of_rank[place * HANDLE_BYTES : (place + 1) * HANDLE_BYTES])
    except BaseException:
        for memory in memories:
            memory.release()
        raise
    return refusals


def _attempt(stage: str, act: Callable[[int], None], refusals: list[str | None], exchange: Exchange) -> list[int]:
    """One local stage of the blocks that nobody refused yet, and its vote. The places of those refused now."""
    failures = [""] * len(refusals)
    for place, refusal in enumerate(refusals):
        if refusal is None:
            try:
                act(place)
            except RendezvousError:  # this rank left a collective: there is nobody to vote with
                raise
            except Exception as error:  # whatever it is: a rank that leaves here would leave its peers waiting
                failures[place] = f"rank {exchange.rank}: {stage}: {describe(error)}"
    votes = exchange.min([int(not failure) for failure in failures])
    failed = [place for place, vote in enumerate(votes) if not vote]
    if not failed:
        return []
    said = b"".join(failures[place].encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0") for place in failed)
    of_ranks = exchange.gather(said)
    for number, place in enumerate(failed):
        texts = (of_rank[number * TEXT_BYTES : (number + 1) * TEXT_BYTES].rstrip(b"\0") for of_rank in of_ranks)
        refusals[place] = "; ".join(text.decode(errors="ignore") for text in texts if text)
    return failed


def describe(error: Exception) -> str:
    """An exception on one line, whatever its text is, or does."""
    try:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    except Exception:  # not even its text may keep this rank from the vote
        return type(error).__name__
