"""The self-check that tiers share: few rows of values whose sums are known without a reference of the whole layer.

Every element of a partial sum is an entry of a small table, one row a rank, and the sum over ranks is the sum of that
table's columns. So the truth costs a few additions, whatever the widths: on CPU a check of the real layer's 51 MB of
W_up and of its projection in float64 took 1.3 s a tier, this one takes milliseconds.

Tiers of class K2 and K1 get small integers, whose sums are exact in any order and grouping. Class K0 promises fp32
sums in rank order: it gets entries whose sum in any other order has other bits.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from k3comm.facts import Reason, Verdict
from k3comm.kernels import dense
from k3comm.kernels.finalize import Deferred
from k3comm.tiers.interface import Plan, TailCall, TailTier, TailWeights, TierContext

_ENTRIES = 13
"""Of a table. A prime, so that neighbouring rows and columns run through it in other orders."""


def check_sums(
    tier: TailTier,
    context: TierContext,
    rows: int,
    *,
    ordered: bool = False,
    deferred: torch.dtype | None = None,
    next_norm: bool = False,
    latent_norm: bool = False,
) -> Verdict:
    """Runs a prepared tier on `rows` rows, in each lane that has memory of its own. Collective.

    Args:
        ordered: the tier adds in fp32 in rank order, and projects by W_up alone: it gets this rank's rows of a W_up
            with a single one in each, else a projection that does the same.
        deferred: the routed sums are given as one expert's rows with a weight of one, of this dtype.
        next_norm: the RMSNorm of the result is asked for too, and looked at.
        latent_norm: a second call is of the routed sums alone, each row times a power of two, with their RMSNorm.

    Returns:
        Yes, or no with SELF_CHECK if a bit differs on this rank; in either norm, more than two roundings.
    """
    spec, world = context.spec, context.world_size
    table = _ordered_table(world) if ordered else _integer_table(world)
    total = table[0].float()
    for row in table[1:]:
        total = total + row
    latent, hidden = _places(rows, spec.latent_size, 3), _places(rows, spec.hidden_size, 5)
    taps = -torch.arange(spec.hidden_size, device="cpu") % spec.latent_size
    residual = (_places(rows, spec.hidden_size, 7) - _ENTRIES // 2).to(context.dtype)
    expected = (total[latent][:, taps] + total[hidden] + residual).to(context.dtype).to(context.device)
    on_device = taps.to(context.device)
    weights = TailWeights(
        norm_weight=None,
        up_weight=_one_each(context) if ordered else None,
        up_bias=None,
        routed_scale=1.0,
        project=None if ordered else lambda z: z[:, on_device],
        precise=False,
        sharded=ordered,
    )
    mine = table[context.rank].to(context.dtype)
    gain = torch.ones(spec.hidden_size, dtype=context.dtype, device=context.device)
    # Powers of two change no bit of a sum's mantissa, and no row's mean square is near that of the call before or of a
    # neighbour.
    scales = 2.0 ** (1 + torch.arange(rows, device="cpu") % _ENTRIES)[:, None]
    latent_normed = None
    if latent_norm:
        ones = torch.ones(spec.latent_size, device="cpu")
        latent_normed = dense.rms_norm(total[latent] * scales, ones, spec.rms_eps)[:, taps].to(context.device)
    right = True
    for lane in range(1 if context.memory is None else context.lanes):
        plan = Plan(
            num_tokens=rows,
            graph=False,
            decode=False,
            tier=tier.name,
            forced=True,
            output="full",
            next_norm=next_norm,
            communicator=("self-check", 0),
        )
        routed = mine[latent].to(context.device)
        call = TailCall(
            routed=routed if deferred is None else routed[:, :0],
            deferred=None if deferred is None else _one_expert(routed, deferred),
            shared=mine[hidden].to(context.device),
            residual=residual.to(context.device),
            plan=plan,
            weights=weights,
            next_norm_weight=gain if next_norm else None,
            normed=torch.empty_like(expected) if next_norm else None,
            lane=lane,
        )
        right = torch.equal(tier.run(call), expected) and right  # every lane, also after one that is wrong
        if call.normed is not None:
            normed = dense.rms_norm(expected.float(), gain, spec.rms_eps)
            right = torch.allclose(call.normed.float(), normed, rtol=2**-7, atol=0) and right
        if latent_normed is not None:
            out = tier.run(_of_routed_alone(call, spec.latent_size, scales))
            right = torch.allclose(out.float(), latent_normed, rtol=2**-7, atol=0) and right
    return Verdict.yes() if right else Verdict.no(Reason.SELF_CHECK)


def _of_routed_alone(call: TailCall, latent_size: int, scales: Tensor) -> TailCall:
    """The same routed sums, rows times `scales` [m, 1], with an RMSNorm of weights of one; nothing is added to them."""
    ones = torch.ones(latent_size, dtype=call.shared.dtype, device=call.shared.device)
    return attrs.evolve(
        call,
        routed=call.routed * scales.to(call.routed),
        shared=torch.zeros_like(call.shared),
        residual=None,
        weights=attrs.evolve(call.weights, norm_weight=ones),
        next_norm_weight=None,
        normed=None,
        plan=attrs.evolve(call.plan, next_norm=False),
    )


def _one_expert(routed: Tensor, dtype: torch.dtype) -> Deferred:
    """The partial sums as what is still to be weighted, by one, and summed, of one term."""
    rows, device = routed.shape[0], routed.device
    index = torch.arange(rows, dtype=torch.int32, device=device)
    return Deferred(routed, torch.ones(rows, dtype=dtype, device=device), index, rows)


def _places(rows: int, width: int, step: int) -> Tensor:
    """Which entry of the table each element [rows, width] is."""
    columns = torch.arange(width, device="cpu")
    return (columns + step * torch.arange(rows, device="cpu")[:, None]) % _ENTRIES


def _integer_table(world_size: int) -> Tensor:
    """[W, entries], fp32: integers from -3 to 3. With 16 ranks all sums stay below 256 in size, exact in BF16."""
    rank, entry = torch.arange(world_size, device="cpu")[:, None], torch.arange(_ENTRIES, device="cpu")
    return ((5 * rank + 2 * entry + rank * entry) % 7 - 3).float()


def _ordered_table(world_size: int) -> Tensor:
    """[W, entries], fp32, BF16 values: 2^24, ones that vanish beside it or don't, and -2^24, in places that move.

    2^24 + 1 is 2^24 in fp32 and -2^24 + 1 is not -2^24, so a sum tells in which order it was made.
    """
    table = _integer_table(world_size).clamp(-1, 1)
    if world_size > 2:
        for entry in range(0, _ENTRIES - 1):
            first = entry % world_size
            table[first, entry] = 2.0**24
            table[(first + 1 + entry // world_size % (world_size - 1)) % world_size, entry] = -(2.0**24)
    return table


def _one_each(context: TierContext) -> Tensor:
    """This rank's rows of W_up [H/W, L], which take one element each: row i of all takes element -i mod L.

    All rows are windows on one line of zeros with a one at every multiple of L: the pages of a part of W_up would cost
    more than the check.
    """
    rows, latent = context.spec.hidden_size // context.world_size, context.spec.latent_size
    place = rows * context.rank + torch.arange(rows + latent - 1, device=context.device)
    line = (place % latent == 0).to(context.dtype)
    weight = line.as_strided((rows, latent), (1, 1))
    return weight if context.device.type == "cpu" else weight.contiguous()  # kernels want rows at multiples of 16 bytes
