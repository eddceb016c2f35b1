"""Device memory and the tiers that stage in it, over a fake of torch's module: what is asked of torch, and how.

Ranks are threads and blocks lie on the CPU. torch's two operators have stand-ins for CPU tensors, which find the peers'
blocks as torch does: by the storage of the view that they are given.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from buffer_groups import in_threads
from tier_stand_ins import ON_CPU, Handle, Machine, Module, Rank, context_of, exact_case, proposal_of
from torch import Tensor

from k3comm import InputError, LatentMoESpec, RendezvousError, Tier
from k3comm.buffers import cuda
from k3comm.buffers.cuda import CudaMemory, Torch, handles_refusal
from k3comm.buffers.symmetric import HANDLE_BYTES, SymmetricMemory, establish
from k3comm.errors import CaptureError, ClosedError, NegotiationError
from k3comm.facts import Verdict
from k3comm.kernels import reference
from k3comm.negotiate.blocks import plan_blocks
from k3comm.testing import ThreadExchange, h200_facts, laptop_facts, thread_exchanges
from k3comm.tiers import Phase, TokenRange, Window, Windows, choose_windows, plugin
from k3comm.tiers.staged import FIRST_ROWS, first_rows

STAGED = (Tier.MULTIMEM_AR, Tier.PEER_AR)
SPEC = LatentMoESpec(hidden_size=64, latent_size=24, top_k=2, max_tokens=4096)
proposal_at = partial(proposal_of, SPEC, world_size=3)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Machine], None]]:
    """Stand-ins for torch's operators, on the machine that the fixture is called with."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a CPU build has none
    machines: list[Machine] = []
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("two_shot_all_reduce_", "multimem_all_reduce_"):

        def run(x: Tensor, reduce_op: str, group_name: str, name: str = name) -> Tensor:
            assert (reduce_op, group_name) == ("sum", "7")
            machines[-1].all_reduce_(name, x)
            return x

        library.impl(name, run, "CPU")
    yield machines.append
    library._destroy()


# The adapter


def test_torch_has_what_is_used_of_it() -> None:
    """The API is alpha: this is what notices that it moved, on the torch that the tests run with."""
    module = cuda.TORCH.module
    assert {"empty", "rendezvous", "get_backend"} <= set(dir(module))
    for name in ("two_shot_all_reduce_", "multimem_all_reduce_"):
        schema = str(getattr(torch.ops.symm_mem, name).default._schema)
        assert schema == f"symm_mem::{name}(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)"
    handle = torch._C._distributed_c10d._SymmetricMemory
    assert {"get_buffer", "multicast_ptr", "rank", "world_size"} <= set(dir(handle))
    why = cuda.TORCH.refusal(torch.device("cuda", 0))
    assert why is None or "torch's symmetric memory on cuda is" in why  # of its version it has no complaint


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("2.10.1", False), ("2.11.0+cu130", True), ("2.14.1", True), ("2.15.0a0+git1", False), ("junk", False)],
)
def test_versions(version: str, accepted: bool) -> None:
    torch_api = Torch(lambda: Module(Machine(1), 0), version)
    why = torch_api.refusal(ON_CPU)
    memory = CudaMemory(0, 1, group_name="7", device=ON_CPU, torch_api=torch_api)
    if accepted:
        assert why is None
        memory.allocate(16)
        return
    assert why == (
        f"torch {version}: its symmetric memory is an alpha API; this version of k3comm knows it from torch 2.11 to "
        "below 2.15"
    )
    with pytest.raises(OSError, match="alpha API") as caught:
        memory.allocate(16)
    assert caught.value.errno == errno.ENOTSUP


@pytest.mark.parametrize(("backend", "word"), [(None, "absent"), ("NVSHMEM", "NVSHMEM")])
def test_other_allocators_are_refused(backend: str | None, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Module, "get_backend", lambda self, device: backend)
    why = Machine(1).torches[0].refusal(torch.device("cuda", 0))
    assert why == f"torch's symmetric memory on cuda is {word}; accepted is CUDA"


def test_a_module_that_is_not_there_is_a_no() -> None:
    def load() -> Any:
        raise ImportError("no such module")

    why = Torch(load, "2.11.0").refusal(ON_CPU)
    assert why == "torch's symmetric memory can't be asked: ImportError: no such module"


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), errno.ENOMEM),
        (RuntimeError("CUDA driver error: out of memory"), errno.ENOMEM),
        (RuntimeError("CUDA driver error: operation not supported"), errno.EIO),
    ],
)
def test_an_allocation_that_fails_is_an_ordinary_failure(
    error: Exception, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Module, *size: int, **options: Any) -> Tensor:
        raise error

    monkeypatch.setattr(Module, "empty", fail)
    memory = Machine(1).memory(0)
    with pytest.raises(OSError, match=str(error)) as caught:
        memory.allocate(1 << 40)
    assert caught.value.errno == number
    assert memory.nbytes == 0
    memory.release()


@pytest.mark.parametrize("multicast", [False, True])
def test_every_rank_reaches_every_block(multicast: bool) -> None:
    machine = Machine(3, multicast=multicast)

    def rank_of(exchange: ThreadExchange) -> tuple[list[int], int, int]:
        memory = machine.memory(exchange.rank)
        with pytest.raises(ClosedError):
            memory.block(0)
        with torch.inference_mode():
            assert establish(memory, 48, exchange) is None
        assert not memory.block(exchange.rank).any()
        exchange.gather(b"")
        for peer in range(3):
            memory.block(peer)[16 * exchange.rank] = 1 + exchange.rank
        exchange.gather(b"")
        assert memory.pointers == tuple(memory.block(peer).data_ptr() for peer in range(3))
        found = memory.block(exchange.rank)[::16].tolist(), memory.multicast_ptr, memory.multicast_objects
        with pytest.raises(InputError, match="rank: 3 given; accepted are 0 to 2"):
            memory.block(3)
        exchange.gather(b"")
        memory.release()
        memory.release()
        assert (memory.nbytes, memory.pointers, memory.multicast_ptr, memory.multicast_objects) == (0, (), 0, 0)
        with pytest.raises(ClosedError):
            memory.block(0)
        return found

    assert in_threads(3, rank_of) == [([1, 2, 3], 0x7000_0000 * multicast, int(multicast))] * 3


def test_stages_out_of_order_and_bad_arguments() -> None:
    memory = Machine(1).memory(0)
    for early in (memory.export, lambda: memory.import_([bytes(HANDLE_BYTES)]), memory.map):
        with pytest.raises(ClosedError):
            early()
    for bad in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="accepted are whole numbers from 1"):
            memory.allocate(bad)  # type: ignore[arg-type]
    memory.allocate(16)
    with pytest.raises(InputError, match="called again, 16 bytes are there"):
        memory.allocate(16)
    assert len(memory.export()) == HANDLE_BYTES
    with pytest.raises(InputError, match="rank: 2 given for 2 ranks"):
        CudaMemory(2, 2, group_name="7", device=ON_CPU)


def test_a_failed_rendezvous_is_fatal_and_says_so() -> None:
    """No vote follows it: this rank is out of step. The peers, inside, end by their own deadline."""
    machine = Machine(3, deadline=0.5)
    machine.failure[1] = RuntimeError("an import failed")
    exchanges = thread_exchanges(3)
    memories = [machine.memory(rank) for rank in range(3)]
    errors: list[BaseException | None] = [None] * 3

    def run(rank: int) -> None:
        try:
            establish(memories[rank], 64, exchanges[rank])
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(isinstance(error, RendezvousError) for error in errors)
    text = str(errors[1])
    assert text.startswith("rank 1 of 3: torch's rendezvous of 64 bytes on cpu failed: RuntimeError: an import failed")
    assert "the peers may wait in it until their own deadlines" in text
    assert [memory.nbytes for memory in memories] == [0, 0, 0]
    assert len({exchange.collectives for exchange in exchanges}) == 1  # allocate, export, exchange: and no vote


def test_a_rendezvous_of_unknown_memory_is_fatal() -> None:
    machine = Machine(1)
    machine.none_on.add(0)
    with pytest.raises(RendezvousError, match="torch does not know the memory"):
        establish(machine.memory(0), 64, thread_exchanges(1)[0])


def test_histories_that_differ_are_refused_before_torch_hangs() -> None:
    """A rank whose process was in a subgroup's rendezvous counts otherwise, and torch's keys would not meet."""
    machine = Machine(2)
    machine.torches[1].met = 1
    refusals = in_threads(2, lambda exchange: establish(machine.memory(exchange.rank), 64, exchange))
    assert len(set(refusals)) == 1
    assert "the ranks' processes have been in 0, 1 rendezvous" in str(refusals[0])
    assert machine.rendezvous == 0
    machine.torches[0].met = 1
    assert in_threads(2, lambda exchange: establish(machine.memory(exchange.rank), 64, exchange)) == [None, None]
    assert (machine.rendezvous, [one.met for one in machine.torches]) == (1, [2, 2])


def test_handles_that_do_not_go_together() -> None:
    def handle(nbytes: int) -> bytes:
        memory = Machine(1).memory(0)
        memory.allocate(nbytes)
        return memory.export()

    assert handles_refusal([handle(16), handle(16)], 2) is None
    assert handles_refusal([handle(16)], 2) == "handles: 1 given; accepted is one a rank, 2"
    assert "blocks of 16, 32 bytes on ranks 0 to 1" in str(handles_refusal([handle(16), handle(32)], 2))
    for other in (bytes(HANDLE_BYTES), handle(16)[:-1]):
        assert "rank 1: " in str(handles_refusal([handle(16), other], 2))


@pytest.mark.parametrize("wrong", ["rank", "address"])
def test_what_torch_maps_is_looked_at(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "rank":
        monkeypatch.setattr(Handle, "world_size", 2)
        text = "rank 0 of 2 given; accepted is rank 0 of 1"
    else:
        monkeypatch.setattr(Handle, "get_buffer", lambda self, rank, sizes, dtype: torch.zeros(*sizes, dtype=dtype))
        text = "given for this rank's block"
    memory = Machine(1).memory(0)
    refusal = establish(memory, 64, thread_exchanges(1)[0])
    assert refusal is not None
    assert text in refusal
    assert memory.nbytes == 0


# Sizes and places


def windows_of(**tokens: TokenRange) -> Windows[Tier]:
    rows = {Tier[name]: Window(tokens=(one,), decode=Phase.ANY) for name, one in tokens.items()}
    return Windows(tiers=Tier, rows={**rows, max(Tier): Window(tokens=(TokenRange(0),))})


def test_buffers_hold_what_the_windows_may_ask_for() -> None:
    default = choose_windows("default", 3).windows
    assert first_rows(proposal_at(windows=default)) == 4096
    assert first_rows(proposal_at(windows=default, max_tokens=9000)) == 8192
    assert first_rows(proposal_at(windows=default, max_tokens=100)) == 100
    assert first_rows(proposal_at(windows=default, settings={"disabled": {Tier.MULTIMEM_AR}})) == FIRST_ROWS
    assert first_rows(proposal_at(windows=windows_of(PEER_AR=TokenRange(64)))) == 4096
    assert first_rows(proposal_at(windows=windows_of(PEER_AR=TokenRange(1, 300)))) == 300
    assert first_rows(proposal_at(windows=windows_of(FUSED_LANE_AR=TokenRange(1, 300)))) == FIRST_ROWS
    assert first_rows(proposal_at(windows=windows_of(PEER_AR=TokenRange(1, 300)), device="cpu")) == FIRST_ROWS
    assert first_rows(proposal_at()) == FIRST_ROWS


def test_both_tiers_have_one_place_on_gpus_and_one_is_absent_on_cpus() -> None:
    # FUSED_LANE_AR's lane would lie in the block too.
    proposal = proposal_at(windows=choose_windows("sm90", 3).windows, settings={"disabled": {Tier.FUSED_LANE_AR}})
    plan = plan_blocks(proposal)
    kind = plugin(Tier.PEER_AR)
    assert kind is not None
    request = kind.footprint(proposal)
    assert request is not None
    assert plan.places[Tier.MULTIMEM_AR] == plan.places[Tier.PEER_AR]
    assert plan.nbytes[request.block] == request.nbytes
    assert Tier.MULTIMEM_AR not in plan_blocks(proposal_at(device="cpu")).places
    assert Tier.PEER_AR in plan_blocks(proposal_at(device="cpu")).places


def test_verdicts_come_from_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The multicast tier's word is `multicast_verdict`'s, vetoes and all, for the rows that its buffer holds."""
    asked: list[int] = []

    def verdict(facts: object, proposal: object, rows: int) -> tuple[Verdict, Verdict]:
        asked.append(rows)
        return Verdict.yes(rows), Verdict.yes(rows)

    for name, function in (("multimem_ar", "multicast_verdict"), ("peer_ar", "peer_verdict")):
        monkeypatch.setattr(f"k3comm.tiers.{name}.{function}", verdict)
    for tier in STAGED:
        found = plugin(tier)
        assert found is not None
        assert found.verdict(h200_facts(), proposal_at()) == (Verdict.yes(FIRST_ROWS), Verdict.yes(FIRST_ROWS))
    assert asked == [FIRST_ROWS, FIRST_ROWS]
    monkeypatch.undo()
    multicast = plugin(Tier.MULTIMEM_AR)
    assert multicast is not None
    assert not any(multicast.verdict(laptop_facts(), proposal_at(device="cpu")))


# The tiers


@cache
def case_of(world_size: int, hidden: int, latent: int, rows: int) -> tuple[reference.Case, Tensor]:
    return exact_case(world_size, hidden, latent, rows, seed=rows, norm=False)


class StagedRank(Rank):
    """Every number of rows has a case of its own."""

    def _case(self, rows: int) -> tuple[reference.Case, Tensor]:
        spec = self.context.spec
        return case_of(self.exchange.size, spec.hidden_size, spec.latent_size, rows)

    def sums(self, rows: int, lane: int = 0) -> Tensor:
        return self.run(self._case(rows)[0], rows, lane=lane)

    def right(self, out: Tensor) -> bool:
        return torch.equal(out, self._case(out.shape[0])[1])


class Group:
    """torch's process group, as far as its name goes."""

    group_name = "7"


def prepared(machine: Machine, tier: Tier, exchange: ThreadExchange, offset: int = 128, **spec: Any) -> StagedRank:
    proposal = proposal_at(world_size=machine.world_size, **spec)
    kind = plugin(tier)
    assert kind is not None
    request = kind.footprint(proposal)
    assert request is not None
    memory = machine.memory(exchange.rank)
    assert establish(memory, offset + request.nbytes, exchange) is None
    memory.block(exchange.rank).fill_(0xFF)  # NaN in every element: what is not data must not show
    exchange.gather(b"")

    def grow(nbytes: int) -> SymmetricMemory | str:
        more = machine.memory(exchange.rank)
        return establish(more, nbytes, exchange) or more

    context = context_of(
        proposal,
        memory,
        group=Group(),
        device=torch.device("cuda", 0),  # what makes the tiers take torch's operators
        offset=offset,
        establish=grow,
    )
    one = kind()
    one.prepare(context)
    return StagedRank(one, context, exchange)


@pytest.mark.parametrize("tier", STAGED, ids=lambda tier: tier.name)
@pytest.mark.parametrize(("hidden", "latent"), [(64, 24), (40, 40), (30, 13)], ids=["even", "equal widths", "odd"])
def test_results_are_exact_through_one_operator_call(
    tier: Tier, hidden: int, latent: int, stand_ins: Callable[[Machine], None]
) -> None:
    machine = Machine(3, multicast=True)
    stand_ins(machine)
    sizes = (1, 5, 17, FIRST_ROWS)

    def rank_of(exchange: ThreadExchange) -> list[bool]:
        rank = prepared(machine, tier, exchange, hidden_size=hidden, latent_size=latent)
        return [rank.right(rank.sums(rows, lane)) for rows in sizes for lane in (0, 1)]

    assert in_threads(3, rank_of) == [[True] * 8] * 3
    name = "two_shot_all_reduce_" if tier is Tier.PEER_AR else "multimem_all_reduce_"
    assert [called for called, _ in machine.called] == [name] * 8
    for (_, elements), rows in zip(machine.called[::2], sizes, strict=True):
        assert 0 <= elements - rows * (hidden + latent) < 8


def test_lanes_and_results_keep_apart(stand_ins: Callable[[Machine], None]) -> None:
    """Two lanes have buffers of their own, and a result stays what it is when the next call stages."""
    machine = Machine(2)
    stand_ins(machine)

    def rank_of(exchange: ThreadExchange) -> bool:
        rank = prepared(machine, Tier.PEER_AR, exchange)
        pool = rank.tier._pool  # type: ignore[attr-defined]
        views = [pool.view("partials", FIRST_ROWS, lane=lane) for lane in (0, 1)]
        starts = [view.data_ptr() for view in views]
        assert starts[1] - starts[0] >= views[0].numel() * 2
        own = rank.context.memory.block(exchange.rank)
        assert starts[0] >= own.data_ptr() + 128  # what lies before is somebody else's
        first = rank.sums(9)
        rank.sums(5)
        return rank.right(first)

    assert in_threads(2, rank_of) == [True, True]


@pytest.mark.parametrize("tier", STAGED, ids=lambda tier: tier.name)
def test_growth_keeps_what_was(tier: Tier, stand_ins: Callable[[Machine], None]) -> None:
    machine = Machine(2, multicast=True)
    stand_ins(machine)

    def rank_of(exchange: ThreadExchange) -> list[int]:
        rank = prepared(machine, tier, exchange)
        before = rank.tier.memory()
        view = rank.tier._pool.view("partials", 3)  # type: ignore[attr-defined]
        with pytest.raises(InputError, match=r"more after reserve\(300\)"):
            rank.sums(300)
        assert rank.tier.reserve(300) == 2 * FIRST_ROWS
        after = rank.tier.memory()
        assert rank.right(rank.sums(300))
        assert view.data_ptr() == rank.context.memory.block(exchange.rank).data_ptr() + view.storage_offset() * 2
        assert after["staging, retired"] >= before["staging"] > before["staging, retired"] == 0
        # Past max_tokens, 4096 here: what is asked for, and the next time the double.
        assert rank.tier.reserve(5000) == 5120
        assert rank.tier.memory()["staging"] <= 5120 // (2 * FIRST_ROWS) * after["staging"]
        assert rank.right(rank.sums(4097))
        assert rank.tier.reserve(5121) == 10240
        rank.tier.close()
        return [rank.context.memory.nbytes]  # lent, so not the tier's to release

    assert all(nbytes > 0 for (nbytes,) in in_threads(2, rank_of))


@pytest.mark.parametrize("tier", STAGED, ids=lambda tier: tier.name)
def test_a_miss_during_capture_raises(
    tier: Tier, stand_ins: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(1, multicast=True)
    stand_ins(machine)
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    rank = prepared(machine, tier, thread_exchanges(1)[0])
    capturing[0] = True
    assert rank.right(rank.sums(FIRST_ROWS))
    with pytest.raises(CaptureError, match=r"call reserve\(257\) on every rank before the capture"):
        rank.sums(FIRST_ROWS + 1)
    with pytest.raises(CaptureError, match="it is collective and allocates"):
        rank.tier.reserve(FIRST_ROWS + 1)
    assert machine.rendezvous == 1


def test_multimem_needs_the_address_that_torch_gives(stand_ins: Callable[[Machine], None]) -> None:
    machine = Machine(1)
    stand_ins(machine)
    with pytest.raises(LookupError, match="torch gave the staging block no multicast address"):
        prepared(machine, Tier.MULTIMEM_AR, thread_exchanges(1)[0])
    machine.multicast = True
    rank = prepared(machine, Tier.MULTIMEM_AR, thread_exchanges(1)[0])
    machine.multicast = False
    with pytest.raises(NegotiationError, match="no multicast address"):
        rank.tier.reserve(FIRST_ROWS + 1)
    assert rank.right(rank.sums(FIRST_ROWS))
    assert rank.tier.memory()["staging, retired"] == 0
