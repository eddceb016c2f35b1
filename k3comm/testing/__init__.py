"""For tests of code that runs on several ranks: this library's own, and those of the engines that embed it.

- `run_ranks` runs a function on W ranks of this machine and returns what each returned; `RanksFailed` says who failed
  and where. `current_rank` tells a rank who it is, `start_server` takes the first launch's waiting out of a timed test.
- `assert_identical` holds when all ranks' values are the same, bit for bit.
- `laptop_facts` and `h200_facts` build the facts of a rank on such a machine, `machine_facts` those of all ranks of one
  of MACHINES.
- `FakeMachine` makes shared memory that fails by a plan of `Fault`s (rank, stage, n-th call), and counts; with
  `thread_exchanges` the ranks of a negotiation may be threads.
- `fault_at` makes something happen at a stage of a negotiation: a rank that raises, sleeps, stops or is killed there.
- `load_truth_table` reads what a selector must choose from a CSV file.

    def total(value: int) -> int:
        tensor = torch.tensor([value + torch.distributed.get_rank()])
        torch.distributed.all_reduce(tensor)
        return int(tensor)

    def test_total() -> None:
        assert assert_identical(run_ranks(total, 4, 10)) == 46
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3comm.testing._facts import MACHINES, h200_facts, laptop_facts, machine_facts
    from k3comm.testing._identical import assert_identical
    from k3comm.testing._memory import FakeMachine, FakeMemory, Fault, ThreadExchange, thread_exchanges
    from k3comm.testing._rank import RankContext, current_rank
    from k3comm.testing._ranks import RanksFailed, run_ranks, start_server
    from k3comm.testing._stages import fault_at
    from k3comm.testing._table import TruthRow, load_truth_table

__all__ = [
    "MACHINES",
    "FakeMachine",
    "FakeMemory",
    "Fault",
    "RankContext",
    "RanksFailed",
    "ThreadExchange",
    "TruthRow",
    "assert_identical",
    "current_rank",
    "fault_at",
    "h200_facts",
    "laptop_facts",
    "load_truth_table",
    "machine_facts",
    "run_ranks",
    "start_server",
    "thread_exchanges",
]

_HOME = {
    "MACHINES": "_facts",
    "FakeMachine": "_memory",
    "FakeMemory": "_memory",
    "Fault": "_memory",
    "RankContext": "_rank",
    "RanksFailed": "_ranks",
    "ThreadExchange": "_memory",
    "TruthRow": "_table",
    "assert_identical": "_identical",
    "current_rank": "_rank",
    "fault_at": "_stages",
    "h200_facts": "_facts",
    "laptop_facts": "_facts",
    "load_truth_table": "_table",
    "machine_facts": "_facts",
    "run_ranks": "_ranks",
    "start_server": "_ranks",
    "thread_exchanges": "_memory",
}


# Lazy, so that what needs no torch here can be had without it.
def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
