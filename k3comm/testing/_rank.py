"""What a launch looks like from inside one of its ranks; `_ranks` is the parent's side and explains both."""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import io
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not in torch's __all__

DUMP_SIGNAL = signal.SIGRTMAX
RETURNED, RAISED, LEAVE = b"returned", b"raised", b"leave"


@attrs.frozen
class RankContext:
    """Who a rank is, with or without a process group.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
        rendezvous: path of a file that is private to the launch and not there yet, for a store of the caller's own
            (`torch.distributed.FileStore(rendezvous, world_size)`).
    """

    rank: int
    world_size: int
    rendezvous: str


_context: RankContext | None = None


def current_rank() -> RankContext:
    """Who the calling rank is.

    Raises:
        RuntimeError: not called on a rank of `run_ranks`.
    """
    if _context is None:
        raise RuntimeError("current_rank() answers only on a rank that run_ranks() started")
    return _context


@attrs.frozen
class Job:
    """One launch, as every rank is told of it. `backend` None: no process group."""

    call: bytes
    world_size: int
    scratch: str
    backend: str | None
    threads: int

    def file(self, kind: str, rank: int | None = None) -> Path:
        return Path(self.scratch, kind if rank is None else f"{kind}-{rank}")


def encode(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    # Not data from elsewhere: the parent and its ranks run the same code for the same user.
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def rank_main(job: Job, rank: int, channel: Connection, streams: Sequence[Connection]) -> None:
    global _context
    # What the fork server imported stays: to search it for garbage takes 0.1 s, and a copy of each of its pages.
    gc.freeze()
    _end_with_parent()
    # Ctrl-C reaches the whole terminal group. The parent alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _adopt(streams)
    stacks = job.file("starting", rank).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks)
    job.file("starting", rank).rename(job.file("stacks", rank))  # from here on the signal asks instead of killing
    try:
        fn, args, kwargs = decode(job.call)
        torch.set_num_threads(job.threads)
        _context = RankContext(rank, job.world_size, str(job.file("rendezvous")))
        if job.backend is not None:
            store = FileStore(str(job.file("group")), job.world_size)
            dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.world_size)
            # A rank that fails at once must not find a peer that is still connecting to it.
            store.set(f"ready-{rank}", "")
            store.wait([f"ready-{peer}" for peer in range(job.world_size)])
        job.file("value", rank).write_bytes(encode(fn(*args, **kwargs)))
        channel.send_bytes(RETURNED)
        channel.poll(None)  # until all have returned
        if dist.is_initialized():
            dist.destroy_process_group()
    # Whatever ended the rank, SystemExit too, is for the parent to tell.
    except BaseException:
        at = time.monotonic_ns()
        job.file("traceback", rank).write_text(traceback.format_exc(), "utf-8", "backslashreplace")
        channel.send_bytes(b"%b %d" % (RAISED, at))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("not in a process that multiprocessing started")
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([pipe], 0):  # it hung up before that
        os.kill(os.getpid(), signal.SIGKILL)


def _adopt(streams: Iterable[Connection]) -> None:
    """The fork server's own streams are those of the moment it was started, which pytest has replaced since."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a rank that is killed has said what it said
