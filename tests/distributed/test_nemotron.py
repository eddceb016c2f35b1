"""A real layer as the oracle: transformers' `NemotronHMoE`, sharded over the ranks and finished in every tier.

The sharding is that of examples/nemotron_moe.py. Each result is judged twice. The *tail* is compared with float64 of
the very partial sums that it was given, and may be as far off as its numerics class says. The *layer* is compared with
the unsharded block in float64, beside the unsharded block in the same dtype: what comes before the tail rounds too, so
a bound of the tail alone would be too strict here and a fixed one too loose.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import k3comm
from k3comm.kernels import reference
from k3comm.tiers import plugins

EXAMPLE = Path(__file__).parents[2] / "examples" / "nemotron_moe.py"
LIBRARY_TIERS = {
    k3comm.Tier.SEQUENCE_PARALLEL,
    k3comm.Tier.COLUMN_PARALLEL,
    k3comm.Tier.FUSED_LANE_AR,
    k3comm.Tier.SEPARATE_REDUCE,
}
FP32_SUMS_OVER_BLOCK = 1.03
"""K0 and K1 layers in bfloat16: error over the unsharded block's. Measured 0.99 to 1.01: what the rounded partial sums
cost, the single rounding of the finish gains. The all-reduces' bound is the example's `bound_of`."""
ONE_BATCH_OVER_BLOCK = 1.5
"""Any batch alone, so that a wrong small one does not hide among the others. Measured at most 1.18, for single rows."""


@cache
def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nemotron_moe", EXAMPLE)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def nemotron(skip_all_unless: Callable[[bool, str], None]) -> ModuleType:
    skip_all_unless(importlib.util.find_spec("transformers") is not None, "transformers is not installed")
    return load_example()


@pytest.fixture
def batches(world_size: int) -> list[int]:
    """One row, fewer rows than ranks, one more than ranks, a full host mailbox, and two odd and even large ones."""
    return sorted({1, world_size - 1, world_size + 1, 16, 33, 256})


def gather(x: Tensor) -> Tensor:
    """Every rank's x, [W, *x.shape]."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts)


def same_bits(x: Tensor) -> bool:
    """Whether every rank has the same."""
    bits = gather(x.contiguous().view(torch.uint8))
    return bool((bits == bits[0]).all())


@attrs.define
class Meters:
    """What was measured of one tier."""

    tail: reference.AccuracyMeter = attrs.field(factory=reference.AccuracyMeter)
    model: reference.AccuracyMeter = attrs.field(factory=reference.AccuracyMeter)
    layer: reference.AccuracyMeter = attrs.field(factory=reference.AccuracyMeter)
    block: reference.AccuracyMeter = attrs.field(factory=reference.AccuracyMeter)


@attrs.frozen
class Batch:
    """One forward: what this rank puts in, and what comes out of it elsewhere.

    Attributes:
        routed, shared: this rank's partial sums.
        residual: or None.
        truth: of the layer: the unsharded block in float64.
        unsharded: the same block in its own dtype.
        tail_truth: of the tail: all ranks' partial sums finished in float64.
        models: the same partial sums finished as plainly as each numerics class allows.
    """

    routed: Tensor
    shared: Tensor
    residual: Tensor | None
    truth: Tensor
    unsharded: Tensor
    tail_truth: Tensor
    models: dict[k3comm.Numerics, Tensor]


class Layer:
    """The block, its truth, this rank's part of it, and its tail."""

    def __init__(
        self,
        nemotron: ModuleType,
        dtype: str,
        split: str,
        layout: str,
        *,
        scale_in_tail: bool = False,
        **changes: Any,
    ) -> None:
        self.nemotron = nemotron
        self.dtype = getattr(torch, dtype)
        self.config = nemotron.small_config(**changes)
        self.block = nemotron.random_block(self.config, self.dtype)
        self.float64 = nemotron.float64_block(self.block)
        self.up_bias = self.block.fc2_latent_proj.bias
        self.sharded = nemotron.ShardedBlock(self.block, dist.get_rank(), dist.get_world_size(), split)
        self.scale = 1.0
        if scale_in_tail:
            self.scale = self.config.routed_scaling_factor
            self.sharded.gate = copy.deepcopy(self.block.gate)
            self.sharded.gate.routed_scaling_factor = 1.0
        self.spec = nemotron.spec_of(self.config, dtype, max_tokens=256)
        self.own_weight = nemotron.up_weight_of(self.block, dist.get_rank(), dist.get_world_size(), layout)

    def tail(self, comm: k3comm.Communicator) -> k3comm.MoETail:
        return comm.moe_tail(
            layer_index=0, norm_weight=None, up_weight=self.own_weight, up_bias=self.up_bias, routed_scale=self.scale
        )

    def bound(self, unsharded: float, numerics: k3comm.Numerics) -> float:
        """The layer's error that is accepted, given the unsharded block's."""
        if self.dtype == torch.bfloat16 and numerics is not k3comm.Numerics.K2:
            return FP32_SUMS_OVER_BLOCK * unsharded
        bound: float = self.nemotron.bound_of(self.spec.dtype, unsharded, dist.get_world_size())
        return bound

    def batch(self, num_tokens: int, with_residual: bool) -> Batch:
        draw = torch.Generator().manual_seed(num_tokens)
        hidden = torch.randn(num_tokens, self.config.hidden_size, generator=draw).to(self.dtype)
        routed, shared = self.sharded(hidden)
        truth, unsharded = self.float64(hidden.double()), self.block(hidden)
        residual = None
        if with_residual:
            residual = torch.randn(num_tokens, self.config.hidden_size, generator=draw).to(self.dtype)
            truth, unsharded = residual.double() + truth, residual + unsharded
        partials = (gather(routed), gather(shared), self.block.fc2_latent_proj.weight)
        rest: dict[str, Any] = {"residual": residual, "eps": self.spec.rms_eps}
        rest |= {"up_bias": self.up_bias, "routed_scale": self.scale}
        return Batch(
            routed=routed,
            shared=shared,
            residual=residual,
            truth=truth,
            unsharded=unsharded,
            tail_truth=reference.moe_tail(*partials, **rest),
            models={numerics: reference.model(numerics, *partials, **rest) for numerics in k3comm.Numerics},
        )


def agreed(comm: k3comm.Communicator, layout: str) -> set[k3comm.Tier]:
    """The tiers that must run: all agreed ones, the library's among them, less the one that needs a whole W_up."""
    tiers = set(comm.agreement.capacities)
    assert tiers >= LIBRARY_TIERS
    return tiers - ({k3comm.Tier.SEQUENCE_PARALLEL} if layout == "rows" else set())


def runs(
    comm: k3comm.Communicator, layer: Layer, batches: list[Batch], expected: set[k3comm.Tier]
) -> Iterator[tuple[k3comm.Tier, Batch, Tensor]]:
    """Every tier's result for every batch that it takes: an expected tier takes all that its capacity holds."""
    tail = layer.tail(comm)
    for tier, rows in comm.agreement.capacities.items():
        for batch in batches:
            try:
                plan = tail.plan(len(batch.routed), tier=tier)
            except k3comm.TierUnavailableError:
                assert tier not in expected or len(batch.routed) > rows
                continue
            assert plan.tier is tier
            yield tier, batch, tail(batch.routed, batch.shared, batch.residual, plan=plan)


def check_every_tier(layer: Layer, layout: str, batches: list[int], with_residual: bool) -> None:
    meters: dict[k3comm.Tier, Meters] = {}
    made = [layer.batch(num_tokens, with_residual) for num_tokens in batches]
    with k3comm.Communicator.negotiate(layer.spec, dist.group.WORLD) as comm:
        expected = agreed(comm, layout)
        for tier, batch, out in runs(comm, layer, made, expected):
            assert out.dtype == layer.dtype
            assert same_bits(out)
            meter = meters.setdefault(tier, Meters())
            meter.tail.add(out, batch.tail_truth, batch.residual)
            meter.model.add(batch.models[plugins()[tier].numerics], batch.tail_truth, batch.residual)
            meter.layer.add(out, batch.truth, batch.residual)
            meter.block.add(batch.unsharded, batch.truth, batch.residual)
            alone = reference.measure(out, batch.truth, batch.residual).error
            block_alone = reference.measure(batch.unsharded, batch.truth, batch.residual).error
            assert alone <= ONE_BATCH_OVER_BLOCK * block_alone, (tier, len(out))
    assert set(meters) == expected
    for tier, meter in meters.items():
        numerics = plugins()[tier].numerics
        broken = reference.accept(numerics, meter.tail.result(), model=meter.model.result(), dtype=layer.dtype)
        assert not broken, (tier, broken)
        assert meter.layer.result().error <= layer.bound(meter.block.result().error, numerics), tier


@pytest.mark.parametrize("split", ["tensor", "expert"])
def test_the_parts_add_up_to_the_block(nemotron: ModuleType, split: str, rank: int, world_size: int) -> None:
    config = nemotron.small_config(mlp_bias=True)
    truth = nemotron.float64_block(nemotron.random_block(config, torch.float32))
    hidden = torch.randn(33, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    routed, shared = nemotron.ShardedBlock(truth, rank, world_size, split)(hidden)
    idle = gather(routed[:1].abs().sum())
    dist.all_reduce(routed)
    dist.all_reduce(shared)
    out = truth.fc2_latent_proj(routed) + shared
    torch.testing.assert_close(out, truth(hidden), rtol=0, atol=1e-13)
    # With more ranks than experts a token, some rank has none of its experts and contributes zeros.
    assert (idle == 0).any() or split == "tensor" or world_size <= config.num_experts_per_tok


@pytest.mark.parametrize(("split", "with_residual"), [("tensor", False), ("tensor", True), ("expert", False)])
@pytest.mark.parametrize("layout", ["whole", "rows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tier_finishes_the_block(
    nemotron: ModuleType, batches: list[int], dtype: str, split: str, layout: str, with_residual: bool
) -> None:
    check_every_tier(Layer(nemotron, dtype, split, layout), layout, batches, with_residual)


@pytest.mark.parametrize("layout", ["whole", "rows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biases_are_added_once(nemotron: ModuleType, batches: list[int], dtype: str, layout: str) -> None:
    layer = Layer(nemotron, dtype, "tensor", layout, mlp_bias=True)
    assert layer.up_bias.abs().min() > 0
    check_every_tier(layer, layout, batches, with_residual=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_norm_the_routed_scale_may_move_into_the_tail(
    nemotron: ModuleType, batches: list[int], dtype: str
) -> None:
    layer = Layer(nemotron, dtype, "expert", "whole", scale_in_tail=True)
    assert layer.scale == 2.5
    check_every_tier(layer, "whole", batches, with_residual=False)


@pytest.mark.parametrize("layout", ["whole", "rows"])
def test_what_is_chosen_is_what_was_checked(nemotron: ModuleType, batches: list[int], layout: str) -> None:
    layer = Layer(nemotron, "bfloat16", "tensor", layout)
    with k3comm.Communicator.negotiate(layer.spec, dist.group.WORLD) as comm:
        tail, chosen = layer.tail(comm), set()
        for batch in [layer.batch(num_tokens, with_residual=True) for num_tokens in batches]:
            plan = tail.plan(len(batch.routed), decode=True)
            forced = tail.plan(len(batch.routed), tier=plan.tier)
            with comm.step(decode=True):
                out = tail(batch.routed, batch.shared, batch.residual)
            torch.testing.assert_close(
                out, tail(batch.routed, batch.shared, batch.residual, plan=forced), rtol=0, atol=0
            )
            chosen.add(plan.tier)
        assert len(chosen) > 1
