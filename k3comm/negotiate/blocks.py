"""Where the tiers' shared memory lies. Pure, and the same on every rank.

Every block is laid out for each tier that the settings allow, whether or not this rank can run it: offsets and sizes
must be equal everywhere, and a tier that somebody lacks is known only after the vote.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from k3comm.buffers.symmetric import Block, BufferRequest
from k3comm.facts import Reason
from k3comm.operations import Proposal
from k3comm.settings import Settings
from k3comm.tiers import Tier, plugins
from k3comm.tiers.interface import TailTier
from k3comm.tiers.windows import by_key

plugins()  # imported with this module, so that no negotiation pays for it


@attrs.frozen
class Place:
    """A tier's part of a block, in bytes. `optional`: the tier is there without the block too."""

    block: Block
    offset: int
    nbytes: int
    optional: bool = False


@attrs.frozen
class BlockPlan:
    """The places by tier, and the size of each block, in bytes; a block that nobody needs is absent."""

    places: Mapping[Tier, Place] = attrs.field(converter=by_key)

    @property
    def nbytes(self) -> dict[Block, int]:
        """Bytes by block."""
        sizes: dict[Block, int] = {}
        for place in self.places.values():
            sizes[place.block] = max(sizes.get(place.block, 0), place.offset + place.nbytes)
        return sizes


def excluded(tier: Tier, plugin: type[TailTier], settings: Settings) -> Reason | None:
    """Why the settings rule a tier out, whatever the machine."""
    if tier in settings.disabled:
        return Reason.DISABLED
    if plugin.opt_in and tier not in settings.enabled:
        return Reason.NOT_ENABLED
    if settings.transport != "auto" and not plugin.transports & {"library", settings.transport}:
        return Reason.TRANSPORT
    return None


def plan_blocks(proposal: Proposal) -> BlockPlan:
    """The places of all tiers that the settings allow."""
    places: dict[Tier, Place] = {}
    ends = dict.fromkeys(Block, 0)
    if proposal.world_size == 1 or not proposal.layout.equal_tokens:
        return BlockPlan({})
    together: dict[tuple[Block, str], dict[Tier, BufferRequest]] = {}
    for tier, plugin in plugins().items():
        request = plugin.footprint(proposal)
        if request is not None and excluded(tier, plugin, proposal.settings) is None:
            together.setdefault((request.block, request.shared or tier.name), {})[tier] = request
    needed = {block for (block, _), requests in together.items() if not all(r.optional for r in requests.values())}
    for (block, _), requests in together.items():
        if block not in needed:
            continue
        alignment = max(request.alignment for request in requests.values())
        offset = -(-ends[block] // alignment) * alignment
        places |= {tier: Place(block, offset, request.nbytes, request.optional) for tier, request in requests.items()}
        ends[block] = offset + max(request.nbytes for request in requests.values())
    return BlockPlan(places)
