"""Faults at the stages of a negotiation, of `reserve` and of `resume`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from k3comm.errors import InputError
from k3comm.negotiate import rounds

When = Literal["before", "inside", "after"]


@contextmanager
def fault_at(
    stage: str, act: Callable[[], object], *, when: When = "before", rank: int | None = None
) -> Iterator[list[str]]:
    """Calls `act` once, when a rank of this process is at a stage: it may raise, sleep, or send this process a signal.

    A round goes through "the vote" ("what differs" if ranks do), "export of the decode and staging blocks", "exchange
    of ...", "import of ...", "map of ...", "the vote on prepare", "self-check of <tier>", "the confirming vote" and
    "the commit"; `reserve` through "the number of rows", the stages of the larger block, and "the commit".

    Args:
        stage: a part of the stage's name, such as "export".
        act: what happens there.
        when: "before" peers can see that the rank has come, "inside" (they can see it, and its part in the collective
            is still to come), or "after" the collective returned.
        rank: only on this rank of the group, where ranks are threads; None: whichever comes first.

    Yields:
        What was passed in this process while the context was open: "<when> <stage>".

    Raises:
        InputError: another `when`.
    """
    if when not in get_args(When):
        raise InputError(f"when: {when!r} given; accepted are {', '.join(get_args(When))}")
    passed: list[str] = []
    before, pending = rounds.moment, [act]

    def moment(now: str, name: str, of: int, /) -> None:
        before(now, name, of)
        passed.append(f"{now} {name}")
        if now == when and stage in name and rank in (None, of) and pending:
            pending.pop()()

    rounds.moment = moment
    try:
        yield passed
    finally:
        rounds.moment = before
