"""The self-check that tiers share: integers in floats, few rows.

Sums of them are exact whatever their order and grouping, so the result is the truth's bits or the tier is wrong.
"""

from __future__ import annotations

import torch

from k3comm.facts import Reason, Verdict
from k3comm.kernels import reference
from k3comm.tiers.interface import Plan, TailCall, TailTier, TailWeights, TierContext


def exact_integers(tier: TailTier, context: TierContext, rows: int) -> Verdict:
    """Runs a prepared tier on `rows` rows of integers. Collective.

    Returns:
        Yes, or no with SELF_CHECK if a bit differs on this rank.
    """
    spec = context.spec
    case = reference.integer_case(
        context.world_size, rows, spec.hidden_size, spec.latent_size, dtype=context.dtype, seed=0, norm=False
    ).to(context.device)
    weights = TailWeights(
        norm_weight=None,
        up_weight=case.up_weight,
        up_bias=None,
        routed_scale=1.0,
        project=None,
        precise=False,
        sharded=False,
    )
    plan = Plan(
        num_tokens=rows,
        graph=False,
        decode=False,
        tier=tier.name,
        forced=True,
        output="full",
        next_norm=False,
        communicator=("self-check", 0),
    )
    call = TailCall(
        routed=case.routed[context.rank],
        shared=case.shared[context.rank],
        residual=case.residual,
        plan=plan,
        weights=weights,
    )
    right = torch.equal(tier.run(call), reference.round_once(case.truth(), context.dtype))
    return Verdict.yes() if right else Verdict.no(Reason.SELF_CHECK)
