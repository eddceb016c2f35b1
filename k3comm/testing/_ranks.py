"""The rank launcher: one function on W processes of this machine, their values or the reason why there are none.

Start. Ranks are forked by multiprocessing's fork server, which imports torch once for all launches of a process. That
is the difference between 0.2 s and 8 s for 8 ranks (2 cores; `spawn` imports torch in each). Importing torch makes no
CUDA context, so the forked ranks may use a GPU.

Values. The call and the values travel as bytes of torch.save. Left to multiprocessing, tensors would become handles of
shared memory that end with the rank that returned them. Values wait in files, and a pipe carries one word about each:
a rank that freezes halfway through a large value can't hold the parent up past the deadline.

Leaving. A rank that has returned stays until all have, so the last collective of a slower peer never meets a closed
connection. A rank that raises leaves at once, so that its peers' collectives fail too instead of waiting for it.

Hangs. Stacks are asked for by a signal whose handler (faulthandler) runs in C: it answers even while the main thread
sits in a collective that holds the interpreter lock.

Ends. The parent kills on every way out of the launch. Where it can't (it was killed, or pytest-timeout ended it), the
kernel does: each rank has SIGKILL tied to the hang-up of a pipe whose other end only the parent holds. A thread that
watches the pipe would need the interpreter lock, and the parent-death signal would watch the fork server instead.
"""

from __future__ import annotations

import contextlib
import enum
import multiprocessing
import numbers
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal, TypeGuard, TypeVar, get_args

import attrs

from k3comm.errors import InputError
from k3comm.testing._rank import DUMP_SIGNAL, LEAVE, RETURNED, Job, decode, encode, rank_main

T = TypeVar("T")
StartMethod = Literal["forkserver", "spawn"]

# What ranks import anyway and the server therefore once for all of them. Nothing here touches CUDA. The last is what
# torch.save imports when it is first used.
_preload = ["torch", "torch.distributed", "k3comm.communicator", __name__, "torch.utils.serialization"]
_MAX_SECONDS = 1_000_000  # the longest deadline: poll() takes milliseconds in 31 bits
_DUMP_WAIT = 1.0  # s, for the stacks of all ranks that are asked
_END_WAIT = 5.0  # s, for the exit code of a process that is gone


class RanksFailed(AssertionError):
    """At least one rank has no value, or ended badly after it had one.

    An AssertionError because a rank's body is a part of the test: runners then count a failure, not an error, and
    `pytest.raises(RuntimeError)` around a launch doesn't take a hang for the error that it expects.

    Attributes:
        failures: what happened to each rank without a value, in the order in which they failed: a traceback, the
            stacks of all its threads, an exit code or a signal. Ranks that failed only because another had are
            included, so the first is the one to read.
        values: what the other ranks returned.
    """

    def __init__(self, failures: Mapping[int, str], values: Mapping[int, Any]) -> None:
        super().__init__(failures, values)
        self.failures = dict(failures)
        self.values = dict(values)

    def __str__(self) -> str:
        size = len(self.failures) + len(self.values)
        order = ", in this order" if len(self.failures) > 1 else ""
        blocks = [f"{len(self.failures)} of {size} ranks failed{order}"]
        blocks += [f"--- rank {rank} {text.rstrip()}" for rank, text in self.failures.items()]
        return "\n\n".join(blocks)


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    deadline: float = 60.0,
    grace: float = 3.0,
    backend: str = "gloo",
    start_method: StartMethod = "forkserver",
    init: bool = True,
    threads: int = 1,
    **kwargs: Any,
) -> list[T]:
    """Run `fn(*args, **kwargs)` on `world_size` ranks of this machine and return their values in rank order.

    Each rank is a process with torch.distributed initialised. It gets its own copy of the arguments; arguments and
    values must pickle, and tensors arrive on the CPU. Its standard output and error are the caller's. It sees
    the environment as it was when the fork server started (by the first launch) and ignores SIGINT. It can't start
    processes of multiprocessing. When this function is left, in whatever way, no rank is running.

    A script needs its `if __name__ == "__main__":` guard, since every rank imports the main module anew.

    Args:
        fn: a function that ranks can import: at the top level of a module, no lambda. For an argument that is named
            like one of those below, use `functools.partial`.
        world_size: number of ranks, 1 or more.
        *args, **kwargs: arguments of `fn`, the same on every rank.
        deadline: s, at most 1,000,000, from when all processes are there until all must have ended. What comes before
            it is short but for the caller's first launch, which waits for the fork server (1 to 2 s, `start_server`).
        grace: s that the other ranks have after the first failure, still within the deadline.
        backend: of the default process group, as in `torch.distributed.init_process_group`.
        start_method: "forkserver", or "spawn", which takes about a second a rank and passes on today's environment.
        init: whether to make a process group; without one `current_rank` still answers.
        threads: torch's intra-op threads of each rank.

    Raises:
        RanksFailed: a rank raised, was killed, exited, returned what the caller can't load, or had not ended at the
            deadline; the text holds its traceback, signal, exit code, or the stacks of all its threads.
        InputError: an argument is out of range or does not pickle.
    """
    __tracebackhide__ = True
    _check(fn, world_size, deadline, grace, start_method, threads)
    with tempfile.TemporaryDirectory(prefix="k3comm-ranks-") as scratch:
        job = Job(_encode_call(fn, args, kwargs), world_size, scratch, backend if init else None, threads)
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                ranks.append(_start(job, number, start_method))
            failures = _follow(ranks, float(deadline), float(grace))
        finally:
            _end(ranks)
        values = {rank.number: rank.value for rank in ranks if rank.has_value}
    if failures:
        raise RanksFailed(failures, values)
    return [values[number] for number in range(world_size)]


def start_server(*preload: str) -> None:
    """Start the fork server and wait until it is warm. Without this the first launch does it.

    For a conftest or the top of a benchmark. A server that is running already is left as it is.

    Args:
        *preload: further modules that the server imports once for all ranks: what their functions need beside torch,
            k3comm and (under pytest) pytest. They must not touch CUDA, which a forked rank could not use then.

    Raises:
        InputError: a name that is none of a module.
        RanksFailed: the server forks no process that works, for example because the main module can't be imported.
    """
    for name in preload:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise InputError(f"preload: {name!r} given; accepted are names of modules, such as 'package.module'")
    before = list(_preload)
    _preload.extend(name for name in dict.fromkeys(preload) if name not in before)
    try:
        run_ranks(_nothing, 1, init=False)
    except BaseException:
        _preload[:] = before  # or the next launch would fail by it too
        raise


def _nothing() -> None:
    pass


def _check(
    fn: object, world_size: object, deadline: object, grace: object, start_method: object, threads: object
) -> None:
    if not callable(fn):
        raise InputError(f"fn: {fn!r} given; a function at the top level of a module is accepted")
    for name, count in (("world_size", world_size), ("threads", threads)):
        if type(count) is not int or count < 1:
            raise InputError(f"{name}: {count!r} given; whole numbers from 1 are accepted")
    if not _is_number(deadline) or not 0 < deadline <= _MAX_SECONDS:
        raise InputError(f"deadline: {deadline!r} given; seconds above 0 and up to {_MAX_SECONDS} are accepted")
    if not _is_number(grace) or not 0 <= grace <= _MAX_SECONDS:
        raise InputError(f"grace: {grace!r} given; seconds from 0 to {_MAX_SECONDS} are accepted")
    if start_method not in get_args(StartMethod):
        raise InputError(f"start_method: {start_method!r} given; {', '.join(get_args(StartMethod))} are accepted")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _encode_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return encode((fn, args, kwargs))
    except Exception as error:  # pickle's own, and whatever an argument's __reduce__ raises
        raise InputError(f"{fn!r} with its arguments can't be sent to the ranks: {error}") from error


class _State(enum.Enum):
    RUNNING = enum.auto()
    RETURNED = enum.auto()  # a value is there, the process still is
    LEFT = enum.auto()  # and now it is not
    FAILED = enum.auto()


@attrs.frozen
class _Failure:
    """`at`: ns of the monotonic clock; 0 for a rank that had no time to say when."""

    rank: int
    text: str
    at: int = 0


@attrs.define(eq=False)
class _Rank:
    """The parent's view of a rank."""

    job: Job
    number: int
    process: BaseProcess
    channel: Connection
    state: _State = _State.RUNNING
    value: Any = None
    asked: bool = False

    @property
    def has_value(self) -> bool:
        return self.state in (_State.RETURNED, _State.LEFT)

    def hear(self) -> _Failure | None:
        """Take in the rank's next word, or its end. The failure, if that is what it is."""
        try:
            word = self.channel.recv_bytes()
        except (EOFError, ConnectionResetError):
            return self._ended()
        if word == RETURNED:
            try:
                self.value = decode(self.job.file("value", self.number).read_bytes())
            except Exception:  # whatever the value's own class raises when it is loaded
                self.state = _State.FAILED
                text = f"returned a value that can't be loaded:\n{traceback.format_exc()}"
                return _Failure(self.number, text, time.monotonic_ns())
            self.state = _State.RETURNED
            return None
        self.state = _State.FAILED
        return _Failure(self.number, f"raised:\n{self._read('traceback')}", int(word.split()[1]))

    def leave(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # gone already: the next word is its end
            self.channel.send_bytes(LEAVE)

    def ask_for_stacks(self) -> int:
        """Ask once, as soon as the rank can answer. Bytes of the answer so far."""
        pid = self.process.pid if self.process.is_alive() else None
        if not self.asked and pid is not None and self.job.file("stacks", self.number).exists():
            os.kill(pid, DUMP_SIGNAL)
            self.asked = True
        return len(self._read("stacks"))

    def stacks(self) -> str:
        if not self.asked:
            return "(no stacks: its interpreter was still starting)"
        return self._read("stacks") or f"(no stacks: it did not answer within {_DUMP_WAIT:g} s)"

    def _ended(self) -> _Failure | None:
        self.process.join(_END_WAIT)
        code = self.process.exitcode
        if code == 0 and self.state is _State.RETURNED:
            self.state = _State.LEFT
            return None
        when = "after it had returned" if self.state is _State.RETURNED else "without a value"
        self.state = _State.FAILED
        if code is None:
            return _Failure(self.number, f"closed its connection to the parent {when}")
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return _Failure(self.number, f"{how} {when}\n{self._read('stacks')}")

    def _read(self, kind: str) -> str:
        try:
            return self.job.file(kind, self.number).read_text("utf-8", "replace")
        except FileNotFoundError:
            return ""


def _start(job: Job, number: int, start_method: StartMethod) -> _Rank:
    context: ForkServerContext | SpawnContext
    if start_method == "forkserver":
        # Read when the server starts. Under pytest every rank imports a test module and that pytest: 0.1 s of CPU each.
        tools = [name for name in ("pytest",) if name in sys.modules]
        multiprocessing.set_forkserver_preload([*_preload, *tools])
        context = multiprocessing.get_context("forkserver")
    else:
        context = multiprocessing.get_context("spawn")
    channel, far_end = context.Pipe()
    # multiprocessing passes descriptors on only inside its own objects.
    streams = [Connection(os.dup(stream), readable=False) for stream in (1, 2)]
    process = context.Process(
        target=rank_main, args=(job, number, far_end, streams), name=f"rank-{number}", daemon=True
    )
    process.start()
    far_end.close()
    return _Rank(job, number, process, channel)


def _follow(ranks: Sequence[_Rank], deadline: float, grace: float) -> dict[int, str]:
    """Wait until all ranks have ended well, or nobody is left to wait for. The failures, the first one first."""
    failures: dict[int, str] = {}
    limit = time.monotonic() + deadline
    overdue = f"had not ended {deadline:g} s after the start"
    leaving = False
    while True:
        if not leaving and all(rank.state is _State.RETURNED for rank in ranks):
            leaving = True
            for rank in ranks:
                rank.leave()
        # After a failure nobody is told to leave, so those that have returned stay until they are killed.
        waiting = [r for r in ranks if r.state is _State.RUNNING or (r.state is _State.RETURNED and not failures)]
        if not waiting:
            return failures
        ready = wait([rank.channel for rank in waiting], max(0.0, limit - time.monotonic()))
        if not ready:
            break
        heard = [rank.hear() for rank in waiting if rank.channel in ready]
        # A dead rank before the errors that its peers owe to it, and those by time.
        for failure in sorted(filter(None, heard), key=lambda failure: failure.at):
            if not failures and time.monotonic() + grace < limit:
                limit = time.monotonic() + grace
                overdue = f"had not ended {grace:g} s after rank {failure.rank} failed"
            failures[failure.rank] = failure.text
    unfinished = [rank for rank in waiting if leaving or rank.state is _State.RUNNING]
    stacks = _collect_stacks(unfinished)
    for rank in unfinished:
        when = ", though it had returned" if rank.state is _State.RETURNED else ""
        failures[rank.number] = f"{overdue}{when}:\n{stacks[rank.number]}"
        rank.state = _State.FAILED
    return failures


def _collect_stacks(ranks: Sequence[_Rank]) -> dict[int, str]:
    limit = time.monotonic() + _DUMP_WAIT
    before: list[int] = []
    while time.monotonic() < limit:
        sizes = [rank.ask_for_stacks() for rank in ranks]
        if all(sizes) and sizes == before:  # faulthandler marks no end: a dump is complete when it stops growing
            break
        before = sizes
        time.sleep(0.02)
    return {rank.number: rank.stacks() for rank in ranks}


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join(_END_WAIT)
        if rank.process.exitcode is not None:
            rank.process.close()
        rank.channel.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
