"""What run_ranks and assert_identical promise to the tests that use them."""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not in torch's __all__

import k3comm.testing
from k3comm.errors import InputError
from k3comm.testing import (
    RanksFailed,
    _ranks,
    _table,
    assert_identical,
    current_rank,
    load_truth_table,
    run_ranks,
    start_server,
)

# ---- what ranks run


@attrs.frozen
class Answer:
    rank: int
    rows: torch.Tensor


def echo(*args: Any, **kwargs: Any) -> tuple[int, int, tuple[Any, ...], dict[str, Any]]:
    return dist.get_rank(), dist.get_world_size(), args, kwargs


def total(value: int) -> int:
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return int(tensor)


def tensors(given: torch.Tensor) -> dict[str, Any]:
    assert not given.is_shared()
    given += dist.get_rank()
    big = torch.arange(1000, dtype=torch.float32)
    return {"given": given, "view": big[10:20:2], "answer": Answer(dist.get_rank(), torch.tensor([math.nan, -0.0]))}


def identity() -> tuple[int, int, bool, int]:
    context = current_rank()
    assert not Path(context.rendezvous).exists()
    assert not torch.cuda.is_initialized()
    return context.rank, context.world_size, dist.is_initialized(), torch.get_num_threads()


def own_store() -> bytes:
    context = current_rank()
    store = FileStore(context.rendezvous, context.world_size)
    store.set(f"from {context.rank}", f"hello {context.rank}")
    found: bytes = store.get(f"from {1 - context.rank}")
    return found


def note_pid(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()


def raise_on_one(odd: int, folder: str) -> int:
    note_pid(folder)
    if dist.get_rank() == odd:
        raise ValueError(f"rank {odd} has no such tier")
    if dist.get_rank() == 0:
        return 7
    time.sleep(60)
    return 8


def raise_before_collective(odd: int) -> None:
    if dist.get_rank() == odd:
        raise ValueError("the cause")
    dist.barrier()


def end_one(odd: int, how: Callable[[], object]) -> int:
    if dist.get_rank() == odd:
        how()
    return dist.get_rank()


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


def hang_in_a_collective(folder: str) -> str | None:
    """Rank 1 leaves it out, rank 3 freezes."""
    note_pid(folder)
    if dist.get_rank() == 1:
        return "left out"
    if dist.get_rank() == 3:
        kill_self(signal.SIGSTOP)
    dist.barrier()
    return None


def sleep_long(folder: str) -> None:
    note_pid(folder)
    time.sleep(60)


def return_with_a_thread_left() -> int:
    threading.Thread(target=time.sleep, args=(60,)).start()
    return 5


def outlive() -> bool:
    """Rank 0 returns at once; rank 1 looks whether it is still there later."""
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        return True
    time.sleep(0.3)
    return Path("/proc", str(pids[0])).exists()


def speak() -> None:
    sys.stdout.write(f"rank {dist.get_rank()} speaks\n")
    sys.stderr.write(f"rank {dist.get_rank()} complains\n")
    kill_self(signal.SIGKILL)


class Unloadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, ()


class Unpicklable:
    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError("no such value")


def refuse() -> None:
    raise ValueError("no such value")


def unloadable_on_one(odd: int) -> Any:
    return Unloadable() if dist.get_rank() == odd else 0


# ---- what is left afterwards


def alive(folder: Path) -> list[int]:
    """Which of the processes that noted their pid still run (or wait to be reaped)."""
    pids = [int(path.name) for path in folder.iterdir()]
    assert pids
    return [pid for pid in pids if Path("/proc", str(pid)).exists()]


# ---- values


def test_values_come_in_rank_order() -> None:
    assert run_ranks(echo, 3, 1, "two", three=3) == [(rank, 3, (1, "two"), {"three": 3}) for rank in range(3)]


def test_collectives_work_on_eight_ranks() -> None:
    assert run_ranks(total, 8, 10) == [108] * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_come_back_as_values(dtype: torch.dtype) -> None:
    given = torch.tensor([1.5, -2.0, 0.0], dtype=dtype)
    run_ranks(echo, 1)  # whatever the first launch leaves open
    before = len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm"))

    values = run_ranks(tensors, 2, given)

    for rank, value in enumerate(values):
        assert value["given"].dtype == dtype
        assert value["given"].tolist() == [1.5 + rank, -2.0 + rank, rank]
        assert value["view"].tolist() == [10.0, 12.0, 14.0, 16.0, 18.0]
        assert value["answer"].rank == rank
        assert value["answer"].rows.isnan().tolist() == [True, False]
        assert value["answer"].rows.signbit().tolist() == [False, True]
        assert not value["given"].is_shared()
    assert given.tolist() == [1.5, -2.0, 0.0]
    assert (len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm"))) == before


def test_rank_knows_itself_without_a_group() -> None:
    assert run_ranks(identity, 2, init=False, threads=2) == [(0, 2, False, 2), (1, 2, False, 2)]
    assert run_ranks(identity, 1) == [(0, 1, True, 1)]
    assert run_ranks(own_store, 2, init=False) == [b"hello 1", b"hello 0"]
    with pytest.raises(RuntimeError, match="only on a rank"):
        current_rank()


def test_argument_named_like_an_option() -> None:
    assert run_ranks(functools.partial(echo, deadline=3), 1)[0][3] == {"deadline": 3}


def test_who_has_returned_stays_until_all_have() -> None:
    assert run_ranks(outlive, 2) == [True, True]


def test_streams_pass_through(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(speak, 2)
    out, err = capfd.readouterr()
    assert {"rank 0 speaks", "rank 1 speaks"} <= set(out.splitlines())
    assert {"rank 0 complains", "rank 1 complains"} <= set(err.splitlines())


def test_spawn() -> None:
    assert run_ranks(total, 1, 3, start_method="spawn") == [3]


# ---- failures


def test_one_rank_raises(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(raise_on_one, 3, 1, str(tmp_path), grace=1.0)
    assert time.monotonic() - start < 30
    failed = caught.value
    assert list(failed.failures) == [1, 2]
    assert "in raise_on_one" in failed.failures[1]
    assert "ValueError: rank 1 has no such tier" in failed.failures[1]
    assert "1 s after rank 1 failed" in failed.failures[2]
    assert "in raise_on_one" in failed.failures[2]
    assert failed.values == {0: 7}
    assert str(failed).startswith("2 of 3 ranks failed, in this order\n\n--- rank 1 raised:\nTraceback")
    assert not alive(tmp_path)


def test_peers_of_a_rank_that_raised_fail_at_once() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(raise_before_collective, 3, 1, deadline=30.0, grace=30.0)
    assert next(iter(caught.value.failures)) == 1
    assert set(caught.value.failures) == {0, 1, 2}
    assert not any("had not ended" in text for text in caught.value.failures.values())


def test_deadline_shows_the_stacks_of_those_that_hang(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(hang_in_a_collective, 4, str(tmp_path), deadline=2.0)
    failed = caught.value
    assert set(failed.failures) == {0, 2, 3}
    for text in failed.failures.values():
        assert text.startswith("had not ended 2 s after the start:")
    for rank in (0, 2):
        assert "in barrier" in failed.failures[rank]
        assert "in hang_in_a_collective" in failed.failures[rank]
    assert "did not answer within 1 s" in failed.failures[3]
    assert failed.values == {1: "left out"}
    assert not alive(tmp_path)
    assert not multiprocessing.active_children()


def test_rank_that_returned_but_does_not_end() -> None:
    with pytest.raises(RanksFailed, match="had not ended 1 s after the start, though it had returned") as caught:
        run_ranks(return_with_a_thread_left, 1, init=False, deadline=1.0)
    assert caught.value.values == {}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (functools.partial(kill_self, signal.SIGKILL), "was killed by SIGKILL without a value"),
        (functools.partial(os._exit, 3), "exited with code 3 without a value"),
        (functools.partial(os._exit, 0), "exited with code 0 without a value"),
        (functools.partial(sys.exit, 4), "SystemExit: 4"),
        (functools.partial(kill_self, signal.SIGSEGV), "was killed by SIGSEGV without a value"),
    ],
)
def test_rank_that_ends_without_a_value(how: Callable[[], object], said: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(end_one, 3, 1, how)
    assert list(caught.value.failures) == [1]
    assert said in caught.value.failures[1]
    assert caught.value.values == {0: 0, 2: 2}


def test_crash_shows_its_stack() -> None:
    with pytest.raises(RanksFailed, match=r"Segmentation fault(.|\n)*in end_one"):
        run_ranks(end_one, 1, 0, functools.partial(kill_self, signal.SIGSEGV))


def test_value_that_does_not_pickle() -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        run_ranks(threading.Lock, 1, init=False)


def test_value_that_does_not_load() -> None:
    with pytest.raises(
        RanksFailed, match=r"rank 1 returned a value that can't be loaded:\n(.|\n)*no such value"
    ) as caught:
        run_ranks(unloadable_on_one, 2, 1)
    assert set(caught.value.failures) == {1}
    assert caught.value.values == {0: 0}


def test_argument_that_does_not_load() -> None:
    with pytest.raises(RanksFailed, match="no such value"):
        run_ranks(echo, 1, Unloadable())


def test_interrupt_leaves_nobody(tmp_path: Path) -> None:
    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt, daemon=True)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_ranks(sleep_long, 2, str(tmp_path), deadline=30.0)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not alive(tmp_path)


def test_script_and_its_violent_end(tmp_path: Path) -> None:
    """A script's own functions and classes travel, and ranks end with a parent that had no time to end them."""
    pids = tmp_path / "pids"
    pids.mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, pathlib, signal, sys, threading, time
        import attrs
        from k3comm.testing import current_rank, run_ranks

        @attrs.frozen
        class Answer:
            rank: int

        def answer():
            print("rank", current_rank().rank, "speaks")
            return Answer(current_rank().rank)

        def hang(folder):
            pathlib.Path(folder, str(os.getpid())).touch()
            time.sleep(60)

        def die(folder):
            while len(os.listdir(folder)) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        if __name__ == "__main__":
            print(run_ranks(answer, 2, init=False) == [Answer(0), Answer(1)], flush=True)
            threading.Thread(target=die, args=sys.argv[1:]).start()
            run_ranks(hang, 2, sys.argv[1], init=False)
        """)
    )
    root = Path(k3comm.testing.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script, pids],
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)},  # where its launch leaves a folder
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert sorted(done.stdout.splitlines()) == ["True", "rank 0 speaks", "rank 1 speaks"]
    limit = time.monotonic() + 5
    while alive(pids) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not alive(pids)


def test_failure_pickles() -> None:
    failed = pickle.loads(pickle.dumps(RanksFailed({1: "raised:\nboom"}, {0: 3})))
    assert (failed.failures, failed.values) == ({1: "raised:\nboom"}, {0: 3})
    assert str(failed) == "1 of 2 ranks failed\n\n--- rank 1 raised:\nboom"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"world_size": 0}, "world_size: 0"),
        ({"world_size": True}, "world_size: True"),
        ({"threads": 0}, "threads: 0"),
        ({"deadline": 0}, "deadline: 0"),
        ({"deadline": math.nan}, "deadline: nan"),
        ({"deadline": math.inf}, "deadline: inf"),
        ({"deadline": 1e300}, r"deadline: 1e\+300 given; seconds above 0 and up to 1000000 are accepted"),
        ({"deadline": "x"}, "deadline: 'x' given; seconds above 0 and up to 1000000 are accepted"),
        ({"deadline": None}, "deadline: None"),
        ({"deadline": True}, "deadline: True"),
        ({"grace": -1}, "grace: -1"),
        ({"grace": "x"}, "grace: 'x' given; seconds from 0 to 1000000 are accepted"),
        ({"grace": 1e300}, r"grace: 1e\+300"),
        ({"start_method": "fork"}, "start_method: 'fork'"),
        ({"fn": 3}, "fn: 3"),
        ({"fn": lambda: 3}, "can't be sent"),
        ({"lock": threading.Lock()}, "can't be sent"),
        ({"value": Unpicklable()}, "can't be sent to the ranks: no such value"),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        run_ranks(**{"fn": echo, "world_size": 1, **arguments})


def test_server_can_be_started_twice() -> None:
    start_server()
    start_server("json")


@pytest.mark.parametrize("name", [5, None, "", ".", "json.", "../json", b"json"])
def test_server_refuses_what_names_no_module(name: Any) -> None:
    with pytest.raises(InputError, match=f"preload: {re.escape(repr(name))} given; accepted are names of modules"):
        start_server("json", name)
    assert run_ranks(identity, 1) == [(0, 1, True, 1)]


def test_server_forgets_a_module_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RanksFailed({0: "exited"}, {})

    before = list(_ranks._preload)
    monkeypatch.setattr(_ranks, "run_ranks", fail)
    with pytest.raises(RanksFailed):
        start_server("a_module_that_ends_the_server")
    assert _ranks._preload == before


# ---- assert_identical


@attrs.frozen
class Plan:
    tier: str
    scale: Any
    seconds: float = attrs.field(default=0.0, eq=False)


@dataclasses.dataclass
class Record:
    rows: list[int]
    note: str = dataclasses.field(default="", compare=False)


@attrs.frozen
class Namesake:
    """Its representation does not tell its instances apart."""

    number: int = attrs.field(repr=False)


def bits(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0])),
        (torch.ones(2, 3).T, torch.ones(3, 2)),
        (torch.empty(0, 4), torch.empty(0, 4)),
        (torch.tensor(2.0, requires_grad=True), torch.tensor(2.0)),
        ({"a": [math.nan, (1, None)], "b": "x"}, {"b": "x", "a": [-math.nan, (1, None)]}),
        (Plan("A", torch.tensor(math.nan), 1.0), Plan("A", torch.tensor(math.nan), 2.0)),
        (Record([1, 2], "a"), Record([1, 2], "b")),
        (np.array([math.nan]), np.array([math.nan])),
        (np.float32(math.nan), np.float32(math.nan)),
        (ValueError("same"), ValueError("same")),
        ({Namesake(1): "a", Namesake(2): "b"}, {Namesake(2): "b", Namesake(1): "a"}),
        ({math.nan: 1}, {float("nan"): 1}),
        ({math.nan: 1, -math.nan: 2}, {float("nan"): 2, float("-nan"): 1}),
        ({(1, math.nan): 1}, {(1, float("nan")): 1}),
        (Plan, Plan),
    ],
)
def test_identical(one: Any, other: Any) -> None:
    assert assert_identical([one, other, one]) is one


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (3, 4, "rank 1: 4 instead of 3"),
        (1, 1.0, "rank 1: 1.0 (float) instead of 1 (int)"),
        (0.0, -0.0, "rank 1: -0.0 instead of 0.0"),
        ([1, 2], [1, 2, 3], "rank 1: at [2] 3 instead of nothing"),
        ({Namesake(1): 3, Namesake(2): 3}, {Namesake(1): 3}, "rank 1: at [Namesake()] nothing instead of 3"),
        ({Namesake(1): 3}, {Namesake(1): 3, Namesake(2): 4}, "rank 1: at [Namesake()] 4 instead of nothing"),
        ({Namesake(1): 3}, {Namesake(2): 3}, "rank 1: at [Namesake()] nothing instead of 3"),
        ({Namesake(1): 3, Namesake(2): 4}, {Namesake(1): 4, Namesake(2): 4}, "at [Namesake()] 4 instead of 3"),
        ({1: 3}, {True: 3}, "rank 1: at [1] nothing instead of 3"),
        ({math.nan: 1}, {math.nan: 2}, "rank 1: at [nan] 2 instead of 1"),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, "rank 1: at ['a']['b'] nothing instead of 1"),
        (Plan("A", (1, 2)), Plan("A", (1, 5)), "rank 1: at .scale[1] 5 instead of 2"),
        (Record([1]), Record([2]), "rank 1: at .rows[0] 2 instead of 1"),
        (ValueError("a"), ValueError("b"), "rank 1: at .args[0] 'b' instead of 'a'"),
        (torch.ones(2), torch.ones(3), "rank 1: torch.float32 (3,) instead of torch.float32 (2,)"),
        (torch.ones(2), torch.ones(2).bfloat16(), "rank 1: torch.bfloat16 (2,) instead of torch.float32 (2,)"),
        (
            torch.tensor([[0.5, 1.0], [2.0, 3.0]]).bfloat16(),
            torch.tensor([[0.5, 1.0], [4.0, 5.0]]).bfloat16(),
            "rank 1: at [1, 0] 4.0 (0x4080) instead of 2.0 (0x4000) (2 of 4 elements differ)",
        ),
        (bits(0), bits(-32768), "rank 1: at [0] -0.0 (0x8000) instead of 0.0 (0x0000) (1 of 1 elements differ)"),
        (bits(0x7FC0), bits(0x7FC1), "rank 1: at [0] nan (0x7fc1) instead of nan (0x7fc0) (1 of 1 elements differ)"),
        (np.array([1], "i2"), np.array([2], "i2"), "rank 1: at [0] 2 (0x0002) instead of 1 (0x0001)"),
        ("x" * 500 + "right", "x" * 500 + "wrong", "wrong'... (from character 450) instead of"),
    ],
)
def test_not_identical(one: Any, other: Any, said: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_identical([one, other, one], what="plan")
    assert str(caught.value).startswith("plan differs between ranks. Compared with ranks 0, 2,\n  rank 1: ")
    assert said in str(caught.value)


def test_not_identical_names_every_odd_rank() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_identical([5, 6, 6, 7, 5, 6])
    assert str(caught.value) == (
        "outcome differs between ranks. Compared with ranks 1, 2, 5,\n"
        "  ranks 0, 4: 5 instead of 6\n"
        "  rank 3: 7 instead of 6"
    )


def test_no_values() -> None:
    with pytest.raises(InputError, match="values"):
        assert_identical([])


# ---- truth tables


def test_truth_table_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: can't be read as text: .*No such file"):
        load_truth_table(path)
    path.write_bytes(b"num_tokens\xff")
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: can't be read as text: .*can't decode"):
        load_truth_table(path)
    path.write_text(f"{','.join(_table.COLUMNS)}\n{'1' * 200_000},0,0,PEER_AR,,PEER_AR\n")
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}:2: .*field larger"):
        load_truth_table(path)


# ---- the facade


def test_public_names() -> None:
    assert sorted(k3comm.testing._HOME) == sorted(k3comm.testing.__all__)
    assert set(k3comm.testing.__all__) <= set(dir(k3comm.testing))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        k3comm.testing.nothing  # noqa: B018


def test_import_loads_no_torch() -> None:
    root = Path(k3comm.testing.__file__).parents[2]
    code = "import sys, k3comm.testing; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)}, check=True, timeout=60)
