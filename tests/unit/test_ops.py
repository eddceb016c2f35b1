"""The torch operators: fakes that agree with what runs, choosing inside, and compiled layers."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import k3comm
from k3comm import Communicator, LatentMoESpec
from k3comm.ops import SCHEMAS

HIDDEN, LATENT, TOP_K = 64, 32, 2
BF16 = torch.bfloat16


@pytest.fixture
def comm() -> Iterator[Communicator]:
    torch._dynamo.reset()
    with Communicator.negotiate(LatentMoESpec(hidden_size=HIDDEN, latent_size=LATENT, top_k=TOP_K)) as made:
        yield made


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


WEIGHTS = (draw(1, LATENT), draw(2, HIDDEN, LATENT), draw(3, HIDDEN))
GAIN = draw(4, HIDDEN)


def tail_of(comm: Communicator) -> k3comm.MoETail:
    return comm.moe_tail(layer_index=5, norm_weight=WEIGHTS[0], up_weight=WEIGHTS[1], up_bias=WEIGHTS[2])


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw(rows, rows, LATENT), draw(rows + 100, rows, HIDDEN), draw(rows + 200, rows, HIDDEN)


def expert_inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = torch.arange(rows * TOP_K, dtype=torch.int32)
    index[::3] = -1
    return draw(9, rows * TOP_K + 1, LATENT), draw(8, rows * TOP_K).float().abs(), index


def arguments(name: str, rows: int, output: str, comm: Communicator) -> tuple[object, ...]:
    routed, shared, residual = inputs(rows)
    given = expert_inputs(rows) if name == "moe_tail_deferred" else (routed,)
    extra = (GAIN,) if name == "moe_tail_norm" else ()
    return (*given, shared, residual, *WEIGHTS, *extra, output, 5, comm.name)


@pytest.mark.parametrize("output", ["full", "rows"])
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_opcheck(comm: Communicator, name: str, rows: int, output: str) -> None:
    tail_of(comm)
    operator = getattr(torch.ops.k3comm, name).default
    results = torch.library.opcheck(operator, arguments(name, rows, output, comm))
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) >= 4


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_an_operator_is_the_plain_call(comm: Communicator, name: str) -> None:
    tail = tail_of(comm)
    routed, shared, residual = inputs(7)
    made = getattr(torch.ops.k3comm, name)(*arguments(name, 7, "full", comm))
    if name == "moe_tail_deferred":
        assert torch.equal(made, tail.deferred(*expert_inputs(7), shared, residual, num_tokens=7))
    elif name == "moe_tail_norm":
        expected = tail(routed, shared, residual, next_norm_weight=GAIN)
        assert torch.equal(made[0], expected[0])
        assert torch.equal(made[1], expected[1])
    else:
        assert torch.equal(made, tail(routed, shared, residual))


def test_a_layer_compiles_in_three(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch specialises sizes 0 and 1; all others share one graph, and each forward chooses for its own m."""
    tail = tail_of(comm)
    chosen = []
    plan = k3comm.MoETail._plan
    monkeypatch.setattr(k3comm.MoETail, "_plan", lambda self, *args: (chosen.append(args[:3]), plan(self, *args))[1])

    class Layer(torch.nn.Module):
        def forward(self, routed: torch.Tensor, shared: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            out, normed = tail(routed * 2, shared, residual, next_norm_weight=GAIN)
            return torch.relu(out) + normed

    counter = CompileCounterWithBackend("aot_eager")
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for rows in (0, 1, 2, 17, 64):
        with comm.step(graph=False, decode=rows < 17):
            made = compiled(*inputs(rows))
            assert torch.equal(made, layer(*inputs(rows)))
    assert counter.frame_count <= 3
    assert [(rows, decode) for rows, _, decode in chosen] == [(0, True), (1, True), (2, True), (17, False), (64, False)]


def test_deferred_compiles_too(comm: Communicator) -> None:
    tail = tail_of(comm)

    def layer(*given: torch.Tensor) -> torch.Tensor:
        return tail.deferred(*given, num_tokens=given[3].shape[0]) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (2, 5, 9):
        given = (*expert_inputs(rows), *inputs(rows)[1:])
        assert torch.equal(compiled(*given), layer(*given))


def test_a_destroyed_communicator_is_a_clear_error(comm: Communicator) -> None:
    tail = tail_of(comm)
    compiled = torch.compile(lambda *given: tail(*given), fullgraph=True, backend="aot_eager")
    compiled(*inputs(3))
    given = arguments("moe_tail", 3, "full", comm)
    comm.close()
    with pytest.raises(k3comm.ClosedError, match=f"communicator '{comm.name}' is closed; a compiled model needs"):
        compiled(*inputs(3))
    with pytest.raises(k3comm.ClosedError, match="communicator 'nobody' does not exist, or was collected"):
        torch.ops.k3comm.moe_tail(*given[:-1], "nobody")


def test_a_layer_without_handle_is_a_clear_error(comm: Communicator) -> None:
    given = arguments("moe_tail", 3, "full", comm)
    with pytest.raises(k3comm.InputError, match=rf"layer: 5 given; accepted are those of {comm.name}: \[\]"):
        torch.ops.k3comm.moe_tail(*given)


def test_weights_that_an_operator_brings_are_used_and_checked(comm: Communicator) -> None:
    tail = tail_of(comm)
    given = list(arguments("moe_tail", 3, "full", comm))
    given[4] = WEIGHTS[1] * 2
    assert not torch.equal(torch.ops.k3comm.moe_tail(*given), tail(*inputs(3)))
    given[4] = WEIGHTS[1][:, :-1]
    with pytest.raises(k3comm.InputError, match=r"up_weight: \(64, 31\) given; accepted are \(64, 32\)"):
        torch.ops.k3comm.moe_tail(*given)


@pytest.mark.parametrize("what", ["plan", "project"])
def test_what_a_compiled_model_cannot_do_is_said(comm: Communicator, what: str) -> None:
    tail = tail_of(comm) if what == "plan" else comm.moe_tail(layer_index=0, project=lambda z: z @ WEIGHTS[1].t())
    plan = tail.plan(3) if what == "plan" else None
    compiled = torch.compile(lambda *given: tail(*given, plan=plan), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"{what}: given in a compiled model; accepted is None"):
        compiled(*inputs(3))


def test_names_are_unique_among_the_open() -> None:
    spec = LatentMoESpec(hidden_size=HIDDEN, latent_size=LATENT, top_k=TOP_K)
    first = Communicator.negotiate(spec, name="draft")
    with pytest.raises(k3comm.InputError, match="name: 'draft' given; accepted are names that no open communicator"):
        Communicator.negotiate(spec, name="draft")
    with pytest.raises(k3comm.InputError, match="name: ' ' given; accepted is a text that is not empty"):
        Communicator.negotiate(spec, name=" ")
    first.close()
    Communicator.negotiate(spec, name="draft").close()
