"""An exchange whose collectives are stages of a round (rounds.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from k3comm.buffers.symmetric import Limit, describe
from k3comm.errors import NegotiationError
from k3comm.negotiate import rounds
from k3comm.negotiate.exchange import Exchange, GroupExchange
from k3comm.negotiate.rounds import ClaimedError, Round

T = TypeVar("T")


class WatchedExchange:
    """An exchange whose collectives are numbered, named stages of a round. Itself an `Exchange`.

    Args:
        inner: the group's exchange, or the caller's. Only the group's looks at the claim while it waits: a caller's own
            ends by its own deadline, and in a self-check the tier decides.
        store: None, or W = 1: the inner exchange's own deadlines are all there is, and its errors name nobody.
        groups: those whose collectives get out of step if a round ends before its time.
        home: the group's own store; by default `store`.
        votes, given: which group carries the votes, and whether the caller gave `store`, in words for errors. The
            ranks' have to agree. own: whether the caller gave `inner`, in words; "" for no.
        limit: of a stage where `at` says nothing else.

    Attributes:
        rank, size: place in the group, and its size W. store: what watches over it.
    """

    def __init__(
        self,
        inner: Exchange,
        store: Store | None,
        *,
        groups: Sequence[dist.ProcessGroup] = (),
        limit: Limit,
        home: Store | None = None,
        votes: str = "none",
        given: str = "none",
        own: str = "",
    ) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.store = store if inner.size > 1 else None
        self._inner = inner
        means = {"cpu_group": votes, "store": given, **({"exchange": own} if own else {})}
        self._round = Round(self.rank, self.size, self.store, groups, home, means)
        self._name, self._seconds, self._setting = "a vote", limit.seconds, limit.setting

    def at(self, name: str, limit: Limit | None = None) -> WatchedExchange:
        """The same, its next collectives being the stage `name`, with a deadline of their own if it is given."""
        view = object.__new__(WatchedExchange)
        view.__dict__ |= self.__dict__
        view._name = name
        if limit is not None:
            view._seconds, view._setting = limit.seconds, limit.setting
        return view

    def within(self, seconds: float) -> WatchedExchange:
        """The same with another `settings.vote_deadline`."""
        return self.at(self._name, Limit(seconds, "settings.vote_deadline"))

    def min(self, values: Sequence[int]) -> list[int]:
        """See `Exchange`.

        Raises:
            CommunicationTimeoutError: the round is over, with the same text on every rank.
        """
        return self._collective(lambda inner: inner.min(values))

    def gather(self, payload: bytes) -> list[bytes]:
        """See `Exchange`. Raises as `min`."""
        return self._collective(lambda inner: inner.gather(payload))

    def look(self) -> None:
        """For collectives of a tier that wait: whether a peer has given up, in a round or in a forward.

        Raises:
            WaitingEndedError: one has, in a forward. ClaimedError: in a round.
        """
        self._round.look_around()

    def run(self, collective: Callable[[], T], *, meet: bool = False, looks: bool = False) -> T:
        """One stage: anything collective that ends by itself, by a deadline of its own. Raises as `min`.

        Args:
            looks: what waits in it calls `look`.
            meet: no rank enters before all have come. For what runs on a device: NCCL connects in its first collective,
                without a limit that could be set, and ends the process where a peer is missing later.
        """
        return self._run(collective, f"{self._seconds:g} s ({self._setting})", looks=looks, meet=meet)

    def _collective(self, call: Callable[[Exchange], T]) -> T:
        inner = self._inner
        if isinstance(inner, GroupExchange):
            bounded = inner.within(self._seconds, self._setting, self._round.look)
            limit = f"{self._seconds:g} s ({self._setting})"
            return self._run(lambda: call(bounded), limit, looks=True, meet=inner.on_device)
        return self._run(lambda: call(inner), "the exchange's own deadline", looks=False, meet=False)

    def _run(self, collective: Callable[[], T], bound: str, *, looks: bool, meet: bool) -> T:
        current, name = self._round, self._name
        current.enter(name, self._seconds, bound, looks=looks)
        rounds.moment("inside", name, self.rank)
        if meet:
            current.meet()
        try:
            self._open()
            result = collective()
        except ClaimedError:
            current.obey()
        except Exception as error:
            current.give_up(error)
        rounds.moment("after", name, self.rank)
        return result

    def _open(self) -> None:
        """Before the first collective of a round: whether all ranks are in the same one."""
        current, inner = self._round, self._inner
        if not current.opens:
            return
        if not isinstance(inner, GroupExchange):
            current.compare(self._seconds)
        else:
            number = current.number
            bounded = inner.within(self._seconds, self._setting, current.look_for_votes)
            least, negated = bounded.min([number, -number])
            current.opened(least == -negated)

    def raised(self, error: Exception, seconds: float) -> None:
        """Says that this rank raised in the present stage, and waits until no peer can be waiting for it there.

        A peer that has come to a later stage, or has raised too, has come through this stage's collectives, and those
        need all ranks: so the ranks are still in step, and the failure is a value to vote on. Peers that never do are
        waiting for what this rank did not send; the round is then over.

        Args:
            seconds: how long peers may take.
        """
        self._round.raised(describe(error), seconds, error)

    def peer_raised(self) -> bool:
        """Whether a peer said that it raised in the present stage."""
        return self._round.peer_raised()

    def meet_round(self, what: str) -> None:
        """In no round, after a `min` of a number and its negative that shows a difference: whether peers are in one.

        Returns if none is. Every rank has come through the `min`.

        Raises:
            NegotiationError: some are, in a round that has ended by it, with the same text on every rank; `what` is
                this rank's part in it. CommunicationTimeoutError: a rank is gone besides.
        """
        self._round.meet_round(what)

    def missing(self) -> tuple[int, ...]:
        """After a collective of a forward failed here: the ranks that don't say the same within ANSWER seconds.

        They are late, stopped or gone. Empty inside a round, which finds out for itself, and where the store can't say.
        """
        return self._round.roll_call()

    @contextmanager
    def together(self, what: str, of: str = "") -> Iterator[WatchedExchange]:
        """A round. It ends on every rank as `what` did on all of them, or with one text.

        `of` tells rounds of one kind apart: the communicator whose it is.

        Without an exception, or with a NegotiationError (which all ranks raise alike), this rank has come through the
        last collective, and the verdict counts. Any other exception of this rank ends the round for all of them.

        Raises:
            NegotiationError: the ranks are in different rounds, or were given different stores; on every rank alike.
            CommunicationTimeoutError: the same text on every rank that has not raised something of its own.
        """
        current = self._round
        current.begin(what, of)
        try:
            try:
                yield self
            except NegotiationError as error:
                current.settle(error)
                raise
            except BaseException as error:
                current.leave(error)
                raise
            current.settle(None)
        finally:
            current.close()
