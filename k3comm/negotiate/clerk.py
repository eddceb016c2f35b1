"""Asking a store that may not answer.

A store's client waits for ever for a host that is stopped, so it is asked from a thread of its own, with a limit.

Decided against: a connection of its own for the thread (`Store.clone` of a TCPStore took 5 s in 5 of 120 tries, and
milliseconds otherwise: torch 2.13, three ranks under torchrun).
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from k3comm.buffers.symmetric import describe
from k3comm.negotiate.threads import start_thread

T = TypeVar("T")

STORE_ANSWER = 5.0
"""Seconds after which a store that does not answer is taken for lost; of those in which this process itself runs."""

LOOKS = 10
"""So often it looks meanwhile for how long it was itself held up: stopped, or on a machine that stood still."""


class StoreLostError(Exception):
    """The store does not answer, or its host is gone.

    Args:
        stopped: this process was itself held up meanwhile, so it says nothing about the host.
    """

    def __init__(self, text: str, stopped: bool = False) -> None:
        super().__init__(text)
        self.stopped = stopped


def store_of(group: dist.ProcessGroup) -> Store:
    """The job's store as a group has it: with the group's own prefix, so that subgroups don't meet.

    `ProcessGroup.get_group_store` is a method without underscore, though no page documents it; it serves the default
    group, subgroups, and groups with device backends alone.
    """
    return group.get_group_store()


class Clerk:
    """A thread that asks the store, so that whoever wants to know waits no longer than it likes."""

    def __init__(self, store: Store) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.lost = False
        # A daemon: one that waits for a host that is stopped must not keep the process from its end.
        start_thread("k3comm-store", partial(self._work, store, self._jobs), self.dismiss)

    def ask(self, question: Callable[[Store], T]) -> T:
        """The answer to a question. StoreLostError if there is none, now or before."""
        if self.lost:
            raise StoreLostError("it did not answer before")
        answer: Future[T] = Future()
        self._jobs.put((question, answer))
        asked = time.monotonic()
        try:
            return self._within(answer)
        except Exception as error:  # a store's own errors are of many kinds, and a time-out is one more
            self.lost = True
            raise StoreLostError(describe(error), self._was_stopped(asked)) from error

    @staticmethod
    def _within(answer: Future[T]) -> T:
        """The answer in time, or TimeoutError. What a look takes longer than asked, the clerk was held up too."""
        part, waited = STORE_ANSWER / LOOKS, 0.0
        while True:
            start = time.monotonic()
            try:
                return answer.result(part)
            except TimeoutError:
                if answer.done():  # only just, or the error is the store's own
                    return answer.result()
                waited += min(time.monotonic() - start, part)
                if waited >= STORE_ANSWER:
                    raise

    @staticmethod
    def _was_stopped(asked: float) -> bool:
        """Whether an answer takes so long that this process itself did not run meanwhile."""
        return time.monotonic() - asked > 2 * STORE_ANSWER

    def dismiss(self) -> None:
        self._jobs.put(None)

    @staticmethod
    def _work(store: Store, jobs: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]) -> None:
        while (job := jobs.get()) is not None:
            question, answer = job
            try:
                answer.set_result(question(store))
            except Exception as error:
                answer.set_exception(error)
            del job, question, answer
