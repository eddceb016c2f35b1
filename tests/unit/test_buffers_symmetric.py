"""Making shared memory: every rank or none, with the same word on each, whatever fails where."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from buffer_groups import descriptors, in_threads, mapped, mappings, over_gloo

from k3comm.buffers.host import HostMemory
from k3comm.buffers.symmetric import HANDLE_BYTES, STAGES, TEXT_BYTES, SymmetricMemory, establish, establish_all
from k3comm.errors import ClosedError, CommunicationTimeoutError, InputError
from k3comm.negotiate.exchange import SoloExchange
from k3comm.testing import FakeMachine, FakeMemory, Fault, ThreadExchange, assert_identical, run_ranks

LOCAL_STAGES = [stage for stage in STAGES if stage != "exchange"]


def outcome(machine: FakeMachine, exchange: ThreadExchange, nbytes: int = 4096) -> str | None:
    return establish(machine.memory(exchange.rank, exchange.size), nbytes, exchange)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_rank_reaches_every_block(world_size: int) -> None:
    before = descriptors()

    def rank(exchange: ThreadExchange) -> list[int]:
        memory = HostMemory(exchange.rank, world_size)
        assert memory.nbytes == 0
        assert establish(memory, 1000, exchange) is None
        assert memory.nbytes == 1000
        for peer in range(world_size):
            block = memory.block(peer)
            assert (block.dtype, tuple(block.shape), block.device.type) == (torch.uint8, (1000,), "cpu")
            assert block.data_ptr() % 4096 == 0
            assert not block[world_size:].any(), "it starts as zeros"
            block[exchange.rank] = 100 + exchange.rank
        exchange.min([0])
        seen = [int(memory.block(peer)[:world_size].sum()) for peer in range(world_size)]
        exchange.min([0])
        memory.release()
        return seen

    seen = in_threads(world_size, rank)
    assert seen == [[sum(range(100, 100 + world_size))] * world_size] * world_size
    assert descriptors() == before


@pytest.mark.parametrize("guilty", [0, 2])
@pytest.mark.parametrize("stage", LOCAL_STAGES)
def test_a_failure_is_the_same_word_on_every_rank(stage: str, guilty: int) -> None:
    before = descriptors(), mappings()
    machine = FakeMachine(Fault(rank=guilty, stage=stage))
    texts = in_threads(3, lambda exchange: outcome(machine, exchange))
    assert assert_identical(texts) == f"rank {guilty}: {stage}: OSError: [Errno 12] made to fail"
    assert machine.live == machine.mapped == 0
    assert (descriptors(), mappings()) == before
    # Nobody went on, and everybody let go once.
    later = LOCAL_STAGES[LOCAL_STAGES.index(stage) + 1 :]
    assert [machine.calls[rank, one] for rank in range(3) for one in later] == [0] * 3 * len(later)
    assert [machine.calls[rank, "release"] for rank in range(3)] == [1, 1, 1]


def test_a_garbled_handle_is_found_out_by_its_peers() -> None:
    machine = FakeMachine(Fault(rank=1, stage="exchange"))
    text = assert_identical(in_threads(3, lambda exchange: outcome(machine, exchange)))
    assert text == "; ".join(
        f"rank {rank}: import: InputError: the handle of rank 1 is not one of this version's host memory"
        for rank in (0, 2)
    )
    assert machine.live == 0


def test_several_that_fail_are_all_named() -> None:
    machine = FakeMachine(
        Fault(rank=0, stage="map", error=RuntimeError("no space\nleft")),
        Fault(rank=2, stage="map", error=KeyError("x")),
    )
    text = assert_identical(in_threads(3, lambda exchange: outcome(machine, exchange)))
    assert text == "rank 0: map: RuntimeError: no space left; rank 2: map: KeyError: 'x'"


def test_the_second_call_fails_and_the_third_does_not() -> None:
    machine = FakeMachine(Fault(rank=1, stage="export", nth=2))

    def rank(exchange: ThreadExchange) -> list[str | None]:
        return [outcome(machine, exchange) for _ in range(3)]

    assert assert_identical(in_threads(2, rank)) == [
        None,
        "rank 1: export: OSError: [Errno 12] made to fail",
        None,
    ]
    assert machine.calls[1, "export"] == 3


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Unspeakable(), "Unspeakable"),
        (ValueError("\ud800 lone"), "ValueError: ? lone"),
        (ValueError("x" * 1000), "ValueError: " + "x" * (TEXT_BYTES - 30)),
        (ValueError("é" * 1000), "ValueError: " + "é" * ((TEXT_BYTES - 30) // 2)),
        (ValueError("xé" * 1000), "ValueError: " + "xé" * ((TEXT_BYTES - 30) // 3)),
        (MemoryError(), "MemoryError: "),
    ],
)
def test_any_error_has_a_text_of_fixed_length(error: Exception, text: str) -> None:
    machine = FakeMachine(Fault(rank=0, stage="allocate", error=error))
    assert assert_identical(in_threads(2, lambda e: outcome(machine, e))) == f"rank 0: allocate: {text}"


def test_votes_are_few() -> None:
    exchanges: list[ThreadExchange] = []

    def rank(exchange: ThreadExchange) -> None:
        exchanges.append(exchange)
        assert establish(HostMemory(exchange.rank, 2), 64, exchange) is None

    in_threads(2, rank)
    assert [exchange.collectives for exchange in exchanges] == [5, 5]


class ShortHandle(HostMemory):
    def export(self) -> bytes:
        return super().export()[:-1] if self.rank else super().export()


def test_a_handle_of_another_length_never_reaches_the_gather() -> None:
    """Unequal lengths end a process with gloo."""

    def rank(exchange: ThreadExchange) -> str | None:
        return establish(ShortHandle(exchange.rank, 2), 64, exchange)

    text = assert_identical(in_threads(2, rank))
    assert text == f"rank 1: export: ValueError: a handle of {HANDLE_BYTES - 1} bytes; {HANDLE_BYTES} are required"


def test_a_rank_that_is_late_in_a_stage() -> None:
    """The others end within their deadline and let go."""
    machine = FakeMachine(Fault(rank=1, stage="import", error=None, delay=0.6))

    def rank(exchange: ThreadExchange) -> str:
        with pytest.raises(CommunicationTimeoutError):
            outcome(machine, exchange)
        return "ended"

    assert in_threads(3, rank, deadline=0.2) == ["ended"] * 3
    assert machine.live == machine.mapped == 0


def test_a_delay_within_the_deadline_is_no_failure() -> None:
    machine = FakeMachine(Fault(rank=0, stage="map", error=None, delay=0.05))
    assert in_threads(2, lambda exchange: outcome(machine, exchange)) == [None, None]


def test_a_rank_that_is_interrupted_lets_go() -> None:
    machine = FakeMachine(Fault(stage="map", error=None))
    memory = machine.memory(0, 1)

    class Interrupted(SoloExchange):
        def gather(self, payload: bytes) -> list[bytes]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        establish(memory, 64, Interrupted())
    assert machine.live == 0


def test_slots_run_out_on_every_rank_alike() -> None:
    machine = FakeMachine(slots=2)

    def rank(exchange: ThreadExchange) -> list[str | None]:
        kept = [machine.memory(exchange.rank, 2) for _ in range(3)]
        texts = [establish(memory, 64, exchange) for memory in kept]
        kept[0].release()
        texts.append(outcome(machine, exchange))
        return texts

    full = "; ".join(f"rank {rank}: map: OSError: [Errno 28] all 2 slots are in use" for rank in range(2))
    assert assert_identical(in_threads(2, rank)) == [None, None, full, None]
    assert machine.mapped == 4


def test_in_a_pretended_capture_every_stage_is_an_error() -> None:
    machine = FakeMachine()
    machine.capturing = True
    memory = machine.memory(0, 1)
    for call in (lambda: memory.allocate(64), memory.export, lambda: memory.import_([b""]), memory.map):
        with pytest.raises(AssertionError, match="while a graph is captured"):
            call()
    memory.release()


def test_a_fault_names_a_stage() -> None:
    with pytest.raises(
        InputError, match=r"^Fault.stage: 'bind' given; accepted are allocate, export, exchange, import"
    ):
        Fault(stage="bind")


def test_the_fake_is_the_interface() -> None:
    first, second = mapped(2, 300, FakeMachine().memory)
    assert isinstance(first, FakeMemory)
    assert isinstance(first, SymmetricMemory)
    assert first.nbytes == 300
    first.block(1)[7] = 9
    assert second.block(1)[7] == 9
    first.release()
    with pytest.raises(ClosedError):
        first.block(0)


def test_thread_exchanges() -> None:
    def rank(exchange: ThreadExchange) -> tuple[Any, ...]:
        least = exchange.min([exchange.rank, -exchange.rank, 2**62 - exchange.rank])
        return least, exchange.gather(bytes([exchange.rank])), exchange.rank, exchange.size

    assert in_threads(3, rank) == [([0, -2, 2**62 - 2], [b"\0", b"\1", b"\2"], rank, 3) for rank in range(3)]

    def uneven(exchange: ThreadExchange) -> None:
        exchange.gather(b"x" * exchange.rank)

    with pytest.raises(InputError, match=r"payloads of \[0, 1\] bytes"):
        in_threads(2, uneven)


# Real processes


def over_processes(faults: Sequence[Fault]) -> tuple[list[str | None], int, bool]:
    """Negotiates over gloo, once for each fault, then without any."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    exchange = over_gloo()
    before = descriptors(), mappings()
    machine = FakeMachine()
    texts = []
    for fault in faults:
        machine = FakeMachine(fault)
        texts.append(establish(machine.memory(rank, world_size), 1 << 16, exchange))
    unchanged = (descriptors(), mappings()) == before
    memory = HostMemory(rank, world_size)
    texts.append(establish(memory, 1 << 16, exchange))
    memory.block((rank + 1) % world_size).fill_(rank)
    exchange.min([0])
    value = memory.block(rank)
    assert (value == (rank - 1) % world_size).all()
    memory.release()
    return texts, machine.live, unchanged


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_agree_at_each_failure(world_size: int) -> None:
    places = [*itertools.product(STAGES, sorted({0, world_size - 1}))]
    faults = [Fault(rank=guilty, stage=stage) for stage, guilty in places]
    texts, live, unchanged = assert_identical(run_ranks(over_processes, world_size, faults, deadline=60))
    assert live == 0
    assert unchanged
    for (stage, guilty), text in zip(places, texts[:-1], strict=True):
        assert text is not None
        if stage == "exchange":
            assert f"import: InputError: the handle of rank {guilty} is not" in text
        else:
            assert text == f"rank {guilty}: {stage}: OSError: [Errno 12] made to fail"
    assert texts[-1] is None


@pytest.mark.parametrize("stage", LOCAL_STAGES)
def test_a_block_that_fails_leaves_the_others(stage: str) -> None:
    """Two blocks in the collectives of one; the second one's n-th stage fails on one rank."""
    machine, sound = FakeMachine(Fault(rank=1, stage=stage)), FakeMachine()

    def rank(exchange: ThreadExchange) -> tuple[list[str | None], int]:
        memories = [sound.memory(exchange.rank, 3), machine.memory(exchange.rank, 3)]
        refusals = establish_all(memories, [100, 200], exchange)
        memories[0].block(2)[exchange.rank] = 1
        return refusals, exchange.collectives

    refusals, collectives = assert_identical(in_threads(3, rank))
    assert refusals == [None, f"rank 1: {stage}: OSError: [Errno 12] made to fail"]
    assert collectives == 6  # four votes, the exchange, and the texts of the one that failed
    assert (machine.live, sound.live) == (0, 3)
