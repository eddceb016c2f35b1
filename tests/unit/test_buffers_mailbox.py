"""Mailboxes: any payload arrives whole and bit for bit, call after call, and a peer that does not come is named."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from buffer_groups import in_threads, mapped, over_gloo
from hypothesis import given
from hypothesis import strategies as st

from k3comm import LatentMoESpec
from k3comm.buffers.host import HostMemory
from k3comm.buffers.mailbox import (
    ALIGNMENT,
    COUNTER_BYTES,
    EMPTY,
    GATHERS,
    REGIONS,
    REPLACEMENT,
    MailboxLane,
    MailboxLayout,
    MailboxPool,
    Words,
    mailbox_bytes,
    publishable,
    wait_full,
)
from k3comm.buffers.symmetric import establish
from k3comm.errors import ClosedError, InputError, PeerTimeoutError
from k3comm.testing import ThreadExchange, assert_identical, run_ranks

H, L = 96, 40  # multiples of 8 * W for 1, 2, 3 and 4 ranks

# Every kind of 32-bit word: what a float comparison would take for something else, and what lies next to EMPTY.
SPECIAL_WORDS = [
    0x00000000, 0x80008000, 0x80000000, 0x00008000,  # +-0.0
    0x00010001, 0x80018001, 0x007F007F, 0x807F807F, 0x00000001, 0x80000001,  # subnormals, as BF16 and as fp32
    0x7F807F80, 0xFF80FF80,  # infinities
    0x7FC07FC0, 0xFFC0FFC0, 0x7F817F81, 0xFF81FF81,  # NaNs, quiet and signalling
    0x7FFF7FFF, 0x7FFFFFFF, 0xFFFF7FFF, 0xFFFFFFFE, 0xFFFEFFFF, 0xFFFF0000, 0x0000FFFF, 0xFFFFFFFF,
]  # fmt: skip


def layout(world_size: int, *, max_rows: int = 4, lanes: int = 1) -> MailboxLayout:
    return MailboxLayout(hidden_size=H, latent_size=L, world_size=world_size, max_rows=max_rows, lanes=lanes)


def pools(world_size: int, *, max_rows: int = 4, lanes: int = 1, poll_deadline: float = 0.05) -> list[MailboxPool]:
    """Filled mailboxes of every rank, in this process."""
    plan = layout(world_size, max_rows=max_rows, lanes=lanes)
    made = [MailboxPool(memory, plan, poll_deadline=poll_deadline) for memory in mapped(world_size, plan.nbytes)]
    for pool in made:
        pool.fill()
    return made


def lanes_of(world_size: int, *, max_rows: int = 4, poll_deadline: float = 0.05) -> list[MailboxLane]:
    return [pool.lanes[0] for pool in pools(world_size, max_rows=max_rows, poll_deadline=poll_deadline)]


def random_bits(rows: int, width: int, seed: int) -> torch.Tensor:
    """BF16 of any bits."""
    bits = np.random.default_rng(seed).integers(0, 1 << 16, (rows, width), dtype=np.uint16)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def words(x: torch.Tensor) -> Words:
    found: Words = x.clone(memory_format=torch.contiguous_format).view(torch.int32).numpy().view(np.uint32)
    return found


def as_published(x: torch.Tensor) -> Words:
    found = words(x).copy()
    found[found == EMPTY] = REPLACEMENT
    return found


# Sizes


def test_the_layout_is_as_drawn() -> None:
    plan = layout(3, max_rows=5, lanes=2)
    assert plan.columns == 32
    assert plan.latent_bytes == -(-5 * 3 * L * 2 // ALIGNMENT) * ALIGNMENT
    assert plan.shared_bytes == plan.gather_bytes == -(-5 * H * 2 // ALIGNMENT) * ALIGNMENT
    parts = []
    for lane in range(2):
        parts.append((plan.counters(lane), COUNTER_BYTES))
        for region in range(REGIONS):
            parts.append((plan.latent(lane, region), plan.latent_bytes))
            parts.append((plan.shared(lane, region), plan.shared_bytes))
        parts += [(plan.gather(lane, number), plan.gather_bytes) for number in range(GATHERS)]
    assert parts[0][0] == 0
    assert all(start % ALIGNMENT == 0 for start, _ in parts)
    # One after the other, without gaps.
    assert [start + size for start, size in parts] == [*[start for start, _ in parts[1:]], plan.nbytes]


def test_the_size_of_kimi_k3() -> None:
    spec = LatentMoESpec.kimi_k3()
    per_row = 3 * (8 * 3584 + 7168) * 2 + 2 * 7168 * 2
    assert mailbox_bytes(spec, 8, 16) == 4096 + 16 * per_row
    assert mailbox_bytes(spec, 8, 16, lanes=2) == 2 * (4096 + 16 * per_row)


@given(
    fragments=st.integers(1, 2**34),
    latent=st.integers(1, 2**34),
    world_size=st.integers(1, 16),
    rows=st.integers(1, 2**33),
    lanes=st.integers(1, 4),
)
def test_sizes_never_overflow(fragments: int, latent: int, world_size: int, rows: int, lanes: int) -> None:
    plan = MailboxLayout(
        hidden_size=8 * world_size * fragments,
        latent_size=8 * latent,
        world_size=world_size,
        max_rows=rows,
        lanes=lanes,
    )
    row = REGIONS * (world_size * plan.latent_size + plan.hidden_size) * 2 + GATHERS * 2 * plan.hidden_size
    least = lanes * (COUNTER_BYTES + rows * row)
    assert least <= plan.nbytes < least + lanes * (2 * REGIONS + GATHERS) * ALIGNMENT
    assert plan.gather(lanes - 1, GATHERS - 1) + plan.gather_bytes == plan.nbytes


@pytest.mark.parametrize("limit", [2**31, 2**32, 2**63])
def test_at_the_powers_of_two(limit: int) -> None:
    """A region that crosses each limit by one row."""
    for rows in (limit // 4096 - 1, limit // 4096, limit // 4096 + 1):
        plan = MailboxLayout(hidden_size=1024, latent_size=1024, world_size=2, max_rows=rows)
        assert plan.latent(0, 1) - plan.shared(0, 0) == plan.shared_bytes == rows * 2048
        assert plan.shared(0, 0) - plan.latent(0, 0) == plan.latent_bytes == rows * 4096


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"latent_size": 44}, "latent_size: 44 given; accepted are multiples of 8"),
        ({"hidden_size": 104}, "hidden_size: 104 given for 3 ranks; accepted are multiples of 24"),
        ({"max_rows": 0}, "max_rows: 0 given; accepted are whole numbers from 1"),
        ({"lanes": 0}, "lanes: 0 given; accepted are whole numbers from 1"),
        ({"world_size": True}, "world_size: True given; accepted are whole numbers from 1"),
        ({"latent_size": 8.0}, "latent_size: 8.0 given; accepted are whole numbers from 1"),
    ],
)
def test_wrong_shapes(changes: dict[str, int], text: str) -> None:
    with pytest.raises(InputError) as caught:
        attrs.evolve(layout(3), **changes)
    assert str(caught.value) == text


def test_only_bfloat16() -> None:
    spec = attrs.evolve(LatentMoESpec.kimi_k3(), dtype="float32")
    with pytest.raises(InputError, match=r"^spec.dtype: float32 given; mailboxes carry bfloat16$"):
        mailbox_bytes(spec, 2, 16)


def test_a_pool_must_fit() -> None:
    plan = layout(2)
    first, _ = mapped(2, plan.nbytes + 256)
    assert len(MailboxPool(first, plan, offset=256).lanes) == 1
    for offset in (-128, 64, 384):
        with pytest.raises(InputError, match=f"^offset: {offset} given for {plan.nbytes} bytes in a block of"):
            MailboxPool(first, plan, offset=offset)
    with pytest.raises(InputError, match=r"^layout: for 4 ranks, memory of 2 given"):
        MailboxPool(first, layout(4))


# Words


def test_only_the_empty_word_is_replaced() -> None:
    payload = np.array(SPECIAL_WORDS, dtype=np.uint32)
    right = payload.copy()
    right[payload == EMPTY] = REPLACEMENT
    found = publishable(payload)
    assert found.tolist() == right.tolist()
    assert payload.tolist() == SPECIAL_WORDS, "the caller's words stay"
    # Both are NaNs, in both halves.
    for word in (EMPTY, REPLACEMENT):
        halves = torch.from_numpy(np.array([word], dtype=np.uint32).view(np.int16)).view(torch.bfloat16)
        assert halves.isnan().all()


def test_what_is_publishable_is_not_copied() -> None:
    payload = np.array(SPECIAL_WORDS[:-1], dtype=np.uint32)
    assert publishable(payload) is payload
    assert publishable(payload[:0]).size == 0
    assert publishable(payload.reshape(1, -1)).shape == (1, payload.size)


@given(st.lists(st.integers(0, EMPTY) | st.sampled_from(SPECIAL_WORDS), min_size=1, max_size=40))
def test_any_words(payload: list[int]) -> None:
    found = publishable(np.array(payload, dtype=np.uint32))
    assert found.tolist() == [REPLACEMENT if word == EMPTY else word for word in payload]
    assert EMPTY not in found


def test_a_wait_ends_when_every_word_is_there() -> None:
    """Whole fragments are torn: their words come one by one, in any order."""
    mailbox = np.full(16, EMPTY, dtype=np.uint32)
    order = np.random.default_rng(0).permutation(16)
    done = threading.Event()

    def wait() -> None:
        wait_full(mailbox, 20, lambda: AssertionError("expired"), mailbox[3::4])
        done.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    for place in order:
        assert not done.wait(0.01), f"taken for full before word {place} came"
        mailbox[place] = SPECIAL_WORDS[place]
    assert done.wait(20)
    waiting.join()


@pytest.mark.parametrize("missing", range(8))
def test_one_word_that_is_missing(missing: int) -> None:
    mailbox = np.zeros(8, dtype=np.uint32)
    mailbox[missing] = EMPTY
    started = time.monotonic()
    with pytest.raises(LookupError, match="it is late"):
        wait_full(mailbox, 0.05, lambda: LookupError("it is late"), mailbox[-1:])
    assert 0.05 <= time.monotonic() - started < 5


def test_a_long_wait_sleeps() -> None:
    """Ranks that only yield can keep another one's process from all cores for as long as they wait."""
    start, busy = time.monotonic(), time.thread_time()
    with pytest.raises(LookupError):
        wait_full(np.full(64, EMPTY, np.uint32), 0.3, lambda: LookupError("it is late"))
    assert time.thread_time() - busy < 0.6 * (time.monotonic() - start)  # 1.0 by yielding, 0.1 to 0.2 by naps


def test_a_wait_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    yields = itertools.count()
    monkeypatch.setattr(os, "sched_yield", lambda: next(yields))
    mailbox = np.zeros(8, dtype=np.uint32)
    wait_full(mailbox, 1, AssertionError)
    assert next(yields) == 0
    mailbox[0] = EMPTY
    with pytest.raises(AssertionError):
        wait_full(mailbox, 0.02, AssertionError)
    assert next(yields) > 2


# Calls


def one_call(lanes: list[MailboxLane], rows: int, seed: int, ranks: list[int] | None = None) -> None:
    """All ranks' calls, phase by phase in this thread, with every bit checked."""
    W, C = len(lanes), H // len(lanes)
    routed = [random_bits(rows, L, seed + 3 * rank) for rank in range(W)]
    shared = [random_bits(rows, H, seed + 3 * rank + 1) for rank in range(W)]
    owned = [random_bits(rows, C, seed + 3 * rank + 2) for rank in range(W)]
    ranks = ranks or [*range(W)]
    for rank in ranks:
        lanes[rank].begin(rows)
        lanes[rank].publish_latent(routed[rank])
        lanes[rank].publish_shared(shared[rank])
    for rank in ranks:
        latent, parts = lanes[rank].wait_latent(), lanes[rank].wait_shared()
        assert (tuple(latent.shape), latent.dtype) == ((rows, W, L), torch.bfloat16)
        assert (tuple(parts.shape), parts.dtype) == ((rows, W, C), torch.bfloat16)
        for peer in range(W):
            assert (words(latent[:, peer]) == as_published(routed[peer])).all()
            assert (words(parts[:, peer]) == as_published(shared[peer][:, rank * C : (rank + 1) * C])).all()
        lanes[rank].publish_columns(owned[rank])
    for rank in ranks:
        out = torch.zeros(rows, H, dtype=torch.bfloat16)
        lanes[rank].wait_columns(out)
        for peer in range(W):
            assert (words(out[:, peer * C : (peer + 1) * C]) == as_published(owned[peer])).all()
        lanes[rank].end()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_calls_of_changing_size(world_size: int) -> None:
    lanes = lanes_of(world_size)
    sizes = [4, 1, 4, 4, 2, 1, 1, 3, 4, 1, 2, 4]
    for number, rows in enumerate(sizes):
        first = number % world_size
        one_call(lanes, rows, 100 * number, ranks=[*range(first, world_size), *range(first)])
    assert {lane.calls for lane in lanes} == {len(sizes)}
    assert {lane.region_number for lane in lanes} == {len(sizes) % 3}


def used(lane: MailboxLane, region: int) -> tuple[int, int]:
    """Rows of a region's latent and shared part of this rank with a word that is not empty."""
    part = lane.regions[region]
    latent, shared = part.latent[lane.rank], part.shared[lane.rank]
    return int((latent != EMPTY).any(axis=(1, 2)).sum()), int((shared != EMPTY).any(axis=(1, 2)).sum())


def test_a_call_clears_what_the_call_before_used() -> None:
    """That call's rows, not this one's; and the gather mailbox is empty at once."""
    lanes = lanes_of(2)
    state = []
    for number, rows in enumerate([4, 1, 3, 2, 4]):
        one_call(lanes, rows, 10 * number)
        for lane in lanes:
            assert (lane.gathers[lane.rank] == EMPTY).all()
            assert lane.previous_rows == rows
        state.append([[used(lane, region)[0] for region in range(REGIONS)] for lane in lanes])
        assert [used(lane, region) for lane in lanes for region in range(REGIONS)] == [
            (rows, rows) for ranks in state[-1] for rows in ranks
        ]
    assert state == [
        [[4, 0, 0]] * 2,
        [[0, 1, 0]] * 2,
        [[0, 0, 3]] * 2,
        [[2, 0, 0]] * 2,
        [[0, 4, 0]] * 2,
    ]


def test_clearing_early_and_at_the_end_are_the_same() -> None:
    lanes = lanes_of(1)
    for number in range(5):
        (lane,) = lanes
        lane.begin(2)
        lane.publish_latent(random_bits(2, L, number))
        lane.publish_shared(random_bits(2, H, number))
        if number % 2:
            lane.clear_previous()
            assert [used(lane, region)[0] for region in range(REGIONS)].count(2) == 1
            lane.clear_previous()
        lane.wait_latent()
        lane.wait_shared()
        lane.publish_columns(random_bits(2, H, number))
        lane.wait_columns(torch.empty(2, H, dtype=torch.bfloat16))
        lane.end()
        assert [used(lane, region)[0] for region in range(REGIONS)].count(2) == 1


def test_a_fast_peer_a_call_ahead() -> None:
    """Rank 1 has published call 2 before rank 0 ends call 1: other regions, so nothing is lost."""
    slow, fast = lanes_of(2)
    data = [[random_bits(2, L, 10 * call + rank) for rank in range(2)] for call in range(2)]
    shared = random_bits(2, H, 99)
    for rank, lane in enumerate((slow, fast)):
        lane.begin(2)
        lane.publish_latent(data[0][rank])
        lane.publish_shared(shared)
    for lane in (slow, fast):
        lane.wait_latent()
        lane.wait_shared()
        lane.publish_columns(random_bits(2, H // 2, 5))
    fast.wait_columns(torch.empty(2, H, dtype=torch.bfloat16))
    fast.end()
    fast.begin(2)
    fast.publish_latent(data[1][1])
    fast.publish_shared(shared)
    assert (words(slow.wait_latent()[:, 1]) == as_published(data[0][1])).all()
    slow.wait_columns(torch.empty(2, H, dtype=torch.bfloat16))
    slow.end()
    slow.begin(2)
    slow.publish_latent(data[1][0])
    slow.publish_shared(shared)
    for lane in (slow, fast):
        for rank in range(2):
            assert (words(lane.wait_latent()[:, rank]) == as_published(data[1][rank])).all()


@pytest.mark.parametrize("start", range(REGIONS))
def test_any_region_can_be_the_first(start: int) -> None:
    lanes = lanes_of(2)
    for lane in lanes:
        lane.fill(region_number=start)
    for number in range(4):
        assert {lane.region_number for lane in lanes} == {(start + number) % 3}
        one_call(lanes, 1 + number, number)


def test_regions_go_round_past_any_count() -> None:
    """Stepped 0, 1, 2: (count mod 2**32) mod 3 would use one region twice at the wrap."""
    lanes = lanes_of(2, max_rows=1)
    for lane in lanes:
        lane.calls = 2**32 - 2
    seen = []
    for number in range(5):
        seen.append(lanes[0].region_number)
        one_call(lanes, 1, number)
    assert seen == [0, 1, 2, 0, 1]
    assert lanes[0].calls == 2**32 + 3


def special_rows(width: int) -> torch.Tensor:
    """Every special word in every lane of a fragment."""
    count = len(SPECIAL_WORDS)
    table = np.array(
        [[SPECIAL_WORDS[(row + column) % count] for column in range(width // 2)] for row in range(count)],
        dtype=np.uint32,
    )
    return torch.from_numpy(table.view(np.int32)).view(torch.bfloat16)


def test_every_special_payload_in_every_place() -> None:
    rows = len(SPECIAL_WORDS)
    lanes = lanes_of(2, max_rows=rows)
    routed, shared, owned = special_rows(L), special_rows(H), special_rows(H // 2)
    before = words(routed).copy()
    for lane in lanes:
        lane.begin(rows)
        lane.publish_latent(routed)
        lane.publish_shared(shared)
    for lane in lanes:
        assert all((words(lane.wait_latent()[:, peer]) == as_published(routed)).all() for peer in range(2))
        lane.wait_shared()
        lane.publish_columns(owned)
    for lane in lanes:
        out = torch.empty(rows, H, dtype=torch.bfloat16)
        lane.wait_columns(out)
        assert (words(out) == np.concatenate([as_published(owned)] * 2, axis=1)).all()
        lane.end()
    assert (words(routed) == before).all(), "the caller's data stays"


def test_all_words_empty_in_the_payload() -> None:
    """An input that is nothing but sentinels must not hang."""
    (lane,) = lanes_of(1)
    full = torch.full((2, L // 2), -1, dtype=torch.int32).view(torch.bfloat16)
    lane.begin(2)
    lane.publish_latent(full)
    assert (words(lane.wait_latent()[:, 0]) == REPLACEMENT).all()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "columns of more": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "odd offset": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "every other row": lambda x: torch.stack([x, x], dim=1).view(2 * x.shape[0], -1)[::2],
    "every other element": lambda x: torch.stack([x, x], dim=2).view(x.shape[0], -1)[:, ::2],
    "expanded": lambda x: x[:1].expand(x.shape[0], -1),
    "overlapping as_strided": lambda x: x.reshape(-1).as_strided(x.shape, (3, 1)),
    "with a gradient": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout(name: str) -> None:
    (lane,) = lanes_of(1)
    routed, shared, owned = (LAYOUTS[name](random_bits(3, width, seed)) for seed, width in enumerate((L, H, H)))
    lane.begin(3)
    lane.publish_latent(routed)
    lane.publish_shared(shared)
    assert (words(lane.wait_latent().detach()[:, 0]) == as_published(routed.detach())).all()
    assert (words(lane.wait_shared()[:, 0]) == as_published(shared.detach())).all()
    lane.publish_columns(owned)
    out = torch.zeros(H, 3, dtype=torch.bfloat16).t()
    lane.wait_columns(out)
    assert (words(out) == as_published(owned.detach())).all()
    assert not out.requires_grad
    lane.end()


@pytest.mark.parametrize("made_in_inference_mode", [True, False])
def test_inference_mode_may_come_and_go(made_in_inference_mode: bool) -> None:
    with torch.inference_mode(made_in_inference_mode):
        lanes = lanes_of(2)
        one_call(lanes, 2, 0)
    one_call(lanes, 2, 1)
    one_call(lanes, 3, 2)
    with torch.inference_mode():
        one_call(lanes, 3, 3)
        one_call(lanes, 4, 4)
    with torch.no_grad():
        one_call(lanes, 4, 5)


# What goes wrong


def test_a_missing_peer_is_named() -> None:
    lanes = lanes_of(4)
    for rank in (0, 2):
        lanes[rank].begin(3, layer=7, operation="moe_tail")
        lanes[rank].publish_latent(random_bits(3, L, rank))
        lanes[rank].publish_shared(random_bits(3, H, rank))
    with pytest.raises(PeerTimeoutError) as caught:
        lanes[0].wait_latent()
    assert str(caught.value) == (
        "moe_tail on rank 0 of 4: layer 7, call 1 of lane 0, phase latent, token 0: nothing from ranks 1, 3 within "
        "0.05 s (settings.poll_deadline); it is late, or gone"
    )
    assert caught.value.ranks == (1, 3)


def test_the_first_missing_token_is_named() -> None:
    """A peer that stopped in the middle: its fragments are half there."""
    first, second = lanes_of(2)
    for lane in (first, second):
        lane.begin(4, operation="attention_reduce")
        lane.publish_latent(random_bits(4, L, lane.rank))
    first.publish_shared(random_bits(4, H, 0))
    first.regions[0].shared[0][:2, 1] = 7
    first.regions[0].shared[0][2, 1, :3] = 7
    first.wait_latent()
    with pytest.raises(
        PeerTimeoutError, match=r"^attention_reduce on rank 0 of 2: call 1 of lane 0, phase shared, token 2:"
    ):
        first.wait_shared()


def test_a_missing_owner_of_columns_is_named() -> None:
    lanes = lanes_of(3)
    for lane in lanes:
        lane.begin(1)
        lane.publish_latent(random_bits(1, L, 0))
        lane.publish_shared(random_bits(1, H, 0))
    for lane in lanes:
        lane.wait_latent()
        lane.wait_shared()
    for lane in lanes[:2]:
        lane.publish_columns(random_bits(1, H // 3, 0))
    with pytest.raises(PeerTimeoutError, match="phase gather, token 0: nothing from rank 2 within") as caught:
        lanes[0].wait_columns(torch.empty(1, H, dtype=torch.bfloat16))
    assert caught.value.ranks == (2,)


def test_a_broken_lane_refuses_until_it_is_filled() -> None:
    lanes = lanes_of(2)
    lanes[0].begin(1)
    lanes[0].publish_latent(random_bits(1, L, 0))
    with pytest.raises(PeerTimeoutError):
        lanes[0].wait_latent()
    with pytest.raises(
        ClosedError, match=r"^mailbox lane 0 of rank 0: call 1 did not end; fill\(\) on every rank starts"
    ):
        lanes[0].begin(1)
    for lane in lanes:
        lane.fill()
    for number in range(4):
        one_call(lanes, 2, number)


def test_the_order_of_calls() -> None:
    plan = layout(1)
    (memory,) = mapped(1, plan.nbytes)
    (lane,) = MailboxPool(memory, plan).lanes
    with pytest.raises(ClosedError, match="it was never filled"):
        lane.begin(1)
    lane.fill()
    for early in (lane.wait_latent, lane.clear_previous, lane.end, lambda: lane.publish_latent(random_bits(1, L, 0))):
        with pytest.raises(ClosedError, match="no call has begun"):
            early()
    for rows in (0, -1, 5):
        with pytest.raises(InputError, match=f"^rows: {rows} given; accepted are 1 to 4"):
            lane.begin(rows)
    with pytest.raises(InputError, match=r"^region_number: 3 given; accepted are 0 to 2"):
        lane.fill(region_number=3)
    lane.begin(4)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, L),
        torch.zeros(3, L, dtype=torch.bfloat16),
        torch.zeros(2, L + 8, dtype=torch.bfloat16),
        torch.zeros(2 * L, dtype=torch.bfloat16),
        torch.zeros(2, L, dtype=torch.float16),
        torch.zeros(2, L, dtype=torch.bfloat16, device="meta"),
    ],
)
def test_wrong_tensors(wrong: torch.Tensor) -> None:
    (lane,) = lanes_of(1)
    lane.begin(2)
    with pytest.raises(InputError, match=rf"^x: .* given; accepted is torch.bfloat16 \(2, {L}\) on cpu"):
        lane.publish_latent(wrong)


# Lanes and communicators


def test_two_lanes_share_nothing() -> None:
    """Calls of two micro-batches, interleaved phase by phase, and out of step."""
    made = pools(2, lanes=2)
    first, second = ([pool.lanes[number] for pool in made] for number in range(2))
    one_call(first, 4, 0)
    one_call(first, 2, 1)
    for number, lane in enumerate((*first, *second)):
        lane.begin(3)
        lane.publish_latent(random_bits(3, L, number))
        lane.publish_shared(random_bits(3, H, 10 + number))
    for number, lanes in enumerate((first, second)):
        for lane in lanes:
            for peer in range(2):
                assert (words(lane.wait_latent()[:, peer]) == as_published(random_bits(3, L, 2 * number + peer))).all()
    assert (first[0].calls, second[0].calls) == (3, 1)
    assert (first[0].region_number, second[0].region_number) == (2, 0)


def test_filling_one_lane_leaves_the_other() -> None:
    made = pools(2, lanes=2)
    first, second = ([pool.lanes[number] for pool in made] for number in range(2))
    one_call(second, 2, 0)
    for lane in first:
        lane.fill()
    one_call(second, 1, 1)
    one_call(first, 4, 2)
    assert second[0].calls == 2


def test_two_communicators_share_nothing() -> None:
    base, draft = lanes_of(2), lanes_of(2)
    for number in range(4):
        one_call(base, 4, number)
        one_call(draft, 1 + number % 2, 50 + number)
        one_call(base, 2, 100 + number)
    assert (base[0].calls, draft[0].calls) == (8, 4)


def test_pools_at_different_offsets_of_one_block() -> None:
    plan = layout(2)
    memories = mapped(2, 2 * plan.nbytes)
    both = [[MailboxPool(memory, plan, offset=place * plan.nbytes) for memory in memories] for place in range(2)]
    for made in both:
        for pool in made:
            pool.fill()
    for number in range(3):
        for made in both:
            one_call([pool.lanes[0] for pool in made], 3, number)


def test_a_fill_leaves_the_neighbours_alone() -> None:
    plan = layout(1, lanes=2)
    (memory,) = mapped(1, plan.nbytes + 512)
    memory.block(0).fill_(9)
    pool = MailboxPool(memory, plan, offset=256)
    pool.fill()
    assert (memory.block(0)[:256] == 9).all()
    assert (memory.block(0)[256 + plan.nbytes :] == 9).all()
    filled = memory.block(0)[256 : 256 + plan.nbytes].numpy().view(np.uint32)
    assert int((filled == 0).sum()) == 2 * COUNTER_BYTES // 4
    assert int((filled == EMPTY).sum()) == (plan.nbytes - 2 * COUNTER_BYTES) // 4


# Ranks at once


def exchange_calls(lane: MailboxLane, calls: int, seed: int) -> int:
    """Calls with sums that every rank can check; the number of them."""
    W, rank = lane.layout.world_size, lane.rank
    H, L, C = lane.layout.hidden_size, lane.layout.latent_size, lane.layout.columns
    sizes = np.random.default_rng(seed).integers(1, lane.layout.max_rows + 1, calls)
    for call, rows in enumerate(sizes.tolist()):
        lane.begin(rows)
        base = torch.arange(rows).view(-1, 1) + call % 64
        lane.publish_latent((base + torch.arange(L) % 5 + 16 * rank).bfloat16())
        lane.publish_shared((base + torch.arange(H) % 7 + 16 * rank).bfloat16())
        if call % 3:
            lane.clear_previous()
        latent, shared = lane.wait_latent().float(), lane.wait_shared().float()
        ranks = 16 * torch.arange(W).view(1, -1, 1)
        assert torch.equal(latent, ranks + (base + torch.arange(L) % 5).view(rows, 1, L))
        own = torch.arange(rank * C, (rank + 1) * C) % 7
        assert torch.equal(shared, ranks + (base + own).view(rows, 1, C))
        lane.publish_columns((base + own + rank).bfloat16())
        out = torch.empty(rows, H, dtype=torch.bfloat16)
        lane.wait_columns(out)
        assert torch.equal(out.float(), (base + torch.arange(H) % 7 + torch.arange(H) // C).float())
        lane.end()
    return lane.calls


def over_threads(exchange: ThreadExchange, calls: int) -> int:
    memory = HostMemory(exchange.rank, exchange.size)
    plan = layout(exchange.size)
    assert establish(memory, plan.nbytes, exchange) is None
    pool = MailboxPool(memory, plan, poll_deadline=30)
    pool.fill()
    exchange.min([0])
    return exchange_calls(pool.lanes[0], calls, 1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_threads(world_size: int) -> None:
    assert in_threads(world_size, lambda exchange: over_threads(exchange, 40)) == [40] * world_size


def over_processes(hidden: int, latent: int, calls: int) -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    exchange = over_gloo()
    plan = MailboxLayout(hidden_size=hidden, latent_size=latent, world_size=world_size, max_rows=6, lanes=2)
    memory = HostMemory(rank, world_size)
    assert establish(memory, plan.nbytes, exchange) is None
    pool = MailboxPool(memory, plan, poll_deadline=30)
    pool.fill()
    exchange.min([0])
    return sum(exchange_calls(lane, calls, 2 + number) for number, lane in enumerate(pool.lanes))


@pytest.mark.parametrize(("world_size", "calls"), [(2, 100), (4, 40)])
def test_processes(world_size: int, calls: int) -> None:
    done = run_ranks(over_processes, world_size, 64 * world_size, 264, calls, deadline=100)
    assert assert_identical(done) == 2 * calls


def one_is_late(seconds: float) -> str:
    """The last rank stays away from the second call."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    exchange = over_gloo()
    plan = layout(world_size)
    memory = HostMemory(rank, world_size)
    assert establish(memory, plan.nbytes, exchange) is None
    pool = MailboxPool(memory, plan, poll_deadline=seconds)
    pool.fill()
    exchange.min([0])
    exchange_calls(pool.lanes[0], 1, 0)
    if rank == world_size - 1:
        exchange.min([0])
        return "late"
    started = time.monotonic()
    try:
        exchange_calls(pool.lanes[0], 1, 0)
    except PeerTimeoutError as error:
        assert seconds <= time.monotonic() - started < seconds + 10
        return str(error.ranks)
    finally:
        exchange.min([0])
    return "it was there"


def test_processes_name_the_one_that_does_not_come() -> None:
    assert run_ranks(one_is_late, 3, 0.3, deadline=60) == ["(2,)", "(2,)", "late"]


def test_the_error_travels() -> None:
    error = pickle.loads(pickle.dumps(PeerTimeoutError("late", (1, 2))))
    assert (str(error), error.ranks) == ("late", (1, 2))
    assert PeerTimeoutError().ranks == ()
    assert isinstance(error, RuntimeError)
