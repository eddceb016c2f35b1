"""The negotiation: what each rank brings is a value, also its failure, so no rank leaves while its peers wait.

Whatever goes wrong on one rank before the vote travels in the vote. Every error after it follows from the matrix, which
all ranks hold, so all of them raise it, with the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from k3comm.buffers.symmetric import Block, SymmetricMemory, at, describe
from k3comm.errors import InputError, NegotiationError
from k3comm.facts import Facts, Verdict
from k3comm.negotiate.ballot import ballot, not_allocated
from k3comm.negotiate.blocks import BlockPlan, plan_blocks
from k3comm.negotiate.decide import Ballot, Decision, decide, disagreement
from k3comm.negotiate.exchange import Exchange
from k3comm.negotiate.pairs import pair_vote, peer_tiers
from k3comm.negotiate.probe import probe
from k3comm.negotiate.report import shared_devices_text
from k3comm.operations import SERVED, Operation, Proposal
from k3comm.record import check_folder
from k3comm.settings import Settings
from k3comm.spec import LatentMoESpec, ParallelLayout
from k3comm.tiers import Tier, WindowsChoice, choose_windows, load_windows, plugins

MAX_LANES = 8
"""Micro-batches in flight at most: each has mailboxes of its own."""


@attrs.frozen(kw_only=True)
class Local:
    """This rank before the vote.

    Attributes:
        blocks, memories: where shared memory lies, and what of it this rank has allocated.
    """

    facts: Facts
    device: torch.device
    proposal: Proposal
    choice: WindowsChoice
    ballot: Ballot
    blocks: BlockPlan = attrs.field(factory=lambda: BlockPlan({}))
    memories: Mapping[Block, SymmetricMemory] = attrs.field(factory=dict)

    def release(self) -> None:
        """Lets go of the memory."""
        for memory in self.memories.values():
            memory.release()


def prepare_local(
    *,
    spec: LatentMoESpec,
    layout: ParallelLayout | None,
    settings: Settings | None,
    operations: Sequence[Operation],
    lanes: int,
    device: torch.device,
    backends: dict[str, str],
    world_size: int,
    name: str,
    new_memory: Callable[[torch.device], SymmetricMemory],
) -> Local:
    """Validates, reads the environment and the windows, looks at this rank, allocates. Talks to nobody.

    Raises:
        K3CommError: what is wrong with this rank's arguments, environment or files.
    """
    _instance("spec", spec, LatentMoESpec)
    if layout is not None:
        _instance("layout", layout, ParallelLayout)
    layout = layout or ParallelLayout(tp=world_size)
    if world_size % layout.tp:
        raise InputError(
            f"layout.tp: {layout.tp} given for a group of {world_size} ranks; accepted are divisors of {world_size}, "
            "since the group is the one over which the partial sums are added up"
        )
    if settings is not None:
        _instance("settings", settings, Settings)
    settings = Settings.from_env(settings)
    if not isinstance(operations, tuple | list) or not operations or not all(isinstance(o, SERVED) for o in operations):
        raise InputError(
            f"operations: {operations!r} given; this version serves {', '.join(f'{o.__name__}()' for o in SERVED)}"
        )
    if type(lanes) is not int or not 1 <= lanes <= MAX_LANES:
        raise InputError(f"lanes: {lanes!r} given; accepted are 1 to {MAX_LANES}")
    if world_size > 1 and device.type not in backends:
        raise InputError(
            f"device: {device} given, or detected; the group's backends serve {', '.join(sorted(backends))}"
        )
    facts = probe(
        device,
        world_size=world_size,
        backend=backends.get(device.type, ""),
        host_identity=settings.host_identity,
    )
    choice = (
        choose_windows(facts.family, world_size)
        if settings.windows is None
        else WindowsChoice(load_windows(settings.windows))
    )
    settings = settings.with_file(choice.windows.settings, choice.windows.source)
    check_folder(settings.record)
    proposal = Proposal(
        spec=spec,
        layout=layout,
        settings=settings,
        operations=tuple(operations),
        lanes=lanes,
        world_size=world_size,
        name=name,
        device=device.type,
        windows=choice.windows,
    )
    blocks = plan_blocks(proposal)
    memories, refusals = _allocate(blocks, facts, lambda: new_memory(device))
    unallocated = {
        tier: refusals[place.block]
        for tier, place in blocks.places.items()
        if place.block in refusals and not place.optional
    }
    return Local(
        facts=facts,
        device=device,
        proposal=proposal,
        choice=choice,
        ballot=ballot(facts, proposal, choice.windows, unallocated),
        blocks=blocks,
        memories=memories,
    )


def _allocate(
    blocks: BlockPlan, facts: Facts, new_memory: Callable[[], SymmetricMemory]
) -> tuple[dict[Block, SymmetricMemory], dict[Block, Verdict]]:
    """This rank's part of each block, and why others can't be had: the vote then refuses the tiers that need them."""
    memories: dict[Block, SymmetricMemory] = {}
    refusals: dict[Block, Verdict] = {}
    if facts.device == "cpu" and not facts.host_memory:
        return memories, refusals
    for block, nbytes in blocks.nbytes.items():
        memory = new_memory()
        try:
            memory.allocate(nbytes)
        except OSError as error:
            memory.release()
            refusals[block] = not_allocated(nbytes, error.errno)
        else:
            memories[block] = memory
    return memories, refusals


def agree(
    prepare: Callable[[], Local],
    exchange_within: Callable[[float], Exchange],
    *,
    rank: int,
    world_size: int,
    fallback_deadline: float,
) -> tuple[Local, Decision, Exchange]:
    """Votes on what `prepare` gives.

    Args:
        prepare: this rank's part; may raise.
        exchange_within: the exchange whose collectives take at most so many seconds.
        rank, world_size: place in the group, and its size W.
        fallback_deadline: seconds for the exchange where `prepare` did not get as far as settings.

    Raises:
        NegotiationError: on every rank alike: a rank can't take part, fields differ, ranks share a GPU, or a tier
            that is asked for by name is not agreed.
    """
    local: Local | None = None
    cause: Exception | None = None
    try:
        local = prepare()
        mine, deadline = local.ballot, local.proposal.settings.vote_deadline
        cells = mine.matrix(rank)
    except Exception as error:  # any end of this rank here would leave its peers waiting, so it is voted on
        if world_size == 1:
            raise
        if local is not None:
            local.release()
        local, cause, deadline = None, error, fallback_deadline
        mine = Ballot(failure=describe(error))
        cells = mine.matrix(rank)
    exchange = exchange_within(deadline)
    try:
        matrix = at(exchange, "the vote").min(cells)
        decision = decide(matrix, world_size)
        if decision.failed or decision.mismatched or local is None:
            texts = at(exchange, "what differs").gather(mine.text(decision.mismatched))
            raise NegotiationError(disagreement(decision, texts)) from cause
        if decision.shared_devices and not local.proposal.settings.allow_shared_device:
            raise NegotiationError(shared_devices_text(decision))
        device_tiers = peer_tiers(decision, local.facts.device, plugins())
        decision = pair_vote(at(exchange, "the pair vote"), matrix, decision, local.facts, device_tiers)
        check_force(local.proposal.settings, decision)
    except BaseException:
        if local is not None:
            local.release()
        raise
    return local, decision, exchange


def check_force(settings: Settings, decision: Decision) -> None:
    """Raises NegotiationError, alike on every rank, if the tier that is asked for by name is not agreed."""
    force = settings.force
    if isinstance(force, Tier) and force not in decision.capacities:
        raise NegotiationError(f"force: {force.name} is asked for by name and not agreed; {decision.refusal(force)}")


def _instance(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InputError(f"{name}: {value!r} given; accepted is a {kind.__name__}")
