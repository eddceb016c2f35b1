"""`check_uniform`: a call that differs between ranks raises on all of them, names who and what, and hurts nobody."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist

import k3comm
from k3comm import Communicator, DivergenceError, LatentMoESpec, Settings, Tier
from k3comm.record import CLOSED, COMPARED, CallRecord, Record, Recorder, parse_call
from k3comm.testing import assert_identical, run_ranks, thread_exchanges
from k3comm.uniform import CallObserver, differences, is_equal, odd_ranks, tell

SPEC = LatentMoESpec(hidden_size=24, latent_size=8, top_k=2, dtype="float32")


def call_record(**changes: object) -> CallRecord:
    fields: dict[str, object] = {
        "call": 7, "part": "tail", "layer": 3, "num_tokens": 64, "graph": False, "decode": True, "output": "full",
        "next_norm": False, "residual": True, "lane": 0, "norm": True, "bias": False, "up": "whole", "precise": False,
        "scale": 1.0, "capture": False, "tier": "FUSED_LANE_AR", "by": "selected",
    }  # fmt: skip
    return CallRecord(**{**fields, **changes})  # type: ignore[arg-type]


# What is said


def as_fields(*calls: CallRecord) -> dict[int, dict[str, str]]:
    return {rank: parse_call(call.line()) for rank, call in enumerate(calls)}


def test_an_odd_rank_is_named_with_its_value() -> None:
    four, five = call_record(num_tokens=4), call_record(num_tokens=5)
    assert differences(as_fields(four, five, four)) == ["rank 1: num_tokens 5, the others 4"]
    assert differences(as_fields(five, four, five, four)) == ["num_tokens: 5 on ranks 0 and 2, 4 on ranks 1 and 3"]
    assert differences(as_fields(four, five, call_record(num_tokens=6), four, four)) == [
        "rank 1: num_tokens 5, rank 2: num_tokens 6, the others 4"
    ]
    assert (odd_ranks(as_fields(four, five, four)), odd_ranks(as_fields(four, five))) == ((1,), ())


@pytest.mark.parametrize("field", COMPARED)
def test_every_field_counts(field: str) -> None:
    usual = call_record()
    value = getattr(usual, field)
    other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else "rows"
    odd = call_record(**{field: other})
    errors = in_step([usual, odd, usual])
    assert len(set(errors)) == 1
    assert f"rank 1: {field} " in errors[0]


def test_the_way_to_a_tier_does_not_count() -> None:
    assert in_step([call_record(), call_record(by="plan-selected"), call_record(by="forced")]) == ["", "", ""]


def in_step(calls: list[CallRecord]) -> list[str]:
    """What each rank of a group of threads raises for its call."""
    exchanges = thread_exchanges(len(calls))

    def one(rank: int) -> str:
        if is_equal(calls[rank], exchanges[rank]):
            assert exchanges[rank].collectives == 1, "one vote where all is well"
            return ""
        with pytest.raises(DivergenceError) as told:
            tell("base", calls[rank], exchanges[rank])
        return str(told.value)

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, range(len(calls))))


def test_a_call_that_is_captured_is_not_compared() -> None:
    class Refusing:
        rank, size = 0, 2

        def min(self, values: object) -> list[int]:
            raise AssertionError("compared")

        gather = min

    fields = attrs.asdict(call_record(capture=True))
    del fields["call"]
    observer = CallObserver("base", None, Refusing())  # type: ignore[arg-type]
    observer(**fields)
    with pytest.raises(AssertionError, match="compared"):
        observer(**{**fields, "capture": False})


def test_calls_of_several_threads_take_turns(tmp_path: Path) -> None:
    inside = threading.Lock()

    class OneAtATime:
        rank, size = 0, 2

        def min(self, values: list[int]) -> list[int]:
            assert inside.acquire(blocking=False), "two comparisons at once"
            time.sleep(0.002)
            inside.release()
            return list(values)

    fields = attrs.asdict(call_record())
    del fields["call"]
    recorder = Recorder(tmp_path, "base", 0, {"communicator": "base"})
    observer = CallObserver("base", recorder, OneAtATime())  # type: ignore[arg-type]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: observer(**fields), range(64)))
    observer.close()
    numbers = [parse_call(line).get("call") for line in Record.of(recorder.path).lines() if line != CLOSED]
    assert numbers == [str(number) for number in range(64)]


# Over a real group: every rank raises the same, nobody waits, and the next call is right


def divergent_calls() -> list[tuple[str, tuple[int, ...], str]]:
    rank = dist.get_rank()
    odd = rank == 1
    comm = Communicator.negotiate(SPEC, dist.group.WORLD, settings=Settings(check_uniform=True), name="base", lanes=2)
    weight = torch.zeros(24, 8)
    tail = comm.moe_tail(layer_index=0, up_weight=weight)
    other = comm.moe_tail(layer_index=1, up_weight=weight)
    biased = comm.moe_tail(layer_index=2, up_weight=weight, up_bias=torch.ones(24) if odd else None)
    scaled = comm.moe_tail(layer_index=3, up_weight=weight, routed_scale=2.0 if odd else 1.0)

    def rows(m: int, **options: object) -> torch.Tensor:
        chosen = options.pop("tail", tail)
        return chosen(torch.zeros(m, 8), torch.full((m, 24), 1.0 + rank), **options)

    def in_a_step(**axes: object) -> torch.Tensor:
        with comm.step(**axes):
            return rows(4)

    def compiled() -> torch.Tensor:
        m = 5 if odd else 4
        given = (torch.zeros(m, 8), torch.zeros(m, 24), None, None, weight, None, "full", 0, "base")
        return torch.ops.k3comm.moe_tail(*given)

    def tier(name: str) -> torch.Tensor:
        return rows(4, plan=tail.plan(4, tier=Tier[name]))

    cases = [
        lambda: rows(5 if odd else 4),
        lambda: rows(0 if odd else 4),
        lambda: tier("SEPARATE_REDUCE" if odd else "SEQUENCE_PARALLEL"),
        lambda: rows(4, tail=other if odd else tail),
        lambda: rows(4, residual=torch.zeros(4, 24) if odd else None),
        lambda: rows(4, output="rows" if odd else "full"),
        lambda: rows(4, next_norm_weight=torch.ones(24) if odd else None),
        lambda: in_a_step(decode=odd),
        lambda: in_a_step(lane=int(odd)),
        lambda: rows(4, tail=biased),
        lambda: rows(4, tail=scaled),
        compiled,
        lambda: tail.reduce_routed(torch.zeros(0 if odd else 4, 8)) if rank else rows(4),
    ]
    found = []
    for case in cases:
        try:
            case()
        except DivergenceError as error:
            found.append((str(error), error.ranks, str(rows(3)[0, 0].item())))
        else:
            found.append(("nothing", (), ""))
    assert rows(0).shape == (0, 24)
    tail.finish(tail.reduce_routed(torch.zeros(3, 8)), torch.zeros(3, 24))
    comm.close()
    return found


def test_a_call_that_differs_raises_on_all_ranks_and_the_next_one_works() -> None:
    found = assert_identical(run_ranks(divergent_calls, 3, deadline=60))
    texts = [text for text, _, _ in found]
    assert (
        texts[0] == "call 0 of base differs between the ranks, and was made by none: rank 1: num_tokens 5, the others 4"
    )
    expected = [
        "rank 1: num_tokens 5, the others 4",
        "rank 1: num_tokens 0, the others 4",
        "rank 1: tier SEPARATE_REDUCE, the others SEQUENCE_PARALLEL",
        "rank 1: layer 1, the others 0",
        "rank 1: residual 1, the others 0",
        "rank 1: output rows, the others full",
        "rank 1: next_norm 1, the others 0",
        "rank 1: decode 1, the others 0",
        "rank 1: lane 1, the others 0",
        "rank 1: bias 1, the others 0",
        "rank 1: scale 2.0, the others 1.0",
        "rank 1: num_tokens 5, the others 4",
        "rank 0: part tail, the others reduce",
    ]
    for text, words in zip(texts, expected, strict=True):
        assert f"made by none: {words}" in text
    assert {ranks for _, ranks, _ in found[:-1]} == {(1,)}
    assert found[-1][1] == (), "three different calls have no majority"
    assert {value for _, _, value in found} == {"6.0"}


def missing_call(deadline: float) -> tuple[str, str, float]:
    rank = dist.get_rank()
    settings = Settings(check_uniform=True, vote_deadline=deadline, poll_deadline=deadline)
    comm = Communicator.negotiate(SPEC, dist.group.WORLD, settings=settings)
    tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(24, 8))
    start = time.monotonic()
    texts = []
    for _ in range(2):
        if rank == 1:
            time.sleep(2.5 * deadline)
            break
        try:
            tail(torch.zeros(3, 8), torch.zeros(3, 24))
        except k3comm.K3CommError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return (*texts, *[""] * (2 - len(texts)), time.monotonic() - start)


def test_a_rank_that_makes_no_call_is_a_time_out_and_not_a_hang() -> None:
    first, second, seconds = run_ranks(missing_call, 2, 1.0, deadline=60)[0]
    assert first.startswith("CommunicationTimeoutError: check_uniform, call 0 of k3comm-0: rank 1 did not come"), first
    assert second.startswith("ClosedError: "), second
    assert seconds < 20
