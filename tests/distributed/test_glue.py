"""The ground that the other tests in this folder stand on: a group that works, and ranks that act alike."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

SkipAllUnless = Callable[[bool, str], None]


def test_the_group_is_the_jobs(rank: int, world_size: int) -> None:
    assert dist.get_backend() == "gloo"
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    assert world_size > 1
    assert torch.get_num_threads() == 1


def test_all_reduce_reaches_every_rank(rank: int, world_size: int) -> None:
    powers = torch.tensor([2**rank])
    dist.all_reduce(powers)
    assert powers.item() == 2**world_size - 1


def test_nobody_skips_what_all_can_do(skip_all_unless: SkipAllUnless, world_size: int) -> None:
    skip_all_unless(world_size > 0, "never")
    dist.barrier()


def test_one_rank_that_cannot_takes_all_along(skip_all_unless: SkipAllUnless, rank: int, world_size: int) -> None:
    last = world_size - 1
    with pytest.raises(pytest.skip.Exception, match=rf"^no luck \(on rank {last}\)$"):
        skip_all_unless(rank != last, "no luck")
    with pytest.raises(pytest.skip.Exception, match=r"^nobody has it$"):
        skip_all_unless(False, "nobody has it")
    dist.barrier()
