"""The numerics classes at Kimi-K3's widths, pooled over enough rows for every figure that is promised."""

from itertools import pairwise

import attrs
import pytest
import torch
import torch.distributed as dist

import k3comm
from k3comm import Numerics, Tier
from k3comm.kernels import reference
from k3comm.tiers import plugins

ROWS_A_CALL = 512


def pooled(meter: reference.AccuracyMeter) -> reference.Accuracy:
    """The accuracy over all ranks' rows."""
    every: list[reference.AccuracyMeter] = [meter] * dist.get_world_size()
    dist.all_gather_object(every, meter)
    total = reference.AccuracyMeter()
    for one in every:
        total.merge(one)
    return total.result()


def rows_of_all(own: torch.Tensor, shares: list[int]) -> torch.Tensor:
    """This rank's share of every rank's rows, [W, rows, n], for `own` [m, n]."""
    rows = shares[dist.get_rank()]
    out = own.new_empty(len(shares) * rows, own.shape[1])
    dist.all_to_all_single(out, own, [rows] * len(shares), shares)
    return out.view(len(shares), rows, -1)


def measured(
    comm: k3comm.Communicator,
    arms: list[tuple[Tier, bool]],
    sharded: tuple[Tier, ...] = (),
    models: tuple[Numerics, ...] = (),
) -> tuple[dict[tuple[Tier, bool], reference.Accuracy], dict[Numerics, reference.Accuracy]]:
    """The pooled accuracy of each (tier, precise), and of the classes' plain models, on the same data.

    Every rank measures its share of each call's rows against float64. The tiers of `sharded` get their part of W_up.
    """
    spec, world_size, rank = comm.spec, comm.world_size, comm.rank
    meters = {arm: reference.AccuracyMeter() for arm in arms}
    model_meters = {numerics: reference.AccuracyMeter() for numerics in models}
    layer = reference.random_case(world_size, 1, spec.hidden_size, spec.latent_size, dtype=comm.dtype, seed=0)
    weights = {False: layer.up_weight, True: layer.up_weight.chunk(world_size)[rank]}
    tails = {
        (tier, precise): comm.moe_tail(
            layer_index=number, norm_weight=layer.norm_weight, up_weight=weights[tier in sharded], precise=precise
        )
        for number, (tier, precise) in enumerate(arms)
    }
    ends = [number * ROWS_A_CALL // world_size for number in range(world_size + 1)]
    shares = [end - start for start, end in pairwise(ends)]
    share = slice(ends[rank], ends[rank + 1])
    for number in range(reference.POOL_ROWS // ROWS_A_CALL):
        # Each rank draws what is its own, and sends the others their shares of it.
        seed = 1 + number * world_size + rank
        own = reference.random_case(
            1, ROWS_A_CALL, spec.hidden_size, spec.latent_size, dtype=comm.dtype, seed=seed, layer=layer
        )
        (routed,), (shared,), residual = own.routed, own.shared, own.residual
        dist.broadcast(residual, src=0)
        parts = {"routed": rows_of_all(routed, shares), "shared": rows_of_all(shared, shares)}
        mine = attrs.evolve(own, **parts, residual=residual[share])
        truth = mine.truth()
        for numerics, meter in model_meters.items():
            meter.add(mine.model(numerics), truth, mine.residual)
        for (tier, precise), meter in meters.items():
            tail = tails[tier, precise]
            plan = tail.plan(ROWS_A_CALL, tier=tier)
            out = tail(routed, shared, residual, plan=plan)
            meter.add(out[share], truth, mine.residual)
    found = {arm: pooled(meter) for arm, meter in meters.items()}
    assert {accuracy.rows for accuracy in found.values()} == {reference.POOL_ROWS}
    return found, {numerics: pooled(meter) for numerics, meter in model_meters.items()}


@pytest.mark.timeout(240)
def test_k0_and_k1_at_full_width(world_size: int) -> None:
    if world_size != 4:  # the same on all ranks, so they skip together
        pytest.skip("at four ranks only, for its cost; the other sizes run the same code at small widths")
    with k3comm.Communicator.negotiate(k3comm.LatentMoESpec.kimi_k3(), dist.group.WORLD) as comm:
        tiers = (Tier.SEQUENCE_PARALLEL, Tier.COLUMN_PARALLEL)
        arms = [(tier, precise) for tier in tiers for precise in (False, True)]
        found, _ = measured(comm, arms, (Tier.COLUMN_PARALLEL,))
    for (tier, precise), accuracy in found.items():
        numerics = Numerics.K0 if precise else plugins()[tier].numerics
        assert reference.accept(numerics, accuracy, dtype=torch.bfloat16, pair=precise, k3_like=True) == []


def test_k2_beside_separate_reduce_and_its_model() -> None:
    spec = k3comm.LatentMoESpec(hidden_size=768, latent_size=384, top_k=8)
    with k3comm.Communicator.negotiate(spec, dist.group.WORLD) as comm:
        comm.reserve(ROWS_A_CALL)  # PEER_AR starts with fewer rows
        separate, fused = (Tier.SEPARATE_REDUCE, False), (Tier.FUSED_LANE_AR, False)
        peer = (Tier.PEER_AR, False)
        precise = (Tier.SEPARATE_REDUCE, True)
        found, models = measured(comm, [separate, fused, peer, precise], (), (Numerics.K2,))
    dtype = torch.bfloat16
    assert reference.accept(Numerics.K2, found[separate], dtype=dtype, model=models[Numerics.K2]) == []
    for arm in (fused, peer):
        assert reference.accept(Numerics.K2, found[arm], dtype=dtype, separate_reduce=found[separate]) == []
    assert reference.accept(Numerics.K0, found[precise], dtype=dtype, pair=True) == []
