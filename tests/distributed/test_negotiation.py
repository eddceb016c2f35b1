"""What the ranks of a real group agree on, and that they raise alike where they can't."""

from collections.abc import Callable, Iterator, Sequence

import attrs
import pytest
import torch
import torch.distributed as dist

import k3comm
from k3comm import Communicator, LatentMoESpec, ParallelLayout, Settings, Tier
from k3comm.facts import Verdict
from k3comm.kernels import reference
from k3comm.negotiate import agree
from k3comm.negotiate.exchange import Exchange, GroupExchange
from k3comm.tiers.column_parallel import Plugin as ColumnParallel

SPEC = LatentMoESpec(hidden_size=96, latent_size=24, top_k=2, dtype="float32")
SkipAllUnless = Callable[[bool, str], None]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("K3COMM_")]:
        monkeypatch.delenv(name)


def texts(mine: str) -> list[str]:
    """Every rank's text."""
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def refused_alike(kind: type[Exception], negotiate: Callable[[], object]) -> str:
    """The text with which every rank raises `kind`."""
    try:
        negotiate()
    except kind as error:
        mine = f"{type(error).__name__}: {error}"
    else:
        mine = "no error"
    every = texts(mine)
    assert every == [mine] * len(every)
    assert mine.startswith(kind.__name__), mine
    return mine


def finishes(comm: Communicator, seed: int = 0) -> None:
    """The communicator works: exact integers in every agreed tier, over its own group."""
    hidden, latent = comm.spec.hidden_size, comm.spec.latent_size
    case = reference.integer_case(comm.world_size, 5, hidden, latent, dtype=comm.dtype, seed=seed, norm=False)
    tail = comm.moe_tail(layer_index=seed, up_weight=case.up_weight)
    for tier in comm.agreement.capacities:
        out = tail(case.routed[comm.rank], case.shared[comm.rank], case.residual, plan=tail.plan(5, tier=tier))
        assert torch.equal(out, reference.round_once(case.truth(), comm.dtype))


def test_all_ranks_hold_the_same_report(world_size: int, rank: int) -> None:
    with Communicator.negotiate(SPEC, dist.group.WORLD, name="same") as comm:
        data = comm.report.to_dict()
        data.pop("rank")
        data["facts"].pop("free_memory")
        assert len(set(texts(str(data)))) == 1
        assert (comm.rank, comm.world_size, data["world_size"]) == (rank, world_size, world_size)
        assert data["windows"]["source"] == "host.toml"
        assert data["hosts"] == [0] * world_size
        assert data["tiers"]["SEQUENCE_PARALLEL"]["capacity"] > 0
        text = str(comm.report)
        assert f"{world_size} ranks on 1 host" in text
        assert "not part of this version" in text
        finishes(comm)


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 4096), ("hidden_size", 192), ("dtype", "bfloat16"), ("rms_eps", 1e-6)]
)
def test_a_field_that_differs_names_itself_values_and_ranks(
    world_size: int, rank: int, field: str, value: object
) -> None:
    odd = world_size - 1
    spec = attrs.evolve(SPEC, **{field: value}) if rank == odd else SPEC
    text = refused_alike(k3comm.NegotiationError, lambda: Communicator.negotiate(spec, dist.group.WORLD))
    others = "rank 0" if world_size == 2 else f"ranks {', '.join(map(str, range(odd - 1)))} and {odd - 1}"
    assert f"spec.{field} differs: {getattr(SPEC, field)} on {others}; {value} on rank {odd}" in text


def test_a_divergent_environment_is_an_error(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rank == 1:
        monkeypatch.setenv("K3COMM_DISABLE", "FUSED_LANE_AR")
    text = refused_alike(k3comm.NegotiationError, lambda: Communicator.negotiate(SPEC, dist.group.WORLD))
    assert "settings.disabled differs: none on rank" in text
    assert "FUSED_LANE_AR on rank 1" in text


@pytest.mark.parametrize("what", ["layout", "windows", "version", "sources"])
def test_other_things_that_must_be_equal(rank: int, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    layout, settings = ParallelLayout(), Settings()
    if rank == 1:
        if what == "layout":
            layout = ParallelLayout(attention_dp=2)
        elif what == "windows":
            path = tmp_path / "mine.toml"
            path.write_text('schema = 1\n[tiers.SEPARATE_REDUCE]\ntokens = ["0.."]\n')
            settings = Settings(windows=path)
        elif what == "version":
            monkeypatch.setattr(k3comm, "__version__", "0.0.1")
        else:
            monkeypatch.setattr("k3comm.negotiate.ballot.sources", lambda: "ab" * 32)
    text = refused_alike(
        k3comm.NegotiationError,
        lambda: Communicator.negotiate(SPEC, dist.group.WORLD, layout=layout, settings=settings),
    )
    expected = {
        "layout": "layout.attention_dp differs: 1 on rank",
        "windows": "windows.FUSED_LANE_AR differs: 0.. on rank",
        "version": "version.k3comm differs: ",
        "sources": "sources.sha256 differs: ",
    }
    assert expected[what] in text
    assert "on rank 1" in text


def test_a_rank_that_raises_before_the_vote_takes_all_along(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rank == 1:
        monkeypatch.setattr(agree, "probe", lambda *args, **kwargs: 1 / 0)
    text = refused_alike(k3comm.NegotiationError, lambda: Communicator.negotiate(SPEC, dist.group.WORLD))
    assert "rank 1 can't take part: ZeroDivisionError: division by zero" in text


@pytest.mark.parametrize("everywhere", [False, True])
def test_bad_arguments_travel_in_the_vote(
    world_size: int, rank: int, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if everywhere or rank == 0:
        monkeypatch.setenv("K3COMM_FORCE", "fastest")
    text = refused_alike(k3comm.NegotiationError, lambda: Communicator.negotiate(SPEC, dist.group.WORLD))
    who = f"ranks {', '.join(map(str, range(world_size - 1)))} and {world_size - 1}" if everywhere else "rank 0"
    assert f"{who} can't take part: SettingsError: K3COMM_FORCE (force): no tier is called 'fastest'" in text


def test_a_refusing_rank_is_named_and_nobody_uses_the_tier(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rank == 1:
        from k3comm.facts import Reason

        no = Verdict.no(Reason.HIDDEN_MULTIPLE, 7)
        monkeypatch.setattr(ColumnParallel, "verdict", classmethod(lambda cls, *args: (no, no)))
    with Communicator.negotiate(SPEC, dist.group.WORLD) as comm:
        assert Tier.COLUMN_PARALLEL not in comm.agreement
        assert Tier.SEQUENCE_PARALLEL in comm.agreement
        why = comm.report.decision.refusal(Tier.COLUMN_PARALLEL)
        assert texts(why) == ["rank 1: hidden_size is not a multiple of 7"] * comm.world_size
        assert "not COLUMN_PARALLEL: not agreed: rank 1: hidden_size" in str(comm.explain(1))
        tail = comm.moe_tail(layer_index=99, up_weight=torch.zeros(96, 24))
        with pytest.raises(k3comm.TierUnavailableError, match="COLUMN_PARALLEL: not agreed: rank 1"):
            tail.plan(1, tier=Tier.COLUMN_PARALLEL)
        finishes(comm)


def test_the_smallest_capacity_counts(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Verdict.yes(100 + rank)
    monkeypatch.setattr(ColumnParallel, "verdict", classmethod(lambda cls, *args: (rows, rows)))
    with Communicator.negotiate(SPEC, dist.group.WORLD) as comm:
        assert comm.agreement.capacities[Tier.COLUMN_PARALLEL] == 100
        tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(96 // comm.world_size, 24))
        assert tail.plan(100, tier=Tier.COLUMN_PARALLEL).tier is Tier.COLUMN_PARALLEL
        with pytest.raises(k3comm.TierUnavailableError, match="101 tokens exceed the 100 that all ranks can take"):
            tail.plan(101, tier=Tier.COLUMN_PARALLEL)


def test_hosts_that_differ_choose_the_other_verdict(rank: int, world_size: int) -> None:
    settings = Settings(host_identity=f"host {rank % 2}")
    with Communicator.negotiate(SPEC, dist.group.WORLD, settings=settings) as comm:
        assert comm.report.decision.hosts == tuple(r % 2 for r in range(world_size))
        assert "on 2 hosts" in str(comm.report)
        finishes(comm)


def test_a_forced_tier_is_used_or_refused_everywhere(rank: int) -> None:
    with Communicator.negotiate(SPEC, dist.group.WORLD, settings=Settings(force=Tier.COLUMN_PARALLEL)) as comm:
        tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(96, 24))
        assert tail.plan(1).tier is Tier.COLUMN_PARALLEL
        assert comm.explain(1).forced
        precise = comm.moe_tail(layer_index=1, up_weight=torch.zeros(96, 24), precise=True)
        assert precise.plan(1, output="rows").tier is Tier.COLUMN_PARALLEL
    text = refused_alike(
        k3comm.NegotiationError,
        lambda: Communicator.negotiate(SPEC, dist.group.WORLD, settings=Settings(force=Tier.MNNVL_CUTEDSL)),
    )
    assert "force: MNNVL_CUTEDSL is asked for by name and not agreed; not part of this version" in text


def test_a_disabled_tier_is_never_used() -> None:
    with Communicator.negotiate(
        SPEC, dist.group.WORLD, settings=Settings(disabled={Tier.SEQUENCE_PARALLEL, "fused_lane_ar"})
    ) as comm:
        assert set(comm.agreement.capacities) == {Tier.COLUMN_PARALLEL, Tier.SEPARATE_REDUCE}
        assert comm.explain(10).tier is Tier.SEPARATE_REDUCE
        assert "disabled in the settings" in str(comm.explain(10))


def test_unequal_tokens_leave_the_one_tier_that_needs_no_choice() -> None:
    layout = ParallelLayout(attention_dp=2, uniform_tokens=False)
    with Communicator.negotiate(SPEC, dist.group.WORLD, layout=layout) as comm:
        assert list(comm.agreement.capacities) == [Tier.SEPARATE_REDUCE]
        assert "uniform_tokens" in comm.report.decision.refusal(Tier.FUSED_LANE_AR)


def subsets(world_size: int) -> Iterator[list[int]]:
    yield [0, 1]
    yield [world_size - 1, 0]
    yield list(range(world_size - 1, -1, -1))


def test_subgroups_in_any_order_and_interleaved(rank: int, world_size: int) -> None:
    """Each group agrees for itself; non-members get an error at once; the sums are those of the group."""
    groups = [dist.new_group(ranks) for ranks in subsets(world_size)]
    comms = []
    for group, ranks in zip(groups, subsets(world_size), strict=True):
        if rank in ranks:
            comms.append(Communicator.negotiate(SPEC, group))
            assert comms[-1].report.global_ranks == tuple(dist.get_process_group_ranks(group))
        else:
            with pytest.raises(k3comm.InputError, match="not a member"):
                Communicator.negotiate(SPEC, group)
    for seed in range(2):
        for comm in comms:
            finishes(comm, seed)
    for comm in comms:
        comm.close()
    dist.barrier()


def test_two_communicators_in_one_process() -> None:
    """Base and draft model: other widths and dtypes, own settings, interleaved; closing one leaves the other."""
    draft_spec = LatentMoESpec(hidden_size=24, latent_size=16, top_k=1, dtype="bfloat16")
    base = Communicator.negotiate(SPEC, dist.group.WORLD)
    draft = Communicator.negotiate(draft_spec, dist.group.WORLD, settings=Settings(disabled={Tier.FUSED_LANE_AR}))
    assert base.name != draft.name
    assert Tier.FUSED_LANE_AR in base.agreement
    assert Tier.FUSED_LANE_AR not in draft.agreement
    for seed in range(2):
        finishes(base, seed)
        finishes(draft, seed)
    tail = base.moe_tail(layer_index=50, up_weight=torch.zeros(96, 24))
    other = draft.moe_tail(layer_index=50, up_weight=torch.zeros(24, 16, dtype=torch.bfloat16))
    with pytest.raises(k3comm.PlanError, match=f"made by communicator {draft.name}, given to {base.name}"):
        tail(torch.zeros(1, 24), torch.zeros(1, 96), plan=other.plan(1))
    base.close()
    base.close()
    with pytest.raises(k3comm.ClosedError, match=f"communicator {base.name} is closed"):
        tail(torch.zeros(1, 24), torch.zeros(1, 96))
    finishes(draft, 7)
    draft.close()


def test_no_group_is_an_error_in_a_job() -> None:
    with pytest.raises(k3comm.InputError, match="there is no default"):
        Communicator.negotiate(SPEC, None)
    with pytest.raises(k3comm.InputError, match=r"is not a member|accepted is a torch\.distributed\.ProcessGroup"):
        Communicator.negotiate(SPEC, "tp")


class CountingExchange:
    """An engine's own control plane, here over a group of its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._inner = GroupExchange(group, 30)
        self.rank, self.size, self.store = self._inner.rank, self._inner.size, None
        self.calls: list[tuple[str, int]] = []

    def min(self, values: Sequence[int]) -> list[int]:
        self.calls.append(("min", len(values)))
        return self._inner.min(values)

    def gather(self, payload: bytes) -> list[bytes]:
        self.calls.append(("gather", len(payload)))
        return self._inner.gather(payload)


def test_an_exchange_of_the_engines_own_carries_the_vote(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = CountingExchange(dist.new_group(list(range(dist.get_world_size()))))
    assert isinstance(exchange, Exchange)
    nothing_shared = Settings(transport="peer")
    with Communicator.negotiate(SPEC, dist.group.WORLD, exchange=exchange, settings=nothing_shared) as comm:
        # The vote, of a fixed size; whose preparation failed; whose self-check did.
        assert exchange.calls == [("min", 16 * 64), ("min", len(Tier)), ("min", len(Tier))]
        finishes(comm)
    exchange.calls.clear()
    shared = attrs.evolve(SPEC, dtype="bfloat16")
    with Communicator.negotiate(shared, dist.group.WORLD, exchange=exchange) as comm:
        assert {Tier.TAIL_FUSION, Tier.PEER_AR} <= set(comm.agreement.capacities)
        blocks = [("min", 2), ("gather", 2 * 64), ("min", 2), ("min", 2)]  # export, exchange, import, map
        assert exchange.calls == [("min", 16 * 64), *blocks, ("min", len(Tier)), ("min", len(Tier))]
        finishes(comm)
    exchange.calls.clear()
    spec = attrs.evolve(SPEC, top_k=2 + rank)
    refused_alike(k3comm.NegotiationError, lambda: Communicator.negotiate(spec, dist.group.WORLD, exchange=exchange))
    assert exchange.calls == [("min", 16 * 64), ("gather", 16384)]
    exchange.size += 1
    with pytest.raises(k3comm.InputError, match="accepted is the same place in both"):
        Communicator.negotiate(SPEC, dist.group.WORLD, exchange=exchange)


def test_the_vote_can_have_a_group_of_its_own() -> None:
    cpu_group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    with Communicator.negotiate(SPEC, dist.group.WORLD, cpu_group=cpu_group) as comm:
        finishes(comm)
    other = dist.new_group([0])
    if not isinstance(other, dist.ProcessGroup):
        other = None  # only rank 0 has it, and takes all along
    refused_alike(k3comm.NegotiationError, lambda: Communicator.negotiate(SPEC, dist.group.WORLD, cpu_group=other))


def test_steps_nest_and_end(rank: int) -> None:
    with Communicator.negotiate(SPEC, dist.group.WORLD) as comm:
        assert comm.axes == (False, False)
        with comm.step(graph=True, decode=True):
            assert comm.axes == (True, True)
            with comm.step():
                assert comm.axes == (False, False)
            assert comm.axes == (True, True)
            with pytest.raises(ZeroDivisionError), comm.step(decode=True):
                _ = 1 / 0
            assert comm.axes == (True, True)
        assert comm.axes == (False, False)


@pytest.mark.parametrize("argument", [{"device": "cuda:99"}, {"device": "tpu"}, {"cpu_group": 5}, {"name": " "}])
def test_one_ranks_bad_argument_is_everybodys_error(rank: int, argument: dict[str, object]) -> None:
    mine = argument if rank == 1 else {}
    text = refused_alike(k3comm.NegotiationError, lambda: Communicator.negotiate(SPEC, dist.group.WORLD, **mine))
    assert f"rank 1 can't take part: InputError: {next(iter(argument))}: " in text


def test_explicit_names_are_voted_on(rank: int) -> None:
    name = f"model {rank == 1}"
    text = refused_alike(k3comm.NegotiationError, lambda: Communicator.negotiate(SPEC, dist.group.WORLD, name=name))
    assert "layout.name differs: model False on rank" in text
