"""Staging: any layout in, a buffer for each user, growth that keeps what was, and a clear word in capture."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import attrs
import pytest
import torch
from buffer_groups import in_threads, mapped, mappings, over_gloo
from hypothesis import given
from hypothesis import strategies as st

from k3comm.buffers.alias import overlaps
from k3comm.buffers.host import HostMemory
from k3comm.buffers.staging import ALIGNMENT, BEYOND_ROWS, Slot, StagingLayout, StagingPool, staging_bytes
from k3comm.buffers.symmetric import SymmetricMemory, establish
from k3comm.errors import CaptureError, ClosedError, InputError, NegotiationError, PeerTimeoutError
from k3comm.negotiate.exchange import GroupExchange
from k3comm.testing import FakeMachine, Fault, ThreadExchange, assert_identical, run_ranks

ROUTED, SHARED = Slot("routed", 24), Slot("shared", 24)  # of equal width
WIDE, EXACT = Slot("wide", 40), Slot("exact", 24, "float32")


def never(nbytes: int) -> SymmetricMemory | str:
    raise AssertionError("nothing may grow here")


def pool_of(
    *slots: Slot,
    rows: int = 4,
    ceiling: int = 64,
    lanes: int = 1,
    capturing: Callable[[], bool] | None = None,
    grow: Callable[[int], SymmetricMemory | str] = lambda nbytes: mapped(1, nbytes)[0],
) -> StagingPool:
    layout = StagingLayout(slots=slots, rows=rows, world_size=1, lanes=lanes)
    (memory,) = mapped(1, layout.nbytes)
    return StagingPool(memory, layout, ceiling=ceiling, grow=grow, capturing=capturing)


def numbers(rows: int, width: int, start: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return ((torch.arange(rows * width) + start) % 251).view(rows, width).to(dtype)


# Sizes


def test_the_layout_has_no_overlaps_and_no_gaps() -> None:
    layout = StagingLayout(slots=(ROUTED, WIDE, EXACT), rows=5, world_size=3, lanes=2)
    parts = []
    for lane in range(2):
        parts.append((layout.pad(lane), layout.pad_bytes))
        parts += [(layout.offset(lane, place), layout.bytes_of(slot)) for place, slot in enumerate(layout.slots)]
    assert parts[0][0] == 0
    assert [start + size for start, size in parts] == [*[start for start, _ in parts[1:]], layout.nbytes]
    assert all(start % ALIGNMENT == 0 for start, _ in parts)
    assert layout.pad_bytes >= 3 * 64
    assert [layout.bytes_of(slot) for slot in layout.slots] == [256, 512, 512]
    assert staging_bytes([ROUTED, WIDE, EXACT], 5, 3, 2) == layout.nbytes


@given(width=st.integers(1, 2**33), rows=st.integers(1, 2**33), world_size=st.integers(1, 16), lanes=st.integers(1, 4))
def test_sizes_never_overflow(width: int, rows: int, world_size: int, lanes: int) -> None:
    nbytes = staging_bytes([Slot("a", width), Slot("b", width, "float32")], rows, world_size, lanes)
    least = lanes * (64 * world_size + 6 * rows * width)
    assert least <= nbytes < least + lanes * 3 * ALIGNMENT


@pytest.mark.parametrize("limit", [2**31, 2**32, 2**63])
def test_at_the_powers_of_two(limit: int) -> None:
    for rows in (limit // 2048 - 1, limit // 2048, limit // 2048 + 1):
        layout = StagingLayout(slots=(Slot("a", 1024), Slot("b", 8)), rows=rows, world_size=1)
        assert layout.offset(0, 1) - layout.offset(0, 0) == 2048 * rows


@pytest.mark.parametrize(
    ("now", "asked", "ceiling", "then"),
    [(4, 5, 64, 8), (4, 8, 64, 8), (4, 9, 64, 9), (4, 64, 64, 64), (48, 49, 64, 64), (3, 4, 5, 5), (1, 2, 2**40, 2)],
)
def test_growth_doubles_and_is_clamped(now: int, asked: int, ceiling: int, then: int) -> None:
    assert StagingLayout(slots=(ROUTED,), rows=now, world_size=2).grown(asked, ceiling).rows == then


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Slot("a", 0), "slot a: width 0 given; accepted are whole numbers from 1"),
        (lambda: Slot("a", True), "slot a: width True given; accepted are whole numbers from 1"),
        (lambda: Slot("a", 8, "float16"), "slot a: dtype 'float16' given; accepted are bfloat16, float32"),
        (lambda: staging_bytes([], 1, 1), "slots: none given; accepted is one or more, each name once"),
        (lambda: staging_bytes([ROUTED, WIDE, ROUTED], 1, 1), "slots: routed, wide, routed given; accepted is"),
        (lambda: staging_bytes([ROUTED], 0, 1), "rows: 0 given; accepted are whole numbers from 1"),
        (lambda: staging_bytes([ROUTED], 1, 0), "world_size: 0 given"),
        (lambda: staging_bytes([ROUTED], 1, 1, 0), "lanes: 0 given"),
    ],
)
def test_wrong_shapes(make: Callable[[], object], text: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(text)


def test_a_pool_must_fit() -> None:
    layout = StagingLayout(slots=(ROUTED,), rows=4, world_size=1)
    (memory,) = mapped(1, layout.nbytes + 128)
    assert StagingPool(memory, layout, ceiling=4, grow=never, offset=128).rows == 4
    for offset in (-128, 64, 256):
        with pytest.raises(InputError, match=f"^offset: {offset} given for {layout.nbytes} bytes in a block of"):
            StagingPool(memory, layout, ceiling=4, grow=never, offset=offset)
    with pytest.raises(InputError, match=r"^ceiling: 3 given for 4 rows"):
        StagingPool(memory, layout, ceiling=3, grow=never)
    with pytest.raises(InputError, match=r"^layout: for 2 ranks, memory of 1 given"):
        StagingPool(memory, attrs.evolve(layout, world_size=2), ceiling=4, grow=never)


# Staging

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "columns of more": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "odd offset": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "every other row": lambda x: torch.stack([x, x], dim=1).view(2 * x.shape[0], -1)[::2],
    "every other element": lambda x: torch.stack([x, x], dim=2).view(x.shape[0], -1)[:, ::2],
    "one row expanded": lambda x: x[:1].expand(x.shape[0], -1),
    "one number expanded": lambda x: x[1, 1].expand(x.shape),
    "overlapping as_strided": lambda x: x.reshape(-1).as_strided(x.shape, (3, 1)),
    "with a gradient": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("slot", [ROUTED, EXACT], ids=lambda slot: slot.dtype)
def test_any_layout(name: str, slot: Slot) -> None:
    pool = pool_of(ROUTED, EXACT)
    dtype = torch.bfloat16 if slot is ROUTED else torch.float32
    x = LAYOUTS[name](numbers(3, 24, dtype=dtype))
    view = pool.stage(slot.name, x)
    assert torch.equal(view, x)
    assert view.is_contiguous()
    assert not view.requires_grad
    assert view.data_ptr() % ALIGNMENT == 0
    assert torch.equal(pool.peers(slot.name, 3)[0], x)


def test_bits_pass() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    pool = pool_of(Slot("bits", 256), rows=256, ceiling=256)
    for x in (bits.view(256, 256), bits.view(256, 256).t()):
        assert torch.equal(pool.stage("bits", x).view(torch.int16), x.contiguous().view(torch.int16))


def test_equal_widths_do_not_alias() -> None:
    pool = pool_of(ROUTED, SHARED)
    routed = pool.stage("routed", numbers(4, 24))
    shared = pool.stage("shared", numbers(4, 24, 100))
    assert not overlaps(routed, shared)
    assert torch.equal(routed, numbers(4, 24))
    assert torch.equal(shared, numbers(4, 24, 100))


def test_a_view_is_good_until_the_next_stage_of_its_name() -> None:
    pool = pool_of(ROUTED, SHARED, WIDE, EXACT, lanes=2)
    first = pool.stage("routed", numbers(3, 24))
    for name, width, dtype in (
        ("shared", 24, torch.bfloat16),
        ("wide", 40, torch.bfloat16),
        ("exact", 24, torch.float32),
    ):
        pool.stage(name, numbers(4, width, 7, dtype))
    pool.stage("routed", numbers(4, 24, 9), lane=1)
    assert torch.equal(first, numbers(3, 24)), "others do not touch it"
    second = pool.stage("routed", numbers(2, 24, 50))
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(first[:2], second)
    assert torch.equal(first[2], numbers(3, 24)[2]), "only the rows that were staged"


def test_two_lanes_share_nothing() -> None:
    pool = pool_of(ROUTED, WIDE, lanes=2)
    views = [
        pool.stage(name, numbers(4, width, lane), lane=lane)
        for lane in range(2)
        for name, width in (("routed", 24), ("wide", 40))
    ]
    assert not any(overlaps(a, b) for place, a in enumerate(views) for b in views[:place])
    for number, (view, start) in enumerate(zip(views, (0, 0, 1, 1), strict=True)):
        assert torch.equal(view, numbers(4, (24, 40)[number % 2], start))


def test_two_communicators_share_nothing() -> None:
    base, draft = pool_of(ROUTED), pool_of(ROUTED)
    view = base.stage("routed", numbers(4, 24))
    draft.stage("routed", numbers(4, 24, 77))
    draft.close()
    assert torch.equal(view, numbers(4, 24))
    assert torch.equal(base.stage("routed", numbers(2, 24, 5)), numbers(2, 24, 5))


def test_staging_what_was_written_in_place_copies_nothing() -> None:
    pool = pool_of(ROUTED)
    lane = pool.view("routed", 3)
    lane.copy_(numbers(3, 24))
    assert pool.stage("routed", lane).data_ptr() == lane.data_ptr()
    assert torch.equal(lane, numbers(3, 24))


def test_staging_from_the_buffer_itself() -> None:
    """Overlapping copies are undefined in torch."""
    pool = pool_of(ROUTED)
    pool.view("routed", 4).copy_(numbers(4, 24))
    assert torch.equal(pool.stage("routed", pool.view("routed", 4)[1:]), numbers(4, 24)[1:])
    pool.view("routed", 4).copy_(numbers(4, 24))
    assert torch.equal(pool.stage("routed", pool.view("routed", 4).flip(0)), numbers(4, 24).flip(0))
    pool.view("routed", 4).copy_(numbers(4, 24))
    square = pool.view("routed", 4).view(-1).as_strided((4, 24), (1, 4))
    right = square.clone()
    assert torch.equal(pool.stage("routed", square), right)


def test_no_rows_are_no_work() -> None:
    pool = pool_of(ROUTED, capturing=lambda: True)
    assert pool.stage("routed", numbers(0, 24)).shape == (0, 24)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(3, 25, dtype=torch.bfloat16),
        torch.zeros(3, 24),
        torch.zeros(3, 24, dtype=torch.int16),
        torch.zeros(72, dtype=torch.bfloat16),
        torch.zeros(3, 24, 1, dtype=torch.bfloat16),
        torch.zeros(3, 24, dtype=torch.bfloat16, device="meta"),
        torch.zeros((), dtype=torch.bfloat16),
    ],
    ids=lambda wrong: f"{wrong.dtype} {tuple(wrong.shape)} {wrong.device}",
)
def test_wrong_tensors(wrong: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"^stage routed: .* given; accepted is torch.bfloat16 \(m, 24\) on cpu"):
        pool_of(ROUTED).stage("routed", wrong)


def test_unknown_users() -> None:
    pool = pool_of(ROUTED, WIDE, lanes=2)
    for name, lane in (("narrow", 0), ("routed", 2), ("routed", -1)):
        with pytest.raises(
            InputError, match=f"^'{name}', lane {lane} given; accepted are routed, wide and lanes 0 to 1"
        ):
            pool.view(name, 1, lane=lane)


# Room


@pytest.mark.parametrize("capturing", [False, True])
def test_rows_at_the_capacity(capturing: bool) -> None:
    """One less and as many fit, one more does not, whatever the entry; and nothing tries to grow."""
    pool = pool_of(ROUTED, capturing=lambda: capturing, grow=never)
    entries: list[Callable[[int], object]] = [
        lambda rows: pool.stage("routed", numbers(rows, 24)),
        lambda rows: pool.view("routed", rows),
        lambda rows: pool.peers("routed", rows),
    ]
    for entry in entries:
        entry(3)
        entry(4)
        with pytest.raises(CaptureError if capturing else InputError, match=r"^routed: 5 rows .* reserve\(5\)"):
            entry(5)
    assert pool.rows == 4


@given(rows=st.integers(1, 40), capacity=st.integers(1, 40))
def test_what_fits_is_what_can_be_staged(rows: int, capacity: int) -> None:
    pool = pool_of(Slot("a", 3), rows=capacity, grow=never)
    x = numbers(rows, 3)
    if rows <= pool.rows:
        assert torch.equal(pool.stage("a", x), x)
    else:
        with pytest.raises(InputError):
            pool.stage("a", x)


def test_growing_twice_keeps_what_was() -> None:
    pool = pool_of(ROUTED, SHARED, rows=4, ceiling=20)
    sizes, views = [pool.nbytes], [pool.stage("routed", numbers(4, 24, 1))]
    addresses = [views[0].data_ptr()]
    assert pool.retired_bytes == 0
    for asked, rows in ((5, 8), (17, 17)):
        pool.reserve(asked)
        assert pool.rows == rows
        assert pool.retired_bytes == sum(sizes)
        views.append(pool.stage("routed", numbers(rows, 24, rows)))
        addresses.append(views[-1].data_ptr())
        sizes.append(pool.nbytes)
    assert [view.data_ptr() for view in views] == addresses
    for view, start in zip(views, (1, 8, 17), strict=True):
        assert torch.equal(view, numbers(view.shape[0], 24, start))
    assert not any(overlaps(a, b) for place, a in enumerate(views) for b in views[:place])
    assert sum(sizes[:-1]) < 2 * sizes[-1]


def test_a_retired_buffer_stays_mapped_without_a_view() -> None:
    """A captured graph holds an address, not a tensor: nothing may come to lie there."""
    pool = pool_of(ROUTED, ceiling=64)
    before = mappings()
    view = pool.stage("routed", numbers(4, 24))
    start, end = view.data_ptr(), view.data_ptr() + view.numel() * 2
    gone = weakref.ref(view)
    del view
    assert gone() is None
    pool.reserve(64)
    assert mappings() == before + 1
    for _ in range(3):
        fresh = pool.stage("routed", numbers(64, 24))
        other = pool_of(ROUTED, rows=64)
        for memory in (fresh, other.view("routed", 64)):
            assert memory.data_ptr() >= end or memory.data_ptr() + memory.numel() * 2 <= start
    pool.close()
    del fresh, other, memory
    assert mappings() == before - 1


def test_reserve_that_has_nothing_to_do() -> None:
    pool = pool_of(ROUTED, grow=never)
    for rows in (0, 1, 4):
        pool.reserve(rows)
    assert (pool.rows, pool.retired_bytes) == (4, 0)


def test_reserve_beyond_the_ceiling() -> None:
    pool = pool_of(ROUTED, ceiling=10, grow=never)
    for rows in (11, -1, 4.0):
        with pytest.raises(InputError, match=rf"^reserve: {rows} rows given; accepted are 0 to 10 \(max_tokens\)"):
            pool.reserve(rows)  # type: ignore[arg-type]


def test_a_pool_counts_its_own_bytes_alone() -> None:
    """Of a block that is lent, in which others have theirs, too."""
    layout = StagingLayout(slots=(ROUTED,), rows=4, world_size=1)
    (memory,) = mapped(1, layout.nbytes + 4096)
    pool = StagingPool(memory, layout, ceiling=64, grow=lambda nbytes: mapped(1, nbytes)[0], offset=4096, borrowed=True)
    assert (pool.nbytes, pool.retired_bytes) == (layout.nbytes, 0)
    pool.reserve(5)
    assert (pool.nbytes, pool.retired_bytes) == (layout.grown(5, 64).nbytes, layout.nbytes)
    pool.close()
    assert memory.nbytes > 0


def test_beyond_the_ceiling_the_first_growth_takes_what_is_asked_for() -> None:
    """And the next ones double, however little more is asked for: two buffers are retired for 600 rows, one by one."""
    pool = pool_of(ROUTED, rows=1000, ceiling=1000)
    sizes = [pool.nbytes]
    for rows in range(1001, 1601):
        before = pool.rows
        pool.reserve(rows, beyond=True)
        if pool.rows != before:
            sizes.append(pool.nbytes)
            assert pool.rows == {1000: 1024, 1024: 2048}[before], "1001 rows cost 1024, and no room for 2000"
        assert torch.equal(pool.stage("routed", numbers(rows, 24)), numbers(rows, 24))
    assert (len(sizes), pool.retired_bytes) == (3, sum(sizes[:-1]))
    pool.reserve(9999, beyond=True)
    assert pool.rows == 40 * BEYOND_ROWS, "more than the double: what is asked for again"
    with pytest.raises(InputError, match=r"^reserve: 20000 rows given; accepted are 0 to 1000 \(max_tokens\)"):
        pool.reserve(20000)
    with pytest.raises(InputError, match=r"^reserve: -1 rows given"):
        pool.reserve(-1, beyond=True)


def test_below_the_ceiling_beyond_changes_nothing() -> None:
    found = []
    for beyond in (False, True):
        pool = pool_of(ROUTED, rows=4, ceiling=20)
        for rows in (5, 9, 17, 20):
            pool.reserve(rows, beyond=beyond)
            found.append(pool.rows)
    assert found == [8, 16, 20, 20] * 2


@given(
    first=st.integers(1, 40),
    ceiling=st.integers(1, 4000),
    asked=st.lists(st.integers(1, 50_000), min_size=1, max_size=8),
)
def test_growth_wastes_little(first: int, ceiling: int, asked: list[int]) -> None:
    """What is asked for fits; what is retired stays below three of what is used; the first step beyond is exact."""
    layout = StagingLayout(slots=(ROUTED,), rows=min(first, ceiling), world_size=1)
    retired = 0
    for rows in asked:
        if rows <= layout.rows:
            continue
        grown = layout.grown(rows, ceiling)
        assert grown.rows >= rows
        retired += layout.rows
        assert retired < 3 * grown.rows
        if layout.rows <= ceiling < rows:
            assert grown.rows < rows + BEYOND_ROWS
        else:
            assert grown.rows >= min(2 * layout.rows, ceiling)
        layout = grown


def test_a_growth_that_fails_leaves_the_next_one_as_it_was() -> None:
    """A number that no memory was found for is no reason to take more than a later, smaller one asks for."""
    room = [False]
    pool = pool_of(
        ROUTED, rows=64, ceiling=64, grow=lambda nbytes: mapped(1, nbytes)[0] if room[0] else "there is no memory"
    )
    with pytest.raises(NegotiationError, match=r"^reserve: no staging buffers of 1000192 rows: there is no memory"):
        pool.reserve(1_000_000, beyond=True)
    assert (pool.rows, pool.ceiling, pool.retired_bytes) == (64, 64, 0)
    room[0] = True
    pool.reserve(65, beyond=True)
    assert pool.rows == BEYOND_ROWS


def test_capture_neither_grows_nor_decides() -> None:
    """A buffer that is there, or an error that says what to do; and afterwards all is as before."""
    state = {"capturing": False}
    machine = FakeMachine()

    def grow(nbytes: int) -> SymmetricMemory | str:
        memory = machine.memory(0, 1)
        memory.allocate(nbytes)
        memory.import_([memory.export()])
        memory.map()
        return memory

    pool = pool_of(ROUTED, capturing=lambda: state["capturing"], grow=grow)
    state["capturing"] = machine.capturing = True
    view = pool.stage("routed", numbers(4, 24))
    for call in (lambda: pool.reserve(5), lambda: pool.reserve(3), lambda: pool.stage("routed", numbers(5, 24))):
        with pytest.raises(CaptureError, match="reserve"):
            call()
    assert not machine.calls, "in capture nothing is even tried"
    state["capturing"] = machine.capturing = False
    pool.reserve(5)
    assert pool.stage("routed", numbers(5, 24)).data_ptr() != view.data_ptr()


def test_closing() -> None:
    before = mappings()
    pool = pool_of(ROUTED)
    view = pool.stage("routed", numbers(4, 24))
    pool.reserve(64)
    pool.close()
    pool.close()
    assert (pool.nbytes, pool.retired_bytes) == (0, 0)
    for call in (
        lambda: pool.stage("routed", numbers(1, 24)),
        lambda: pool.reserve(1),
        lambda: pool.peers("routed", 1),
        lambda: pool.barrier("staged"),
        lambda: pool.rows,
    ):
        with pytest.raises(ClosedError, match="the staging pool is closed"):
            call()
    assert torch.equal(view, numbers(4, 24)), "whoever still holds a view has its memory"
    del view
    assert mappings() == before


# Several ranks


def group_pool(
    exchange: ThreadExchange | GroupExchange, machine: FakeMachine, poll_deadline: float = 20
) -> StagingPool:
    rank, world_size = exchange.rank, exchange.size

    def grow(nbytes: int) -> SymmetricMemory | str:
        memory = machine.memory(rank, world_size)
        return establish(memory, nbytes, exchange) or memory

    layout = StagingLayout(slots=(ROUTED, SHARED), rows=4, world_size=world_size, lanes=2)
    memory = HostMemory(rank, world_size)
    assert establish(memory, layout.nbytes + 256, exchange) is None
    return StagingPool(memory, layout, ceiling=64, grow=grow, offset=256, poll_deadline=poll_deadline)


def two_shot(pool: StagingPool, rank: int, rows: int, lane: int) -> torch.Tensor:
    """A sum as a tier would make it: stage, sum this rank's rows, push them to every rank."""
    view = pool.stage("routed", numbers(rows, 24, rank), lane=lane)
    pool.barrier("staged", lane=lane)
    peers = pool.peers("routed", rows, lane=lane)
    mine = slice(rank * rows // len(peers), (rank + 1) * rows // len(peers))
    total = torch.stack([peer[mine].float() for peer in peers]).sum(0)
    for peer in peers:
        peer[mine] = total.bfloat16()
    pool.barrier("pushed", lane=lane)
    return view.clone()


def sums(exchange: ThreadExchange | GroupExchange, calls: int) -> bool:
    W = exchange.size
    pool = group_pool(exchange, FakeMachine())
    for call in range(calls):
        if call == calls // 2:
            pool.reserve(16)
        rows, lane = 1 + call % pool.rows, call % 2
        right = torch.stack([numbers(rows, 24, rank).float() for rank in range(W)]).sum(0).bfloat16()
        if not torch.equal(two_shot(pool, exchange.rank, rows, lane), right):
            return False
    return pool.rows == 16 and pool.retired_bytes > 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums_over_threads(world_size: int) -> None:
    assert in_threads(world_size, lambda exchange: sums(exchange, 40)) == [True] * world_size


def sums_over_gloo(calls: int) -> bool:
    return sums(over_gloo(), calls)


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_over_processes(world_size: int) -> None:
    assert assert_identical(run_ranks(sums_over_gloo, world_size, 60, deadline=100))


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_reserve_that_fails_on_one_rank_fails_on_all_and_changes_nothing(guilty: int) -> None:
    machine = FakeMachine(Fault(rank=guilty, stage="allocate", nth=1))

    def rank(exchange: ThreadExchange) -> tuple[str, int, int, bool]:
        pool = group_pool(exchange, machine)
        view = pool.stage("routed", numbers(4, 24))
        with pytest.raises(NegotiationError) as caught:
            pool.reserve(5)
        unchanged = pool.stage("routed", numbers(4, 24, 3)).data_ptr() == view.data_ptr()
        failed = str(caught.value), pool.rows, pool.retired_bytes, unchanged
        pool.reserve(5)
        assert pool.rows == 8
        return failed

    text, rows, retired, unchanged = assert_identical(in_threads(2, rank))
    assert text == f"reserve: no staging buffers of 8 rows: rank {guilty}: allocate: OSError: [Errno 12] made to fail"
    assert (rows, retired, unchanged) == (4, 0, True)
    assert machine.live == 2


def test_a_long_barrier_sleeps() -> None:
    """See test_buffers_mailbox.py."""

    def rank(exchange: ThreadExchange) -> bool:
        pool = group_pool(exchange, FakeMachine(), poll_deadline=0.3)
        if exchange.rank == 1:
            exchange.min([0])
            return True
        start, busy = time.monotonic(), time.thread_time()
        with pytest.raises(PeerTimeoutError):
            pool.barrier("staged")
        slept = time.thread_time() - busy < 0.6 * (time.monotonic() - start)
        exchange.min([0])
        return slept

    assert in_threads(2, rank) == [True, True]


def test_a_barrier_names_who_does_not_come() -> None:
    come = threading.Event()

    def rank(exchange: ThreadExchange) -> str:
        pool = group_pool(exchange, FakeMachine(), poll_deadline=0.2)
        pool.barrier("first")
        exchange.min([0])
        if exchange.rank == 1:
            come.wait(20)
            return ""
        try:
            with pytest.raises(PeerTimeoutError) as caught:
                pool.barrier("staged")
            assert caught.value.ranks == (1,)
            with pytest.raises(ClosedError, match=r"^barrier staged: an earlier one timed out on this rank"):
                pool.barrier("staged")
            return str(caught.value)
        finally:
            if exchange.rank == 0:
                come.set()

    texts = in_threads(3, rank)
    for number in (0, 2):
        assert texts[number] == (
            f"barrier 2 on rank {number} of 3, phase staged: rank 1 did not come within 0.2 s "
            "(settings.poll_deadline); late, or gone"
        )
