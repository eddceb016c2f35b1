"""The doctor's checks over a real group: all is well, and one rank's writes that vanish are named on every rank."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

import k3comm
from k3comm import DivergenceError, LatentMoESpec, Settings, Tier
from k3comm.buffers.host import HostMemory
from k3comm.cli._checkup import Checkup
from k3comm.cli.doctor import examine
from k3comm.negotiate.exchange import GroupExchange

DEADLINE = 20.0


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("K3COMM_")]:
        monkeypatch.delenv(name)


class LosingMemory(HostMemory):
    """What rank 0 writes to rank 1 never arrives."""

    def block(self, rank: int) -> torch.Tensor:
        found = super().block(rank)
        return found.clone() if (self.rank, rank) == (0, 1) else found


def check(memory: type[HostMemory]) -> Checkup:
    group = dist.group.WORLD
    assert group is not None
    exchange = GroupExchange(group, DEADLINE)
    found = examine(exchange, device="cpu", deadline=DEADLINE, required=[Tier.PEER_AR], new_memory=memory)
    pairs = repr(found.pairs).encode().ljust(16384, b" ")
    assert len(set(exchange.gather(pairs))) == 1, "every rank holds the same picture"
    return found


def test_ranks_that_work(world_size: int) -> None:
    found = check(HostMemory)
    assert (found.exit_code, found.failures, found.missing) == (0, (), ())
    assert len(found.pairs.pairs) == 2 * world_size * (world_size - 1)
    assert (len(found.vote_us), len(found.facts), found.hosts) == (world_size, world_size, 1)


def test_writes_that_vanish_are_named_on_every_rank() -> None:
    found = check(LosingMemory)
    assert found.exit_code == 3
    assert found.failures == ("rank 0 writes to rank 1: FAILED, 0 of 65536 bytes right",)


def test_a_call_that_differs_is_named_and_hurts_nobody(world_size: int, rank: int) -> None:
    spec = LatentMoESpec(hidden_size=24 * world_size, latent_size=8, top_k=2, dtype="float32")
    width = spec.hidden_size
    settings = Settings(check_uniform=True)
    with k3comm.Communicator.negotiate(spec, dist.group.WORLD, settings=settings) as comm:
        tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(width, 8))
        call = partial(lambda m: tail(torch.zeros(m, 8), torch.full((m, width), 1.0)))
        with pytest.raises(DivergenceError) as caught:
            call(0 if rank == world_size - 1 else 3)
        assert caught.value.ranks == ((world_size - 1,) if world_size > 2 else ())
        assert torch.equal(call(3), torch.full((3, width), float(world_size)))
