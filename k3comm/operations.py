"""What will be asked for: declarations, made before anything is allocated, and the arguments that narrow a choice."""

from __future__ import annotations

from typing import Any

import attrs

from k3comm.errors import InputError
from k3comm.settings import Settings
from k3comm.spec import LatentMoESpec, ParallelLayout, whole_number
from k3comm.tiers.axes import boolean
from k3comm.tiers.tier import Tier
from k3comm.tiers.windows import Windows

OUTPUTS = ("full", "rows")
"""What a tail returns: every row on every rank, or this rank's ceil(m/W) rows."""


@attrs.frozen(kw_only=True)
class MoETailOp:
    """The end of a latent MoE layer."""


@attrs.frozen(kw_only=True)
class AttentionReduceOp:
    """Attention reduce + AttnRes mix of up to `max_rows` rows of width `hidden`, with up to `mix_blocks` blocks."""

    hidden: int = attrs.field(validator=whole_number(1))
    max_rows: int = attrs.field(default=16, validator=whole_number(1))
    mix_blocks: int = attrs.field(default=8, validator=whole_number(0))


@attrs.frozen(kw_only=True)
class RouteExchangeOp:
    """Gather of latent columns and router logits with the top-k, for up to `max_rows` decode rows."""

    experts: int = attrs.field(validator=whole_number(1))
    top_k: int = attrs.field(validator=whole_number(1))
    latent: int = attrs.field(validator=whole_number(1))
    max_rows: int = attrs.field(default=20, validator=whole_number(1, 20))


@attrs.frozen(kw_only=True)
class TopKPackOp:
    """Score/ID pack and compaction of up to `max_rows` rows of `k` entries."""

    max_rows: int = attrs.field(validator=whole_number(1))
    k: int = attrs.field(validator=whole_number(1))


Operation = MoETailOp | AttentionReduceOp | RouteExchangeOp | TopKPackOp

SERVED = (MoETailOp,)
"""The operations that this version has handles for. Others are refused at negotiate."""


def _output(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in OUTPUTS:
        raise InputError(f"output: {value!r} given; accepted are {', '.join(map(repr, OUTPUTS))}")


@attrs.frozen(kw_only=True)
class TailArguments:
    """What a tier must honour besides the shapes; a tier that can't is not eligible, with a reason.

    Attributes:
        sharded: W_up (or what `project` returns) is this rank's H/W columns only.
        projected: the projection is a callable of the engine's.
        precise: only a K0 result will do.
        output: "full" or "rows".
        next_norm: the next RMSNorm comes in the same call.
    """

    sharded: bool = attrs.field(default=False, validator=boolean)
    projected: bool = attrs.field(default=False, validator=boolean)
    precise: bool = attrs.field(default=False, validator=boolean)
    output: str = attrs.field(default="full", validator=_output)
    next_norm: bool = attrs.field(default=False, validator=boolean)


@attrs.frozen(kw_only=True)
class Proposal:
    """What the ranks are to agree on, before anything is voted: what a tier is asked about.

    Attributes:
        spec, layout, settings: the layer, how it is spread, and what the operator wants.
        operations: what will be asked for.
        lanes: micro-batches in flight.
        world_size: ranks W.
        name: the communicator's, where it was given; "" where it is a counter's, which may differ between ranks.
        device: the type of every rank's device, "cpu" or "cuda".
        windows: for which token counts each tier is worth choosing; None: not known yet.
    """

    spec: LatentMoESpec
    layout: ParallelLayout
    settings: Settings
    operations: tuple[Operation, ...] = (MoETailOp(),)
    lanes: int = 1
    world_size: int
    name: str = ""
    device: str = "cpu"
    windows: Windows[Tier] | None = attrs.field(default=None, repr=False)
