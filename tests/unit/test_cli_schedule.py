"""The schedule: every token exactly once, in the order that the rules say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3comm.cli.schedule import Forward, StepCost, rows_of, schedule
from k3comm.cli.trace import Request
from k3comm.errors import InputError

requests = st.lists(
    st.builds(Request, st.integers(0, 400), st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=12
).map(lambda drawn: sorted(drawn, key=lambda request: request.arrival))
costs = st.builds(StepCost, st.sampled_from([0.0, 1.0, 10.0, 333.3]), st.sampled_from([0.0, 0.5, 7.0]))


def run(*drawn: Request, max_batch: int = 8, prefill_chunk: int = 100) -> list[tuple[float, int, int]]:
    forwards = schedule(drawn, max_batch=max_batch, prefill_chunk=prefill_chunk, cost=StepCost(10, 1))
    return [(forward.start, forward.decode_rows, forward.prefill_tokens) for forward in forwards]


def test_one_request() -> None:
    """The prompt's forward gives the first token, two more forwards the other two. A forward takes 10 + m."""
    assert run(Request(5, 4, 3)) == [(5, 0, 4), (19, 1, 0), (30, 1, 0)]


def test_an_answer_of_one_token_or_none_needs_no_decode_row() -> None:
    assert run(Request(0, 4, 1), Request(0, 2, 0)) == [(0, 0, 6)]


def test_long_prompts_come_in_chunks_and_the_oldest_goes_first() -> None:
    """Chunks of 4: 4 of the first; then its last 1, which also gives its first token, and 3 of the second; ..."""
    assert run(Request(0, 5, 3), Request(0, 6, 2), prefill_chunk=4) == [
        (0, 0, 4),
        (14, 0, 4),
        (28, 1, 3),
        (42, 2, 0),
    ]


def test_the_batch_is_bounded_and_waiting_requests_follow() -> None:
    both = (Request(0, 2, 3), Request(0, 2, 2))
    assert run(*both, max_batch=1) == [(0, 0, 2), (12, 1, 0), (23, 1, 0), (34, 0, 2), (46, 1, 0)]
    assert run(*both, max_batch=2) == [(0, 0, 4), (14, 2, 0), (26, 1, 0)]


def test_who_comes_during_a_forward_waits_for_its_end() -> None:
    assert run(Request(0, 10, 2), Request(1, 3, 1)) == [(0, 0, 10), (20, 1, 3)]
    assert run(Request(0, 10, 2), Request(20, 3, 1)) == [(0, 0, 10), (20, 1, 3)]
    assert run(Request(0, 10, 2), Request(21, 3, 1)) == [(0, 0, 10), (20, 1, 0), (31, 0, 3)]


def test_idle_time_is_skipped() -> None:
    assert run(Request(0, 1, 1), Request(10**9, 1, 1)) == [(0, 0, 1), (10**9, 0, 1)]


def test_kinds_of_forwards() -> None:
    assert [Forward(0, *rows).decode for rows in ((3, 0), (0, 3), (3, 1))] == [True, False, False]
    assert Forward(0, 3, 4).num_tokens == 7


@given(requests, st.integers(1, 6), st.integers(1, 50), costs)
def test_nothing_is_lost_and_nothing_done_twice(
    drawn: list[Request], max_batch: int, prefill_chunk: int, cost: StepCost
) -> None:
    forwards = list(schedule(drawn, max_batch=max_batch, prefill_chunk=prefill_chunk, cost=cost))
    assert sum(forward.prefill_tokens for forward in forwards) == sum(request.prompt for request in drawn)
    later = sum(request.generated - 1 for request in drawn if request.generated)
    assert sum(forward.decode_rows for forward in forwards) == later
    assert sum(forward.num_tokens for forward in forwards) == rows_of(drawn)
    for forward in forwards:
        assert forward.num_tokens >= 1
        assert forward.prefill_tokens <= prefill_chunk
        assert forward.decode_rows <= max_batch
    arrivals = {request.arrival for request in drawn}
    for before, after in pairwise(forwards):
        end = before.start + cost.of(before.num_tokens)
        assert after.start == end or (after.start > end and after.start in arrivals)
    # By any moment no more prompt tokens have been read than had arrived.
    read = 0
    for forward in forwards:
        read += forward.prefill_tokens
        assert read <= sum(request.prompt for request in drawn if request.arrival <= forward.start)


@given(requests, costs)
def test_with_room_for_all_the_clock_decides_alone(drawn: list[Request], cost: StepCost) -> None:
    """With no bound in the way every prompt is read in the first forward that starts after its arrival."""
    read = dict.fromkeys(range(len(drawn)), 0.0)
    waiting = list(enumerate(drawn))
    for forward in schedule(drawn, max_batch=len(drawn), prefill_chunk=10**6, cost=cost):
        due = [(i, request) for i, request in waiting if request.arrival <= forward.start]
        assert forward.prefill_tokens == sum(request.prompt for _, request in due)
        read.update((i, forward.start) for i, _ in due)
        waiting = [entry for entry in waiting if entry not in due]
    assert waiting == []


def test_arguments_out_of_range() -> None:
    with pytest.raises(InputError, match="max_batch: 0 given"):
        schedule([], max_batch=0, prefill_chunk=1, cost=StepCost(1, 1))
    with pytest.raises(InputError, match="prefill_chunk: -1 given"):
        schedule([], max_batch=1, prefill_chunk=-1, cost=StepCost(1, 1))
    for fixed, per_row in ((-1, 0), (0, -1), (float("inf"), 0), (0, float("nan"))):
        with pytest.raises(InputError, match="step cost"):
            StepCost(fixed, per_row)
