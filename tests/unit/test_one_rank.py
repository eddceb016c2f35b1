"""One rank: no group, no peer, and everything that is wrong with a call found before one would be involved."""

import math
import re

import pytest
import torch

import k3comm
from k3comm import Communicator, LatentMoESpec, MoETailOp, Settings, Tier, TopKPackOp
from k3comm.kernels import reference
from k3comm.negotiate.probe import detect_host, probe
from k3comm.streams import SideStream, StreamOrder
from k3comm.tiers import Agreement

SPEC = LatentMoESpec(hidden_size=24, latent_size=8, top_k=2, dtype="bfloat16")
W = torch.zeros(24, 8, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("K3COMM_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def comm() -> Communicator:
    return Communicator.negotiate(SPEC)


@pytest.fixture
def tail(comm: Communicator) -> k3comm.MoETail:
    return comm.moe_tail(layer_index=0, norm_weight=torch.ones(8, dtype=torch.bfloat16), up_weight=W)


def rows(m: int, width: int, **options) -> torch.Tensor:
    return torch.zeros(m, width, dtype=options.pop("dtype", torch.bfloat16), **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_one_rank_finishes_a_layer(dtype: str, num_tokens: int) -> None:
    comm = Communicator.negotiate(LatentMoESpec(hidden_size=24, latent_size=8, top_k=2, dtype=dtype))
    assert list(comm.agreement.capacities) == [Tier.SEPARATE_REDUCE]
    case = reference.integer_case(1, max(num_tokens, 1), 24, 8, dtype=comm.dtype, seed=1, norm=False, bias=True)
    tail = comm.moe_tail(layer_index=0, up_weight=case.up_weight, up_bias=case.up_bias)
    out = tail(case.routed[0][:num_tokens], case.shared[0][:num_tokens], case.residual[:num_tokens])
    assert torch.equal(out, reference.round_once(case.truth(), comm.dtype)[:num_tokens])
    assert out.shape == (num_tokens, 24)


def test_the_end_of_the_device_is_told_by_what_ended_it(
    comm: Communicator, tail: k3comm.MoETail, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wait in a kernel has expired, asking whether a graph is captured is the first thing that fails."""

    def ended() -> bool:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", ended)
    monkeypatch.setattr(comm, "device", torch.device("meta"))  # any but "cpu"
    arguments = rows(3, 8, device="meta"), rows(3, 24, device="meta")
    with pytest.raises(RuntimeError, match="unspecified launch failure"):  # nothing else is known of it
        tail(*arguments)
    expired = k3comm.PeerTimeoutError("nothing from rank 1", (1,))
    monkeypatch.setattr(comm._tiers[Tier.SEPARATE_REDUCE], "failure", lambda: expired)
    with pytest.raises(k3comm.PeerTimeoutError) as caught:
        tail(*arguments)
    assert caught.value is expired
    assert str(caught.value.__cause__) == "unspecified launch failure"
    with pytest.raises(k3comm.ClosedError, match=r"PeerTimeoutError: nothing from rank 1"):
        tail(*arguments)


def test_streams_ask_where_the_session_asks(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a device that has ended is told by its cause whoever asks first, an early sum or the order of streams."""

    def ended() -> bool:
        raise RuntimeError("unspecified launch failure")

    expired = k3comm.PeerTimeoutError("nothing from rank 1", (1,))
    monkeypatch.setattr(comm._tiers[Tier.SEPARATE_REDUCE], "failure", lambda: expired)
    monkeypatch.setattr(comm, "device", torch.device("meta"))  # any but "cpu"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", ended)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    order = StreamOrder.of(torch.device("cuda", 0), comm._capturing)
    side = SideStream.of(torch.device("cuda", 0), comm._capturing)
    assert order is not None
    assert side is not None
    for ask in (order.check, side.capturing):
        with pytest.raises(k3comm.PeerTimeoutError) as caught:
            ask()
        assert caught.value is expired
    assert comm.broken == "PeerTimeoutError: nothing from rank 1"


def test_one_rank_says_why_it_uses_one_tier(comm: Communicator) -> None:
    text = str(comm.report)
    assert "1 rank on 1 host" in text
    assert re.search(r"FUSED_LANE_AR +no +K2 +0\.\. +one rank has nobody to talk to", text)
    explained = comm.explain(1)
    assert explained.tier is Tier.SEPARATE_REDUCE
    assert str(explained).splitlines()[-1] == "  not FUSED_LANE_AR: not agreed: one rank has nobody to talk to"


def test_errors_of_one_rank_are_raised_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3COMM_VOTE_DEADLINE", "soon")
    with pytest.raises(k3comm.SettingsError, match=r"^K3COMM_VOTE_DEADLINE \(vote_deadline\): 'soon' given"):
        Communicator.negotiate(SPEC)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"spec": "kimi"}, "spec: 'kimi' given; accepted is a LatentMoESpec"),
        ({"layout": 4}, "layout: 4 given; accepted is a ParallelLayout"),
        ({"layout": k3comm.ParallelLayout(tp=2)}, "layout.tp: 2 given for a group of 1 ranks; accepted are divisors"),
        ({"settings": {}}, "settings: {} given; accepted is a Settings"),
        ({"operations": ()}, "operations: () given; this version serves MoETailOp()"),
        ({"operations": (MoETailOp(), TopKPackOp(max_rows=8, k=64))}, "this version serves MoETailOp()"),
        ({"lanes": 9}, "lanes: 9 given; accepted are 1 to 8"),
        ({"lanes": True}, "lanes: True given; accepted are 1 to 8"),
        ({"device": "tpu"}, "device: 'tpu' given"),
        ({"device": "mps"}, "device: 'mps' given; accepted are cpu and cuda"),
        ({"group": "tp"}, "group: 'tp' given; accepted is a torch.distributed.ProcessGroup"),
    ],
)
def test_negotiate_says_what_it_accepts(arguments: dict, text: str) -> None:
    with pytest.raises(k3comm.InputError, match=re.escape(text)):
        Communicator.negotiate(**{"spec": SPEC, **arguments})


def test_negotiate_reads_a_windows_file(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'schema = 1\nfamily = "host"\n[settings]\npoll_deadline = 5\n[tiers.SEPARATE_REDUCE]\ntokens = ["0.."]\n'
    )
    comm = Communicator.negotiate(SPEC, settings=Settings(windows=path))
    assert comm.settings.poll_deadline == 5
    assert comm.settings.sources["poll_deadline"] == str(path)
    assert f"poll_deadline=5.0 ({path})" in str(comm.report)
    with pytest.raises(k3comm.WindowsError, match="can't be read: No such file"):
        Communicator.negotiate(SPEC, settings=Settings(windows=tmp_path / "absent.toml"))


bf16 = torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"up_weight": None}, "up_weight, project: neither given; accepted is one of the two"),
        ({"project": lambda z: z}, "up_weight, project: both given; accepted is one of the two"),
        ({"up_weight": rows(24, 9)}, "up_weight: (24, 9) given; accepted are (24, 8)"),
        ({"up_weight": rows(8, 24)}, "up_weight: (8, 24) given; accepted are (24, 8)"),
        ({"up_weight": [1]}, "up_weight: list given; accepted are (24, 8)"),
        ({"up_weight": W.float()}, "up_weight: torch.float32 given; accepted are torch.bfloat16"),
        ({"norm_weight": rows(1, 8)}, "norm_weight: (1, 8) given; accepted is a tensor [8]"),
        ({"norm_weight": torch.ones(8).half()}, "norm_weight: torch.float16 given; accepted are torch.bfloat16 and"),
        ({"up_bias": torch.ones(8)}, "up_bias: (8,) given; accepted is a tensor [24]"),
        ({"up_bias": 0.5}, "up_bias: float given; accepted is a tensor [24]"),
        ({"routed_scale": math.nan}, "routed_scale: nan given; accepted are numbers that fp32 holds"),
        ({"routed_scale": "2"}, "routed_scale: '2' given; accepted are numbers that fp32 holds"),
        ({"routed_scale": True}, "routed_scale: True given; accepted are numbers that fp32 holds"),
        ({"precise": 1}, "precise: 1 given; accepted are True and False"),
        ({"up_weight": None, "project": 3}, "project: 3 given; accepted is a callable z [m, 8] -> [m, 24]"),
        ({"up_weight": None, "project": lambda z: z, "precise": True}, "precise: True given with project"),
        ({"layer_index": -1}, "layer_index: -1 given; accepted are whole numbers from 0"),
        ({"layer_index": True}, "layer_index: True given; accepted are whole numbers from 0"),
        ({"layer_index": 3}, "layer_index: 3 has a handle already; accepted is each index once"),
        ({"up_weight": W.to("meta")}, "up_weight: on meta; accepted is cpu"),
    ],
)
def test_a_handle_says_what_it_accepts(comm: Communicator, arguments: dict, text: str) -> None:
    comm.moe_tail(layer_index=3, up_weight=W)
    with pytest.raises(k3comm.InputError, match=re.escape(text)):
        comm.moe_tail(**{"layer_index": 1, "up_weight": W, **arguments})
    comm.moe_tail(layer_index=1, up_weight=W)  # a refused handle takes no index


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"routed": [[0.0]]}, "routed: list given; accepted is a tensor [m, 8]"),
        ({"routed": rows(3, 9)}, "routed: shape (3, 9) given; accepted is [m, 8]"),
        ({"routed": torch.zeros(8, dtype=bf16)}, "routed: shape (8,) given; accepted is [m, 8]"),
        ({"routed": rows(3, 8, dtype=torch.float32)}, "routed: torch.float32 given; accepted is torch.bfloat16"),
        ({"routed": rows(3, 8, device="meta")}, "routed: on meta; accepted is cpu"),
        ({"shared": rows(3, 8)}, "shared: shape (3, 8) given; accepted is [m, 24]"),
        ({"shared": rows(2, 24)}, "shared: 2 rows given; accepted are the 3 of the routed part"),
        ({"shared": rows(3, 24, dtype=torch.float16)}, "shared: torch.float16 given; accepted is torch.bfloat16"),
        ({"residual": rows(2, 24)}, "residual: 2 rows given; accepted are 3 (3 tokens, 1 ranks, output='full')"),
        ({"residual": rows(3, 24, dtype=torch.float32)}, "residual: torch.float32 given; accepted is torch.bfloat16"),
        ({"output": "mine"}, "output: 'mine' given; accepted are 'full', 'rows'"),
        ({"next_norm_weight": torch.ones(8)}, "next_norm_weight: (8,) given; accepted is a tensor [24]"),
        ({"plan": "fast"}, "plan: 'fast' given; accepted is what MoETail.plan returns"),
    ],
)
def test_a_call_says_what_it_accepts(tail: k3comm.MoETail, arguments: dict, text: str) -> None:
    with pytest.raises(k3comm.InputError, match=re.escape(text)):
        tail(**{"routed": rows(3, 8), "shared": rows(3, 24), **arguments})


def test_the_halves_say_what_they_accept(tail: k3comm.MoETail) -> None:
    with pytest.raises(k3comm.InputError, match=re.escape("routed: shape (3, 24) given; accepted is [m, 8]")):
        tail.reduce_routed(rows(3, 24))
    with pytest.raises(k3comm.InputError, match=re.escape("latent: torch.float32 given; accepted is torch.bfloat16")):
        tail.finish(rows(3, 8, dtype=torch.float32), rows(3, 24))
    with pytest.raises(k3comm.InputError, match="shared: 2 rows given; accepted are the 3 of the routed part"):
        tail.finish(rows(3, 8), rows(2, 24))
    with pytest.raises(k3comm.InputError, match="latent: NoneType given"):
        tail.finish(None, rows(2, 24))


def test_plans_are_checked(comm: Communicator, tail: k3comm.MoETail) -> None:
    plan = tail.plan(3)
    assert tail.plan(3) is plan
    assert tail.plan(3, graph=True) is not plan
    assert tail.plan(3, graph=True) is tail.plan(3, True)
    assert tail(rows(2, 8), rows(2, 24), plan=plan).shape == (2, 24)
    with pytest.raises(k3comm.PlanError, match="plan: made for up to 3 rows, called with 4"):
        tail(rows(4, 8), rows(4, 24), plan=plan)
    with pytest.raises(k3comm.PlanError, match="made for output='full', next_norm=False; called with output='rows'"):
        tail(rows(3, 8), rows(3, 24), plan=plan, output="rows")
    with pytest.raises(k3comm.PlanError, match="next_norm=False; called with output='full', next_norm=True"):
        tail(rows(3, 8), rows(3, 24), plan=plan, next_norm_weight=torch.ones(24))
    other = Communicator.negotiate(SPEC).moe_tail(layer_index=0, up_weight=W)
    with pytest.raises(k3comm.PlanError, match=r"made by communicator k3comm-\d+, given to k3comm-\d+"):
        tail(rows(3, 8), rows(3, 24), plan=other.plan(3))
    sibling = comm.moe_tail(layer_index=1, up_weight=W)
    assert sibling(rows(3, 8), rows(3, 24), plan=plan).shape == (3, 24)


@pytest.mark.parametrize("bad", [-1, 1.5, "3", None])
def test_a_plan_needs_a_count(tail: k3comm.MoETail, bad: object) -> None:
    for _ in range(2):  # a refusal is not memoised as a plan
        with pytest.raises(k3comm.InputError, match=re.escape(f"num_tokens: {bad!r} given; accepted are whole")):
            tail.plan(bad)


def test_a_tier_by_name_is_used_or_raises(comm: Communicator, tail: k3comm.MoETail) -> None:
    assert tail.plan(3, tier=Tier.SEPARATE_REDUCE).forced
    with pytest.raises(k3comm.TierUnavailableError, match="FUSED_LANE_AR: not agreed: one rank has nobody"):
        tail.plan(3, tier=Tier.FUSED_LANE_AR)
    with pytest.raises(
        k3comm.InputError, match=re.escape("tier: 'fast' given; accepted are None and members of k3comm.Tier")
    ):
        tail.plan(3, tier="fast")
    with pytest.raises(k3comm.InputError, match=re.escape("output: 'half' given; accepted are 'full', 'rows'")):
        tail.plan(3, output="half")


def test_a_closed_communicator_says_so(comm: Communicator, tail: k3comm.MoETail) -> None:
    plan = tail.plan(3)
    comm.close()
    comm.close()
    message = f"communicator {comm.name} is closed"
    for call in (
        lambda: tail(rows(3, 8), rows(3, 24), plan=plan),
        lambda: tail.reduce_routed(rows(3, 8)),
        lambda: tail.finish(rows(3, 8), rows(3, 24)),
        lambda: tail.plan(77),
        lambda: comm.moe_tail(layer_index=9, up_weight=W),
        lambda: comm.step().__enter__(),
    ):
        with pytest.raises(k3comm.ClosedError, match=message):
            call()
    for call in (lambda: tail.plan(3), lambda: tail.explain(3), lambda: comm.explain(3), lambda: comm.reserve(3)):
        with pytest.raises(k3comm.ClosedError, match=message):
            call()
    assert "closed" in repr(comm)


def test_weights_are_read_when_called(comm: Communicator) -> None:
    weight = torch.zeros(24, 8, dtype=bf16)
    tail = comm.moe_tail(layer_index=0, up_weight=weight)
    before = tail(torch.ones(1, 8, dtype=bf16), rows(1, 24))
    weight.fill_(1)
    after = tail(torch.ones(1, 8, dtype=bf16), rows(1, 24))
    assert (before.unique().item(), after.unique().item()) == (0.0, 8.0)


def test_a_projection_of_the_wrong_shape_is_named(comm: Communicator) -> None:
    tail = comm.moe_tail(layer_index=0, project=lambda z: z)
    with pytest.raises(k3comm.InputError, match=re.escape("project: returned (3, 8); accepted is (3, 24)")):
        tail(rows(3, 8), rows(3, 24))


def test_results_are_not_differentiable_and_alias_nothing(comm: Communicator) -> None:
    weight = torch.nn.Parameter(torch.ones(24, 8, dtype=bf16))
    tail = comm.moe_tail(layer_index=0, up_weight=weight)
    shared, residual = rows(2, 24), rows(2, 24)
    out = tail(rows(2, 8), shared, residual)
    assert not out.requires_grad
    out.fill_(7)
    assert torch.count_nonzero(shared) == torch.count_nonzero(residual) == 0


def test_the_probe_never_raises_and_knows_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = probe(torch.device("cpu"), world_size=2, backend="gloo")
    assert (facts.device, facts.family, facts.world_size, facts.backend) == ("cpu", "host", 2, "gloo")
    assert facts.host == detect_host() != ""
    assert isinstance(facts.free_memory, int)
    assert facts.free_memory > 0
    assert facts.versions["torch"] == torch.__version__

    def broken(*args: object) -> None:
        raise OSError("no such thing")

    monkeypatch.setattr("os.sysconf", broken)
    monkeypatch.setattr("platform.node", broken)
    facts = probe(torch.device("cuda", 0), world_size=1, backend="", host_identity=None)
    assert not facts.device_uuid or isinstance(facts.device_uuid, str)
    facts = probe(torch.device("cpu"), world_size=1, backend="", host_identity="mine")
    assert str(facts.free_memory) == "unknown: OSError: no such thing"
    assert facts.host == "mine"


@pytest.mark.parametrize("precise", [False, True])
def test_infinity_passes_the_projection(comm: Communicator, precise: bool) -> None:
    """A high + low pair must not make a NaN of inf - inf."""
    tail = comm.moe_tail(layer_index=0, up_weight=torch.ones(24, 8, dtype=bf16), precise=precise)
    routed = torch.zeros(2, 8, dtype=bf16)
    routed[0, 0] = float("inf")
    out = tail(routed, rows(2, 24))
    assert torch.isposinf(out[0]).all()
    assert torch.count_nonzero(out[1]) == 0


def test_only_strided_tensors(comm: Communicator, tail: k3comm.MoETail) -> None:
    with pytest.raises(k3comm.InputError, match=re.escape("shared: torch.sparse_coo given; accepted is torch.strided")):
        tail(rows(2, 8), rows(2, 24).to_sparse())
    with pytest.raises(k3comm.InputError, match=re.escape("up_weight: torch.sparse_coo given; accepted is")):
        comm.moe_tail(layer_index=7, up_weight=W.to_sparse())


@pytest.mark.parametrize("result", [None, (1,), 3, "complex", "meta"])
def test_what_a_projection_may_return(comm: Communicator, result: object) -> None:
    made = (
        {
            "complex": torch.zeros(3, 24, dtype=torch.complex64),
            "meta": torch.zeros(3, 24, device="meta"),
        }.get(result, result)
        if isinstance(result, str)
        else result
    )
    tail = comm.moe_tail(layer_index=0, project=lambda z: made)
    with pytest.raises(k3comm.InputError, match=r"project: returned .*; accepted is a floating-point tensor on cpu"):
        tail(rows(3, 8), rows(3, 24))


def test_steps_that_leave_out_of_order_leave_nothing_behind(comm: Communicator) -> None:
    first, second = comm.step(graph=True), comm.step(decode=True)
    first.__enter__()
    second.__enter__()
    assert comm.axes == (False, True)
    first.__exit__(None, None, None)
    assert comm.axes == (False, True)
    second.__exit__(None, None, None)
    assert comm.axes == (False, False)


def test_threads_have_steps_of_their_own(comm: Communicator) -> None:
    import threading

    seen = []
    with comm.step(graph=True, decode=True):
        thread = threading.Thread(target=lambda: seen.append(comm.axes))
        thread.start()
        thread.join()
        assert comm.axes == (True, True)
    assert seen == [(False, False)]


def test_the_plan_memo_is_bounded(tail: k3comm.MoETail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3comm.moe_tail.MAX_PLANS", 10)
    for m in range(100):
        assert tail.plan(m).num_tokens == m
    assert len(tail._eager) <= 10


def test_a_device_that_is_not_here(comm: Communicator) -> None:
    assert Communicator.negotiate(SPEC, device="cpu:0").device == torch.device("cpu")
    with pytest.raises(k3comm.InputError, match=r"device: 'cuda:999' given; \d+ CUDA devices are to be had here"):
        Communicator.negotiate(SPEC, device="cuda:999")
    with pytest.raises(k3comm.InputError, match=re.escape("exchange: 5 given; accepted is a k3comm.Exchange")):
        Communicator.negotiate(SPEC, exchange=5)


def test_handles_and_agreements_say_what_they_are(comm: Communicator) -> None:
    tail = comm.moe_tail(layer_index=3, up_weight=W, precise=True)
    assert repr(tail) == "MoETail(layer_index=3, up='whole', precise=True)"
    assert repr(comm.agreement) == "Agreement(SEPARATE_REDUCE: any)"
    limited = Agreement.of([Tier.FUSED_LANE_AR, Tier.SEPARATE_REDUCE], {Tier.FUSED_LANE_AR: 64})
    assert repr(limited) == "Agreement(FUSED_LANE_AR: 64, SEPARATE_REDUCE: any)"


@pytest.mark.parametrize("kind", [k3comm.PeerTimeoutError, k3comm.CommunicationTimeoutError])
def test_a_time_out_says_how_to_find_calls_that_differ(
    comm: Communicator, tail: k3comm.MoETail, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def run(call: object) -> None:
        raise kind("late")

    monkeypatch.setattr(comm._tier(Tier.SEPARATE_REDUCE), "run", run)
    with pytest.raises(kind) as caught:
        tail(rows(2, 8), rows(2, 24))
    assert str(caught.value) == "late"
    assert "K3COMM_CHECK_UNIFORM=1" in caught.value.__notes__[0]
