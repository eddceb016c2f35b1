"""Rounds: deadlines that end the same way on every rank, arbitrated by a store.

A collective that times out names nobody, and the late rank's own collective may still succeed afterwards. So what
counts is not what a collective returned but what one key of the store holds, the *verdict* of the round:

    is/<rank>      what a rank is in, which group carries its votes, and whether it was given a store or an exchange
    sees/<rank>    whom a rank sees in the store that it was given, if not all
    at/<rank>      the number of the stage that a rank has come to; written before it enters the stage's collective
    claim          somebody gives up: whoever sees it says "alive" and waits for the verdict. Every rank looks at it
                   before it enters a collective and, over a process group, every POLL seconds while it waits inside
    alive/<rank>   the answer
    raised/<rank>  why a rank raised in a stage where its peers may wait for it
    done           how many ranks came through the last collective
    failed         after the round: somebody's collective in a forward failed; failed/<rank> is the answer
    read/<rank>    after a verdict that is a text: the rank has it. gone: the ranks that are not expected to
    verdict        "commit", or the text with which every rank raises; only ever written by compare_set, from empty

Ranks may be in different rounds of one group: one in `reserve`, the others in `negotiate`. Gloo ends the process where
lengths differ, so a round's first collective is the same in all of them: two numbers, of what `is` says. Where they
differ, all ranks have come through it, so nothing is out of step and every rank raises NegotiationError. A rank in a
`check_uniform` is in no round, but in a collective of the same length: where its numbers differ it looks whether a peer
has begun a round that it has not, and comes to that one too. With another vote group no collective meets; whoever
waits sees that in the store. `is` and the numbers of the rounds are always in the group's own store, also where the
rest is in the caller's. So ranks with an exchange of the caller's wait there for each other before they use it: what it
does where one of them is in something else, or has none, is not known. And a store of the caller's that the ranks don't
share is told as that: after the first collective all have written `at`.

A round (one negotiation, one `reserve`) ends by arbitration: the rank that completes `done` tries to write "commit"; a
rank that gives up, in whatever stage, tries to write its text. The first wins, and every rank obeys what is there. So
no rank believes while another gives up, wherever in between anybody is late, killed or stopped. Nothing is believed
before the verdict. So no key has to be read right after each collective: the next stage, or the end, reads it.

Nobody owns the right to give up, so nobody's death can leave the others waiting for it. A rank looks first who has not
come to its stage (on a time-out: those are late), says `claim`, then waits up to ANSWER seconds for the others'
`alive`: a rank that came and does not answer was killed, or is stopped.

A rank that raises stays until the others have read why, LINGER seconds at most: it may host the store.

Rounds are numbered in the store, each rank counting its own, so a group that is made anew over the same store meets no
key of an earlier one. A group whose round ended in a text is out of step: its collectives no longer pair. Each later
round on it raises at once with the old reason.

The store is asked from a thread of its own (clerk.py). What it costs when all is well: at each stage one `set` and
one `check`; a round takes an `add` and a `set` at its start, one collective more (with an exchange of the caller's a
poll instead), and an `add` at its end, and the verdict is polled. A store of the caller's is looked at once more, once.

Decided against: one claimant chosen by compare_set (its death needs a second protocol, and a few lookups by every rank
cost nothing); a key a stage (one that counts says the same); `Store.wait` (its time-out can't be cut short when the
host is stopped).
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from k3comm.buffers.symmetric import describe
from k3comm.errors import CommunicationTimeoutError, NegotiationError, PeerTimeoutError
from k3comm.negotiate.clerk import Clerk, StoreLostError
from k3comm.negotiate.decide import digest, name_ranks
from k3comm.negotiate.exchange import Late, WaitEnded
from k3comm.tiers.waiting import POLL, WaitingEndedError

T = TypeVar("T")

ANSWER = 1.0
"""Seconds in which a rank that is alive says so. It looks every POLL seconds: there is room for busy machines."""

LINGER = 1.0
"""Seconds that a rank stays for the others to read why a round ended."""

DIFFER = "differ: "
"""Begins a verdict after which all ranks are in step still."""

COMMIT = "commit"
TEXT_CHARACTERS = 4096
"""Of the text of a verdict; the rest is cut off."""

_ended: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


class ClaimedError(Exception):
    """Somebody gives up, in a round: nobody but the round catches it."""


class VotesDifferError(Exception):
    """Ranks vote over different groups."""


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


class Round:
    """The keys of one round after the other, and what this rank knows of the present one."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store | None,
        groups: Sequence[dist.ProcessGroup],
        home: Store | None,
        means: Mapping[str, str],
    ) -> None:
        self._rank, self._size, self._store, self._groups = rank, size, store, groups
        self._home = store if home is None else home
        self._means = means
        self._clerk: Clerk | None = None
        self._home_clerk: Clerk | None = None
        self._here = ""
        self.opens = False
        self._shared = self._home is self._store
        self._base = ""
        self._what = "a vote"
        self._stage, self._number = "its start", 0
        self._seconds, self._bound, self._looks, self._since = 0.0, "", True, 0.0
        self._error: CommunicationTimeoutError | NegotiationError | None = None

    def begin(self, what: str, of: str = "") -> None:
        for group in self._groups:
            if why := _ended.get(group, ""):
                raise CommunicationTimeoutError(
                    f"{what} on a group whose ranks are out of step ({why}); its collectives no longer pair: make a "
                    "new group, in new processes where a rank is gone"
                )
        self._what, self._stage, self._number, self._error = what, "its start", 0, None
        if self._home is None:
            return
        self._home_clerk = Clerk(self._home)
        if self._store is not None:
            self._clerk = self._home_clerk if self._home is self._store else Clerk(self._store)
        self._here = json.dumps({"operation": f"{what} of {of}" if of else what, **self._means})

        def come(store: Store) -> int:
            number = store.add(f"{self._place}/rounds/{self._rank}", 1)
            store.set(f"{self._place}/{number}/is/{self._rank}", self._here)
            return number

        self._base = f"{self._place}/{self._ask(come, home=True)}"
        self.opens = True

    def meet_round(self, what: str) -> None:
        """In no round, after a collective of two numbers that were not all equal: whether peers were in a round there.

        They wrote so before they entered, and can't have begun it since: the next collective needs this rank. If they
        were, this rank comes to their round, by the name `what`, and it ends for all of them. Returns if none was.
        """
        home = self._home
        if home is None:
            return

        def begun(store: Store) -> bool:
            number = store.add(f"{self._place}/rounds/{self._rank}", 0) + 1
            return any(store.check([f"{self._place}/{number}/is/{rank}"]) for rank in range(self._size))

        try:
            self._clerk = self._home_clerk = Clerk(home)
            met = self._ask(begun, home=True)
            self.close()
            if met:
                self.begin(what)
                self.opened(False)
        finally:
            self.close()

    @property
    def number(self) -> int:
        """Of what this rank is in; equal on all ranks if that is."""
        return digest(self._here)

    def compare(self, seconds: float) -> None:
        """Before the first collective of a caller's exchange: whether all ranks are in the same, over the same.

        What an exchange does with ranks that call something else, or call it elsewhere, is not known, so they wait for
        each other here. Whoever does not come is for the exchange's own deadline.
        """
        if self._home_clerk is None:
            return
        everybody = self._poll(lambda store: len(self._all_here(store)) == self._size, seconds, home=True)
        differ, here = self._differences(), self._ask(self._all_here, home=True).values()
        self.opens = False
        if not differ:
            return
        self._go_home()
        if everybody and len({one.get("exchange") for one in here}) == 1:
            self._write(f"{DIFFER}the {self._size} ranks differ: {differ}", None)
        else:  # who has no exchange waits in a collective of the group
            self._claim()
            self._write(self._text(differ), None)

    def opened(self, equal: bool) -> None:
        """All ranks have come, to the same or not."""
        self.opens = False
        if not equal:
            # Whoever is here wrote it before it entered; the others waste no more than this.
            everybody = self._poll(lambda store: len(self._all_here(store)) == self._size, ANSWER, home=True)
            text = f"the {self._size} ranks differ: {self._differences()}"
            # A rank in another collective of two numbers goes on to its next one by itself.
            self._write(DIFFER + text if everybody else text, None)

    def look_for_votes(self) -> None:
        """`look` while the first collective waits: with another vote group, or an exchange, it would for ever."""
        self.look()
        here = self._ask(self._all_here, home=True).values()
        if len(here) == self._size and len({(one["cpu_group"], one.get("exchange")) for one in here}) > 1:
            raise VotesDifferError

    def _all_here(self, store: Store) -> dict[int, dict[str, str]]:
        """What the ranks that have come are in."""
        keys = {rank: self._key(f"is/{rank}") for rank in range(self._size)}
        return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}

    def _differences(self) -> str:
        """In what the ranks that have come differ, in words; "" for nothing."""
        here, found = self._ask(self._all_here, home=True), []
        for field in dict.fromkeys(name for fields in here.values() for name in fields):
            ranks: dict[str, list[int]] = {}
            for rank, fields in here.items():
                ranks.setdefault(fields.get(field, "none"), []).append(rank)
            if len(ranks) < 2 and (self.opens or field != "operation" or len(here) == self._size):
                continue
            if field == "operation":
                parts = [f"{name_ranks(who)} {_are(who)} in {value}" for value, who in ranks.items()]
                found.append(f"{', '.join(parts)}; accepted is one operation on every rank")
            else:
                values = ", ".join(f"{value} on {name_ranks(who)}" for value, who in ranks.items())
                found.append(f"{field}: {values}; accepted is the same on every rank")
        missing = [rank for rank in range(self._size) if rank not in here]
        if missing and not self.opens:
            found.append(f"{name_ranks(missing)} {_are(missing)} in a collective outside of these, or gone")
        return "; ".join(found)

    def close(self) -> None:
        for clerk in (self._clerk, self._home_clerk):
            if clerk is not None:
                clerk.dismiss()
        self._clerk = self._home_clerk = None
        self.opens = False
        self._what = "a vote"

    def enter(self, name: str, seconds: float, bound: str, *, looks: bool) -> None:
        """This rank comes to the next stage, in which ranks that wait may look at the claim meanwhile, or can't."""
        moment("before", name, self._rank)
        self._stage, self._number = name, self._number + 1
        self._seconds, self._bound, self._looks, self._since = seconds, bound, looks, time.monotonic()
        if self._clerk is None:
            return
        number = str(self._number)

        def come(store: Store) -> bool:
            store.set(self._key(f"at/{self._rank}"), number)
            return bool(store.check([self._key("claim")]))

        if self._ask(come):
            self.obey()
        if self._number == 2 and not self._shared:
            self._check_shared()

    def _check_shared(self) -> None:
        """After the first stage: every rank wrote `at` before it, which shows in each store that the ranks share."""

        def seen(store: Store) -> list[int]:
            return [rank for rank in range(self._size) if self._stage_of(store, rank)]

        self._shared = self._poll(lambda store: len(seen(store)) == self._size, ANSWER)
        if self._shared:
            return
        mine = json.dumps(self._ask(seen))
        self._go_home()
        keys = [self._key(f"sees/{rank}") for rank in range(self._size)]
        self._ask(lambda store: store.set(keys[self._rank], mine))
        everybody = self._poll(lambda store: bool(store.check(keys)), 2 * ANSWER)
        told = self._ask(lambda store: {rank: store.get(key) for rank, key in enumerate(keys) if store.check([key])})
        sides: dict[bytes, list[int]] = {}
        for rank, ranks in told.items():
            sides.setdefault(ranks, []).append(rank)
        text = self._text(
            f"store= is not shared by the ranks: one on {', another on '.join(map(name_ranks, sides.values()))}; "
            "accepted is one in which every rank sees what the others write"
        )
        self._write(DIFFER + text if everybody else text, None)

    def _go_home(self) -> None:
        """The rest of the round goes over the group's own store."""
        if self._clerk is not None and self._clerk is not self._home_clerk:
            self._clerk.dismiss()
        self._clerk = self._home_clerk

    def meet(self) -> None:
        """Waits until all ranks have come to the present stage."""
        if self._clerk is None:
            return
        number, claimed = self._number, False

        def all_came(store: Store) -> bool:
            nonlocal claimed
            claimed = bool(store.check([self._key("claim")]))
            return claimed or all(self._stage_of(store, rank) >= number for rank in range(self._size))

        if not self._poll(all_came, self._seconds):
            self.give_up(Late())
        elif claimed:
            self.obey()

    def look(self) -> None:
        """While a collective waits."""
        if self._clerk is not None and self._ask(lambda store: bool(store.check([self._key("claim")]))):
            raise ClaimedError

    def obey(self) -> None:
        """Somebody gave up: says that this rank is alive and takes the verdict; returns if it is to go on after all."""

        def alive(store: Store) -> bool:
            store.set(self._key(f"alive/{self._rank}"), "1")
            return True

        self._ask(alive)
        # Twice what a rank takes that gives up, in case it was itself held up; if it is gone, this one takes over.
        if self._poll(lambda store: bool(store.check([self._key("verdict")])), 2 * ANSWER):
            self._take(self._ask(lambda store: store.get(self._key("verdict")).decode()), None)
        else:
            self.give_up(None)

    def give_up(self, error: Exception | None) -> None:
        """Finds out who is missing, and tries to end the round; returns if it is committed after all."""
        if self._error is not None:
            raise self._error
        if self._clerk is None:
            if isinstance(error, WaitEnded | CommunicationTimeoutError):
                self._over(f"{self._what} of {self._size} ranks: {self._stage}: {error}", error)
            if error is not None:
                raise error
            return
        differ = self._differences() if self.opens else ""
        if isinstance(error, VotesDifferError):
            self._claim()
            self._write(self._text(differ), error)
        late = isinstance(error, Late | PeerTimeoutError | TimeoutError) or (
            isinstance(error, CommunicationTimeoutError) and time.monotonic() > self._since + self._seconds
        )
        absent = self._absent() if late else []
        self._claim()
        silent: list[int] = []

        def all_answer(store: Store) -> bool:
            silent[:] = [r for r in range(self._size) if r not in absent and not store.check([self._key(f"alive/{r}")])]
            return not silent

        self._poll(all_answer, ANSWER)
        number = self._number
        came = self._ask(lambda store: [self._stage_of(store, rank) for rank in range(self._size)])
        never = [rank for rank in silent if came[rank] < number]
        here = [rank for rank in silent if came[rank] == number]  # whoever is further on may wait where it can't look
        finding = self._finding(late, absent, never, here, error)
        finding = f"{finding}; {differ}" if differ else finding
        self._write(finding, error, gone=[*absent, *silent])

    def _claim(self) -> None:
        def claim(store: Store) -> None:
            store.set(self._key("claim"), "1")
            store.set(self._key(f"alive/{self._rank}"), "1")

        self._ask(claim)

    def leave(self, error: BaseException) -> None:
        """An exception of this rank's own ends the round for everybody."""
        if self._error is not None or self._clerk is None:
            return
        why = describe(error) if isinstance(error, Exception) else type(error).__name__
        text = self._text(f"rank {self._rank} left it in {self._stage}: {why}")
        try:
            self._ask(lambda store: store.set(self._key("claim"), "1"))
            self._write(text, None)
        except CommunicationTimeoutError:
            pass  # its own exception is what this rank raises

    def settle(self, outcome: Exception | None) -> None:
        """This rank came through the last collective. Returns if all did, and nobody had given up before."""
        if self._clerk is None or self._error is not None:
            return
        self.enter("the commit", self._seconds, self._bound, looks=True)
        moment("inside", "the commit", self._rank)

        def done(store: Store) -> None:
            if store.add(self._key("done"), 1) == self._size:
                store.compare_set(self._key("verdict"), "", COMMIT)

        self._ask(done)
        claimed = False

        def decided(store: Store) -> bool:
            nonlocal claimed
            claimed = bool(store.check([self._key("claim")]))
            return claimed or bool(store.check([self._key("verdict")]))

        if not self._poll(decided, self._seconds):
            self.give_up(Late())
        elif claimed:
            self.obey()
        else:
            self._take(self._ask(lambda store: store.get(self._key("verdict")).decode()), outcome)
        moment("after", "the commit", self._rank)

    def raised(self, why: str, seconds: float, error: Exception) -> None:
        if self._clerk is None:
            # Nothing can be told to peers that may be waiting inside a collective for this rank.
            raise error
        number, claimed = self._number, False
        self._ask(lambda store: store.set(self._key(f"raised/{self._rank}"), f"{number} {why[:TEXT_CHARACTERS]}"))

        def passed(store: Store) -> bool:
            nonlocal claimed
            claimed = bool(store.check([self._key("claim")]))
            others = [rank for rank in range(self._size) if rank != self._rank]
            return claimed or all(
                self._stage_of(store, rank) > number or self._raised_in(store, rank) == number for rank in others
            )

        if not self._poll(passed, seconds):
            self.give_up(Late())
        elif claimed:
            self.obey()

    def peer_raised(self) -> bool:
        if self._clerk is None:
            return False
        number = self._number
        return self._ask(
            lambda store: any(
                self._raised_in(store, rank) == number for rank in range(self._size) if rank != self._rank
            )
        )

    def look_around(self) -> None:
        if self._clerk is not None:
            self.look()
        elif self._store is not None and self._base:
            clerk = Clerk(self._store)
            try:
                failed = clerk.ask(lambda store: bool(store.check([self._key("failed")])))
            except StoreLostError:  # then the collective's own deadline is all there is
                return
            finally:
                clerk.dismiss()
            if failed:
                raise WaitingEndedError("a peer says that its collective failed")

    def roll_call(self) -> tuple[int, ...]:
        if self._store is None or self._clerk is not None or not self._base:
            return ()
        self._clerk = Clerk(self._store)
        missing: list[int] = []

        def answered(store: Store) -> bool:
            missing[:] = [rank for rank in range(self._size) if not store.check([self._key(f"failed/{rank}")])]
            return not missing

        def failed(store: Store) -> None:
            store.set(self._key(f"failed/{self._rank}"), "1")
            store.set(self._key("failed"), "1")

        try:
            self._clerk.ask(failed)
            self._poll(answered, ANSWER)
        except (StoreLostError, CommunicationTimeoutError):
            return ()
        finally:
            self.close()
        return tuple(missing)

    # The keys.

    @property
    def _place(self) -> str:
        """Before the numbers of the rounds. A store that serves several groups has a place for each."""
        return "/".join(["k3comm", *(group.group_name for group in self._groups[:1])])

    def _key(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _stage_of(self, store: Store, rank: int) -> int:
        key = self._key(f"at/{rank}")
        return int(store.get(key)) if store.check([key]) else 0

    def _raised_in(self, store: Store, rank: int) -> int:
        key = self._key(f"raised/{rank}")
        return int(store.get(key).split(b" ", 1)[0]) if store.check([key]) else 0

    def _absent(self) -> list[int]:
        number = self._number
        return self._ask(lambda store: [r for r in range(self._size) if self._stage_of(store, r) < number])

    def _ask(self, question: Callable[[Store], T], *, home: bool = False) -> T:
        clerk = self._home_clerk if home else self._clerk
        assert clerk is not None
        try:
            return clerk.ask(question)
        except StoreLostError as error:
            if error.stopped:
                self._over(
                    self._text(f"rank {self._rank} was itself stopped, so what the others did meanwhile is not known"),
                    error,
                )
            self._over(
                self._text(
                    "the store that watches over it is lost: the process that hosts it (often rank 0's, or the "
                    "launcher) is gone or stopped, so no rank can be named"
                ),
                error,
            )

    def _poll(self, question: Callable[[Store], bool], seconds: float, *, home: bool = False) -> bool:
        """Asks until the answer is yes, at growing intervals; whether it was within so many seconds."""
        limit, pause = time.monotonic() + seconds, 0.0002
        while not self._ask(question, home=home):
            left = limit - time.monotonic()
            if left <= 0:
                # Once more: this process may have been stopped between its look and the clock.
                return self._ask(question, home=home)
            time.sleep(min(pause, left))
            pause = min(2 * pause, POLL)
        return True

    # The end.

    def _text(self, finding: str) -> str:
        return f"{self._what} of {self._size} ranks: {finding}"

    def _finding(
        self, late: bool, absent: list[int], never: list[int], silent: list[int], error: Exception | None
    ) -> str:
        """What is known, in words. `absent` did not come in time, `never` neither came nor answers, `silent` came."""
        stage, bound = f"{self._stage} (stage {self._number})", self._bound
        found = []
        if absent:
            found.append(f"{name_ranks(absent)} did not come to {stage} within {bound}")
        if never:
            found.append(f"{name_ranks(never)} did not come to {stage} and can't be reached; the limit was {bound}")
        if silent:
            verb = "does not answer" if len(silent) == 1 else "do not answer"
            why = "killed or stopped" if self._looks else "killed, stopped, or waiting there still"
            found.append(f"{name_ranks(silent)} came to {stage} and {verb}: {why}; the limit was {bound}")
        if not found:
            end = f"did not finish within {bound}" if late else f"failed; the limit was {bound}"
            found.append(f"{stage} {end}, though all ranks came to it")
        if error is not None and not found[0].startswith("rank") and str(error):
            found.append(f"on rank {self._rank}: {describe(error)}")
        found += [f"rank {rank} had raised there: {why}" for rank, why in self._reasons()]
        return self._text("; ".join(found))

    def _reasons(self) -> list[tuple[int, str]]:
        def collect(store: Store) -> list[tuple[int, str]]:
            return [
                (rank, store.get(self._key(f"raised/{rank}")).split(b" ", 1)[1].decode(errors="replace"))
                for rank in range(self._size)
                if self._raised_in(store, rank) == self._number
            ]

        return self._ask(collect)

    def _write(self, text: str, error: Exception | None, gone: Sequence[int] = ()) -> None:
        """Tries to make a text the verdict; takes whatever it is. `gone`: ranks that won't read it."""
        text = text[:TEXT_CHARACTERS].encode(errors="replace").decode()

        def write(store: Store) -> str:
            store.set(self._key("gone"), json.dumps(list(gone)))
            return store.compare_set(self._key("verdict"), "", text).decode()

        self._take(self._ask(write), error)

    def _take(self, verdict: str, cause: Exception | None) -> None:
        if verdict == COMMIT:
            return
        self._linger()
        if verdict.startswith(DIFFER):
            self._error = NegotiationError(verdict.removeprefix(DIFFER))
            raise self._error from cause
        self._over(verdict, cause)

    def _linger(self) -> None:
        """Stays until the others have read the verdict too: this process may host the store."""
        if self._clerk is None:
            return
        limit, pause = time.monotonic() + LINGER, 0.001

        def read(store: Store) -> set[int]:
            store.set(self._key(f"read/{self._rank}"), "1")
            return set(json.loads(store.get(self._key("gone"))) if store.check([self._key("gone")]) else ())

        with suppress(StoreLostError):
            gone = self._clerk.ask(read)
            keys = [self._key(f"read/{rank}") for rank in range(self._size) if rank not in gone]
            while not self._clerk.ask(lambda store: bool(store.check(keys))) and time.monotonic() < limit:
                time.sleep(pause)
                pause = min(2 * pause, POLL)

    def _over(self, text: str, cause: BaseException | None) -> NoReturn:
        self._error = CommunicationTimeoutError(text)
        for group in self._groups:
            _ended[group] = text
        raise self._error from cause


def moment(when: str, stage: str, rank: int, /) -> None:
    """Called "before" a rank comes to a stage, "inside" (it has come, and enters now) and "after" it. Does nothing.

    `k3comm.testing.fault_at` puts faults here.
    """
