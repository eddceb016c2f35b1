"""A shared sum that is begun early: its rules on one rank, its streams and its NCCL communicator with stand-ins."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

import k3comm
from k3comm import Communicator, LatentMoESpec, Settings, Tier
from k3comm.errors import InputError
from k3comm.record import Record, parse_call
from k3comm.streams import SideStream, StreamOrder
from k3comm.testing import run_ranks
from k3comm.testing._facts import h200_facts
from k3comm.tiers.few_sms import FewSMs
from k3comm.tiers.interface import TierContext
from k3comm.tiers.separate_reduce import Plugin

SPEC = LatentMoESpec(hidden_size=24, latent_size=8, top_k=2)
BF16 = torch.bfloat16


def rows(m: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, width, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with Communicator.negotiate(SPEC, lanes=2) as made:
        yield made


def handle(comm: Communicator, layer: int = 3, **arguments: Any) -> k3comm.MoETail:
    return comm.moe_tail(layer_index=layer, norm_weight=rows(1, 8, 8)[0], up_weight=rows(24, 8, 9), **arguments)


# One rank: what it accepts, and what comes out


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("output", ["full", "rows"])
@pytest.mark.parametrize("m", [0, 1, 5])
def test_an_early_sum_changes_no_bit(comm: Communicator, m: int, output: str, precise: bool) -> None:
    tail, gain = handle(comm, precise=precise), torch.ones(24, dtype=BF16)
    parts = rows(m, 8, 1), rows(m, 24, 2), rows(m, 24, 3)
    plan = tail.plan(m, tier=Tier.SEPARATE_REDUCE, output=output, next_norm=True)
    expected = tail(*parts, plan=plan, output=output, next_norm_weight=gain)
    arguments = {"output": output, "next_norm_weight": gain}
    early = tail.reduce_shared(parts[1])
    assert early.sum.dtype == (torch.float32 if precise else BF16)
    found = [tail(parts[0], early, parts[2], plan=plan, **arguments)]
    found += [tail(parts[0], tail.reduce_shared(parts[1]), parts[2], **arguments)]
    found += [tail.finish(tail.reduce_routed(parts[0]), tail.reduce_shared(parts[1]), parts[2], **arguments)]
    for out, normed in found:
        assert torch.equal(out, expected[0])
        assert torch.equal(normed, expected[1])
        assert (out.dtype, normed.dtype) == (BF16, BF16)


def test_an_early_sum_finishes_deferred_experts(comm: Communicator) -> None:
    tail, shared = handle(comm), rows(3, 24, 2)
    slots = rows(6, 8, 1), rows(6, 1, 4)[:, 0].contiguous(), torch.arange(6, dtype=torch.int32)
    expected = tail.deferred(*slots, shared, num_tokens=3)
    assert torch.equal(tail.deferred(*slots, tail.reduce_shared(shared), num_tokens=3), expected)


def test_the_partial_is_as_it_was_and_may_have_any_layout(comm: Communicator) -> None:
    tail, routed, wide = handle(comm), rows(3, 8, 1), rows(3, 50, 2)
    shared = wide[:, 1:49:2]
    before = wide.clone()
    expected = tail(routed, shared, plan=tail.plan(3, tier=Tier.SEPARATE_REDUCE))
    assert torch.equal(tail(routed, tail.reduce_shared(shared)), expected)
    assert torch.equal(wide, before)


def refused(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


def test_what_an_early_sum_is_refused_for(comm: Communicator) -> None:
    tail, other = handle(comm), handle(comm, 4)
    refused(InputError, "shared: shape (3, 8) given; accepted is [m, 24]", lambda: tail.reduce_shared(rows(3, 8)))
    refused(InputError, "shared: list given", lambda: tail.reduce_shared([1.0]))
    early, routed = tail.reduce_shared(rows(3, 24)), rows(3, 8)
    for text, call in (
        (
            "shared: the early sum of layer 3 given to layer 4; accepted is one of the same",
            lambda: other(routed, early),
        ),
        ("shared: 3 rows given; accepted are the 2 of the routed part", lambda: tail(rows(2, 8), early)),
        ("residual: shape (3, 8) given", lambda: tail(routed, early, routed)),
        ("latent: NoneType given", lambda: tail.finish(None, early)),
    ):
        refused(InputError, text, call)
    with comm.step(lane=1):
        refused(InputError, "layer 3 was begun in lane 0; accepted is lane 1's own", lambda: tail(routed, early))
    assert early.state == "open"  # none of these is the call that it is for
    tail(routed, early)
    refused(InputError, "layer 3 was used; accepted is one that is open, once", lambda: tail(routed, early))
    assert repr(early) == "EarlySum(layer=3, lane=0, rows=3, state='used')"
    assert not comm.early
    assert not comm.broken


def plans_of_two_ranks() -> list[str]:
    found = []
    with Communicator.negotiate(SPEC, dist.group.WORLD, settings=Settings(overlap_sms=4)) as comm:
        tail = comm.moe_tail(layer_index=3, up_weight=rows(24, 8, 9))
        early = tail.reduce_shared(rows(3, 24))
        try:
            tail(rows(3, 8), early, plan=tail.plan(3, tier=Tier.FUSED_LANE_AR))
        except k3comm.PlanError as error:
            found.append(str(error))
        out = tail(rows(3, 8), early)  # it is open still
        expected = tail(rows(3, 8), rows(3, 24), plan=tail.plan(3, tier=Tier.SEPARATE_REDUCE))
        found.append(str(torch.equal(out, expected)))
    return found


def setting_of_one_rank() -> str:
    rank = dist.get_rank()
    try:
        Communicator.negotiate(SPEC, dist.group.WORLD, settings=Settings(overlap_sms=4 if rank else None))
    except k3comm.NegotiationError as error:
        return str(error)
    return "agreed"


def test_two_ranks_on_gloo() -> None:
    """The setting is accepted, changes nothing, and has to be the same on both."""
    text = "plan: FUSED_LANE_AR given with an early sum; accepted is SEPARATE_REDUCE or none"
    assert run_ranks(plans_of_two_ranks, 2) == [[text, "True"]] * 2
    for text in run_ranks(setting_of_one_rank, 2):
        assert "settings.overlap_sms differs: off on rank 0; 4 on rank 1" in text


def test_who_begins_again_drops_the_one_before(comm: Communicator) -> None:
    tail, other = handle(comm), handle(comm, 4)
    first = tail.reduce_shared(rows(3, 24))
    with comm.step(lane=1):
        apart = tail.reduce_shared(rows(3, 24))
    second = other.reduce_shared(rows(3, 24))
    assert [one.state for one in (first, apart, second)] == ["dropped by reduce_shared of layer 4", "open", "open"]
    text = "the early sum of layer 3 was dropped by reduce_shared of layer 4; accepted is one that is open"
    refused(InputError, text, lambda: tail(rows(3, 8), first))
    other(rows(3, 8), second)
    with comm.step(lane=1):
        tail(rows(3, 8), apart)


def test_suspend_and_close_drop_it(comm: Communicator) -> None:
    tail = handle(comm)
    early = tail.reduce_shared(rows(3, 24))
    comm.suspend()
    refused(k3comm.ClosedError, "is suspended", lambda: tail.reduce_shared(rows(3, 24)))
    comm.resume()
    refused(InputError, "was dropped by suspend()", lambda: tail(rows(3, 8), early))
    late = tail.reduce_shared(rows(3, 24))
    comm.close()
    assert (late.state, comm.early) == ("dropped by close()", {})
    for call in (lambda: tail.reduce_shared(rows(3, 24)), lambda: tail(rows(3, 8), late)):
        refused(k3comm.ClosedError, "is closed", call)


def test_records_tell_the_parts_apart(tmp_path: Any) -> None:
    with Communicator.negotiate(SPEC, settings=Settings(record=tmp_path), name="solo") as comm:
        tail = handle(comm)
        tail(rows(3, 8), tail.reduce_shared(rows(3, 24)))
        tail.finish(tail.reduce_routed(rows(0, 8)), tail.reduce_shared(rows(0, 24)))
    found = [parse_call(line) for line in Record.of(tmp_path / "solo.rank0.log").lines()]
    parts = [one["part"] for one in found if one]
    assert parts == ["reduce_shared", "finish_shared", "reduce", "reduce_shared", "finish_both"]


def test_a_compiled_model_can_not_begin_or_finish_one(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = handle(comm)
    early = tail.reduce_shared(rows(3, 24))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    refused(InputError, "reduce_shared: called in a compiled model", lambda: tail.reduce_shared(rows(3, 24)))
    text = "shared: an early sum given in a compiled model; accepted is a tensor"
    slots = rows(3, 8), torch.ones(3), torch.arange(3, dtype=torch.int32)
    refused(InputError, text, lambda: tail(rows(3, 8), early))
    refused(InputError, text, lambda: tail.deferred(*slots, early, num_tokens=3))


# Streams


class FakeStream:
    """A stream that writes down what is put on it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.log.append(f"event on {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def __str__(self) -> str:
        return f"<stream {self.name}>"


class FakeDevice:
    """The streams of a device, and which one work is issued to."""

    def __init__(self, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.main, self.second, self.beside = (FakeStream(name, self.log) for name in ("main", "second", "side"))
        self.now, self.capturing = self.main, False
        comm.streams = StreamOrder(lambda: self.now, lambda: self.capturing)
        comm.side = SideStream(self.beside, lambda: self.now, self.inside, lambda: self.capturing)
        tier = comm._tiers[Tier.SEPARATE_REDUCE]
        for name in ("reduce", "reduce_into", "_project", "_add_up"):
            monkeypatch.setattr(tier, name, self.logged(name, getattr(tier, name)))
        monkeypatch.setattr(type(comm), "_check_no_capture", lambda self, what: None)

    def add_tier(self, comm: Communicator) -> None:
        comm._tiers[Tier.FUSED_LANE_AR] = SimpleNamespace(
            run=lambda call: self.log.append("other tier"), takes_deferred=lambda: False, close=lambda: None
        )

    @contextmanager
    def inside(self, stream: FakeStream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def logged(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.log.append(f"{name} on {self.now.name}")
            return work(*args, **kwargs)

        return run


@pytest.fixture
def device(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(comm, monkeypatch)


def test_it_forks_at_once_and_joins_just_before_the_sum_is_read(comm: Communicator, device: FakeDevice) -> None:
    tail = handle(comm)
    early = tail.reduce_shared(rows(3, 24))
    fork = ["side waits for main", "reduce_into on side", "event on side"]
    assert device.log == fork
    tail(rows(3, 8), early, rows(3, 24))
    last = ["reduce on main", "_project on main", "main waits for event of side", "_add_up on main"]
    assert device.log == fork + last
    device.log.clear()
    tail.finish(tail.reduce_routed(rows(3, 8)), tail.reduce_shared(rows(3, 24)))
    assert device.log == ["reduce on main", *fork, *last[1:]]


@pytest.mark.parametrize("sharded", [False, True])
def test_each_way_of_finishing_joins_before_it_reads(comm: Communicator, device: FakeDevice, sharded: bool) -> None:
    tail = comm.moe_tail(layer_index=0, project=lambda z: torch.zeros(z.shape[0], 24), sharded=sharded)
    for output in ("full", "rows"):
        device.log.clear()
        tail(rows(3, 8), tail.reduce_shared(rows(3, 24)), output=output)
        assert device.log.index("_project on main") < device.log.index("main waits for event of side")


def test_its_memory_is_held_until_a_caller_has_joined(comm: Communicator, device: FakeDevice) -> None:
    tail = handle(comm)
    early = tail.reduce_shared(rows(3, 24))
    held = comm.early[0]
    assert held is early
    assert held._partial is not None
    del early
    tail.reduce_shared(rows(3, 24))  # nobody has finished it, so this stream joins before it is let go of
    assert device.log[3] == "main waits for event of side"
    assert (held._partial, held._event, held.state) == (None, None, "dropped by reduce_shared of layer 3")


def test_memory_is_marked_only_where_another_stream_joins(comm: Communicator, device: FakeDevice) -> None:
    tail, marked = handle(comm), []

    class Marked(torch.Tensor):
        def record_stream(self, stream: FakeStream) -> None:
            marked.append(stream.name)

    for now, expected in ((device.main, []), (device.second, ["second", "side"])):
        early = tail.reduce_shared(rows(3, 24))
        early.sum, early._partial = early.sum.as_subclass(Marked), early._partial.as_subclass(Marked)
        comm.use_stream(now)
        device.now = now
        with suppress(TypeError):
            tail(rows(3, 8), early)
        assert marked == expected


def test_a_call_from_a_second_stream_is_refused_before_it_forks(comm: Communicator, device: FakeDevice) -> None:
    tail = handle(comm)
    tail.reduce_shared(rows(3, 24))
    device.log.clear()
    device.now = device.second
    refused(InputError, "a call from <stream second>", lambda: tail.reduce_shared(rows(3, 24)))
    assert device.log == []


def test_another_tier_waits_for_it_first(comm: Communicator, device: FakeDevice) -> None:
    tail = handle(comm)
    early = tail.reduce_shared(rows(3, 24))
    plan = attrs.evolve(tail.plan(3), tier=Tier.FUSED_LANE_AR)
    device.add_tier(comm)
    device.log.clear()
    tail(rows(3, 8), rows(3, 24), plan=tail.plan(3))  # a library's: NCCL's own blocks leave room for each other
    assert "main waits for event of side" not in device.log
    device.log.clear()
    tail(rows(3, 8), rows(3, 24), plan=plan)
    assert device.log == ["main waits for event of side", "other tier"]
    assert early.state == "open"
    device.log.clear()
    tail(rows(3, 8), early)  # waits no second time
    assert "main waits for event of side" not in device.log


def test_captures(comm: Communicator, device: FakeDevice) -> None:
    tail = handle(comm)
    early = tail.reduce_shared(rows(3, 24))
    device.add_tier(comm)
    device.capturing = True
    plan = attrs.evolve(tail.plan(3, graph=True), tier=Tier.FUSED_LANE_AR)
    with comm.step(graph=True):
        text = "the early sum of layer 3 is open, begun outside of a capture, and this call is inside of one; accepted"
        for call in (
            lambda: tail(rows(3, 8), early),
            lambda: tail.reduce_shared(rows(3, 24)),
            lambda: tail(rows(3, 8), rows(3, 24), plan=plan),
        ):
            refused(k3comm.CaptureError, text, call)
    assert not comm.broken
    device.capturing = False
    tail(rows(3, 8), early)

    device.capturing = True
    with comm.step(graph=True):
        early = tail.reduce_shared(rows(3, 24))
        tail(rows(3, 8), early)
        lost = tail.reduce_shared(rows(3, 24))
    device.capturing = False
    text = "begun inside of a capture, and this call is outside of one"
    refused(k3comm.CaptureError, text, lambda: tail(rows(3, 8), lost))
    device.log.clear()
    tail.reduce_shared(rows(3, 24))  # an event of a capture that is over must not be waited for
    assert device.log == ["side waits for main", "reduce_into on side", "event on side"]
    assert lost.state == "dropped by the end of the capture in which it was begun"


def test_a_capture_outside_a_step_is_refused(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = handle(comm)
    monkeypatch.setattr(type(tail), "_capturing", True)
    refused(k3comm.CaptureError, "comm.step(graph=True)", lambda: tail.reduce_shared(rows(3, 24)))


def test_a_call_that_fails_half_way_still_joins(comm: Communicator, device: FakeDevice) -> None:
    tail = comm.moe_tail(layer_index=0, project=lambda z: z)
    refused(InputError, "project: returned (3, 8)", lambda: tail(rows(3, 8), tail.reduce_shared(rows(3, 24))))
    assert device.log[-1] == "main waits for event of side"
    assert comm.broken


# NCCL's communicator


class FakeNccl:
    """ProcessGroupNCCL as far as a communicator with few blocks needs it."""

    made: list[FakeNccl]

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=None, min_ctas=None)
            self._timeout = timedelta(minutes=10)

    def __init__(self, store: Any, rank: int, size: int, options: FakeNccl.Options) -> None:
        self.store, self.place, self.options, self.ended = store, (rank, size), options, 0
        self.calls: list[str] = []
        FakeNccl.made.append(self)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.calls.append(f"allreduce, asyncOp={options.asyncOp}")
        tensors[0].mul_(3)  # ranks 1 and 2 of the self-check's data; of equal parts, three times

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> SimpleNamespace:
        self.calls.append(f"allgather, asyncOp={options.asyncOp}")
        out.view(2, *x.shape)[0], out.view(2, *x.shape)[1] = x, 2 * x
        return SimpleNamespace(wait=lambda: self.calls.append("waited"))  # as a torch that has not synchronised

    def abort(self) -> None:
        self.ended += 1


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNccl]:
    FakeNccl.made = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 2])
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    return FakeNccl


def group() -> Any:
    options = SimpleNamespace(_timeout=timedelta(seconds=77))
    return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options), group_name="7")


def context(**changes: Any) -> TierContext:
    arguments: dict[str, Any] = {
        "spec": SPEC,
        "settings": Settings(overlap_sms=4),
        "group": group(),
        "rank": 0,
        "world_size": 2,
        "device": torch.device("cpu"),
        "dtype": BF16,
        "facts": h200_facts(world_size=2),
        "store": dist.HashStore,
        "serial": 5,
    }
    return TierContext(**arguments | changes)


def test_the_communicator_is_made_with_so_many_blocks(nccl: type[FakeNccl]) -> None:
    tier, where = Plugin(), context()
    assert where.facts is not None
    assert where.facts.backend == "nccl"
    tier.prepare(where)
    (made,) = nccl.made
    options: Any = made.options
    assert (options.config.max_ctas, options.config.min_ctas) == (4, 1)
    assert options._timeout == timedelta(seconds=77)
    assert (options.group_name, options.global_ranks_in_group, made.place) == ("k3comm/few-sms/5", [4, 2], (0, 2))
    made.store.set("here", "1")
    assert made.store.underlying_store.check(["k3comm/few-sms/5/here"])


def test_only_an_early_sum_goes_over_it(nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch) -> None:
    tier, where = Plugin(), context()
    tier.prepare(where)
    own: list[str] = []
    monkeypatch.setattr(tier._collectives, "all_reduce", lambda *x: own.append("all_reduce"))
    monkeypatch.setattr(tier._collectives, "all_gather", lambda x: own.append("all_gather") or x.expand(2, *x.shape))
    weights = SimpleNamespace(precise=False)
    x, out = torch.ones(3, 24, dtype=BF16), torch.zeros(3, 24, dtype=BF16)
    tier.reduce(x, weights)
    assert (own, nccl.made[0].calls) == (["all_reduce"], [])
    tier.reduce_into(out, x, weights)
    assert (own, nccl.made[0].calls) == (["all_reduce"], ["allreduce, asyncOp=False"])
    assert out.unique().tolist() == [3.0]
    assert x.unique().tolist() == [1.0]
    weights.precise, exact = True, torch.zeros(3, 24)
    tier.reduce_into(exact, x, weights)
    assert (own, nccl.made[0].calls[1:]) == (["all_reduce"], ["allgather, asyncOp=False", "waited"])
    assert exact.unique().tolist() == [3.0]


def test_the_self_check_connects_and_judges_it(nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3comm.tiers.library.check_sums", lambda *arguments: k3comm.Verdict.yes())
    tier, where = Plugin(), context()
    tier.prepare(where)
    assert tier.self_check(where)
    assert nccl.made[0].calls == ["allreduce, asyncOp=False", "allgather, asyncOp=False", "waited"]
    monkeypatch.setattr(nccl, "allreduce", lambda self, tensors, options: None)
    assert not tier.self_check(where)


def test_who_has_none(nccl: type[FakeNccl]) -> None:
    host = attrs.evolve(h200_facts(world_size=2), backend="gloo")
    for where in (
        context(settings=Settings()),
        context(facts=host),
        context(world_size=1, group=None, store=None),
    ):
        tier = Plugin()
        tier.prepare(where)
        tier.close()
    assert nccl.made == []


def test_what_makes_the_setting_void_is_refused(nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch) -> None:
    facts = attrs.evolve(h200_facts(world_size=2), environment={"NCCL_MAX_CTAS": "16"})
    text = "overlap_sms: 4 given with NCCL_MAX_CTAS=16, which NCCL puts before it; accepted is one of the two"
    refused(InputError, text, lambda: Plugin().prepare(context(facts=facts)))
    monkeypatch.setattr(nccl.Options, "__init__", lambda self: None)
    text = "overlap_sms: 4 given; accepted is off, since this torch's NCCL can't limit the SMs"
    refused(InputError, text, lambda: Plugin().prepare(context()))
    monkeypatch.delattr(dist, "ProcessGroupNCCL")
    refused(InputError, text, lambda: Plugin().prepare(context()))


def test_close_ends_it_once_in_bounded_time(nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3comm.tiers.separate_reduce.CLOSE_SECONDS", 0.05)
    tier = Plugin()
    tier.prepare(context())
    tier.close()
    tier.close()
    assert nccl.made[0].ended == 1

    graph_is_gone = threading.Event()
    monkeypatch.setattr(nccl, "abort", lambda self: graph_is_gone.wait(20))
    started: list[threading.Thread] = []

    def start(name: str, work: Callable[[], None]) -> threading.Thread:
        started.append(threading.Thread(target=work, name=name, daemon=True))
        started[0].start()
        return started[0]

    stuck = Plugin()
    stuck.prepare(context(start_thread=start))
    stuck.close()
    assert started[0].is_alive()
    graph_is_gone.set()
    started[0].join(20)
    assert not started[0].is_alive()


def test_a_forked_child_leaves_it_alone(nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch) -> None:
    few = FewSMs(group(), torch.device("cpu"), 4, dist.HashStore(), "key")
    monkeypatch.setattr("os.getpid", lambda: -1)
    few.close()
    assert nccl.made[0].ended == 0


def test_a_context_that_has_ended_is_no_error(nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(self: FakeNccl) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    few = FewSMs(group(), torch.device("cpu"), 4, dist.HashStore(), "key")
    monkeypatch.setattr(nccl, "abort", ended)
    few.close()
