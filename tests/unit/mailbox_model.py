"""A model of the mailbox protocols that visits every interleaving: does any run lose, mix or repeat a word, or hang?

Each rank runs an endless stream of kernels; a call of the host tail is one kernel too. A kernel is a partial order of
steps, a step touches one word and is visible to all at once, and a run is any interleaving of all ranks' steps that
keeps the partial orders: stores to different peers and rows land in any order. The search goes through every state,
breadth first, so that a counterexample is a shortest one.

- Values: a word holds the number of the call whose data it is, 0 if it is empty. A lost, wrong or mixed value shows.
- Waiting: a step runs after the steps in its `after`, and after every earlier kernel of its rank is complete, which is
  stream order, or griddepcontrol.wait; an `early` step runs as soon as its kernel has started.
- Starting: a kernel starts when the one before is complete; with programmatic dependent launch (PDL), when that one has
  reached its trigger.
- Completion: all steps are done but the `posted` ones, which land at any later time. Publications are posted: no proof
  needs a store to a peer to have landed when its kernel ends. Clearing is not: the proofs need that.
- Weak clears: unless something orders them a clear is a store that peers' stores may overtake, long after its own rank
  has gone on and published again. It is posted then, too. A step that `covers` calls, what a fence or a release comes
  before, lands only after the clears of all of them. The rank itself does not see what it has cleared: all that it does
  comes after it, by its completion word or the order of its kernels.
- For ever: call numbers are kept relative to the slowest rank, by subtracting whole periods of the schedule. What is
  older than a period stays old and keeps its tag. So "holds" means for any number of calls.
- Reduced: where a step in `eager` can run it is the only one that does. That is right for steps that stay possible, and
  hinder and hide nothing: waits for what only grows or only this rank empties, and stores that break most if they land
  at once. When clears take effect stays open. A counterexample need not be a shortest one then.
- Joined: the polls, or the clears, of a kernel as one step. No failure is lost where nothing waits for one of them
  alone, since one that ran before a harmful store could as well have run with the last.

Not in the model: caches, and any reordering of accesses to different words beyond `posted`, so no fence or acquire on
the side of the reader; time and deadlines.
A rank publishes to itself only with `own`. What it does with the data after a poll needs no step: peers write into
empty words only, which is checked, and nobody but the rank itself empties them.

`mailbox`, `tail`, `push` and `split` build the protocols, right ones and wrong ones, by their arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, reduce
from itertools import accumulate, count, groupby, product
from math import lcm
from operator import or_
from typing import Literal

import attrs

Schedule = tuple[int, ...]
"""Rows of each call, over and over: call n has schedule[n % len(schedule)]."""

Trigger = Literal["top", "wait", "polls", "end"] | None
"""Where a kernel lets the next one start: before its own wait, right after it, after its polls, after everything."""

Run = Callable[[bytes], "bytes | Broken | None"]
"""What a step does to the memory: the new memory, None while it has to wait, or what it breaks."""

Local = tuple[int, ...]
"""Where a rank is: the first kernel that is not over, then the steps done (bits) of it and of those after it."""

State = tuple[bytes, tuple[Local, ...]]
"""The memory, and where each rank is."""


@attrs.frozen
class Broken:
    """A property that a step breaks, and the number in the word that it found."""

    kind: str
    found: int


@attrs.frozen(eq=False)
class Step:
    """`bit` is its own, `after` the bits of the steps of this kernel that come before it.

    What is `covered` in all kernels of its rank with a number below `covers` comes before it as well.
    """

    text: str
    run: Run
    bit: int
    after: int
    early: bool
    covers: int


@attrs.frozen
class Event:
    """A step of a run, or one that is blocked."""

    rank: int
    call: int
    text: str


@attrs.frozen
class Verdict:
    """What a search found.

    Attributes:
        kind: "holds", "deadlock", or the property that is broken.
        states: how many the search has seen.
        trace: a shortest run up to and with the step that breaks the property.
        stuck: in a deadlock, every step that waits.
        gap: how many calls the word that was found is newer (or, negative, older) than the call that meets it, None if
            that word is empty; in a deadlock how many calls the ranks are apart.
    """

    kind: str
    states: int
    trace: tuple[Event, ...] = ()
    stuck: tuple[Event, ...] = ()
    gap: int | None = None

    def __str__(self) -> str:
        lines = [f"{self.kind} ({self.states:,} states, {len(self.trace)} steps, gap {self.gap})"]
        for events, note in (self.trace, ""), (self.stuck, " for ever blocked:"):
            for (rank, call), group in groupby(events, key=lambda event: (event.rank, event.call)):
                lines.append(f"  rank {rank}, call {call}:{note} {'; '.join(event.text for event in group)}")
        return "\n".join(lines)


class Kernel:
    """The steps of one kernel, whose data has the number n.

    It is complete with the steps in `must`, and lets the next one start after those in `trigger_after`. Those in
    `covered` come before a later step that covers this kernel; those in `eager` a reduced search takes at once.
    """

    def __init__(self, n: int, trigger: Trigger) -> None:
        self.steps: list[Step] = []
        self.must = self.trigger_after = self.covered = self.eager = 0
        self.n, self.trigger = n, trigger

    def step(
        self, text: str, run: Run, after: int = 0, *, early: bool = False, posted: bool = False, covers: int = 0
    ) -> int:
        """Adds a step and returns its bit."""
        bit = 1 << len(self.steps)
        self.steps.append(Step(text, run, bit, after, early, covers))
        self.must |= 0 if posted else bit
        return bit

    def group(
        self,
        steps: Sequence[tuple[str, Run, int]],
        joined: str | None = None,
        *,
        early: bool = False,
        posted: bool = False,
    ) -> int:
        """Adds (text, run, after) steps, or one of the name `joined` that does them all; returns their bits."""
        if joined and steps:
            steps = [(joined, both(*(run for _, run, _ in steps)), reduce(or_, (after for *_, after in steps)))]
        return sum(self.step(text, run, after, early=early, posted=posted) for text, run, after in steps)

    def place_trigger(self, polls: int) -> None:
        """Once all steps are there: the trigger after them or after the `polls`, if that is where it goes."""
        self.trigger_after = {"polls": polls, "end": self.must}.get(self.trigger or "", 0)


@attrs.frozen(eq=False)
class Move:
    """A step that a rank may take next, of which kernel, where the rank is then, and whether it is an eager one."""

    step: Step
    number: int
    local: Local
    eager: bool


class Model:
    """The kernels of all ranks. A search ends only if no rank can run on for ever without the others.

    Args:
        ranks: how many.
        period: kernel(rank, number) depends on the number only modulo this, but for the values it writes.
        memory: the words at the start; the first kernel has number period + 1.
        kernel: builds a kernel.
        launches: kernels a call; a call's data carries the number of its first kernel.
        in_flight: kernels of one rank that run at once, at most.
        weak: a wait covers the kernel before, and those before that one only so far as it has waited itself.
    """

    def __init__(
        self,
        ranks: int,
        period: int,
        memory: Sequence[int],
        kernel: Callable[[int, int], Kernel],
        *,
        launches: int = 1,
        in_flight: int = 3,
        weak: bool = False,
    ) -> None:
        self.ranks, self.period, self.memory = ranks, period, bytes(memory)
        self.launches, self.in_flight, self.weak = launches, in_flight, weak
        self.kernel = cache(kernel)
        self.moves = cache(self._moves)
        self._older = bytes(v if v <= period else v - period for v in range(256))

    def _moves(self, rank: int, local: Local) -> tuple[Move, ...]:
        """Every step that the partial orders allow a rank, whether or not it has to wait for a word."""
        first, *masks = local
        found: list[Move] = []
        complete, running = True, 0  # all kernels before this one; how many of them are not
        reached = first  # all that is covered in kernels below this number is done
        for j in count():
            kernel, mask = self.kernel(rank, first + j), masks[j] if j < len(masks) else 0
            for step in kernel.steps:
                ready = not step.after & ~mask and (complete or step.early) and step.covers <= reached
                if ready and not mask & step.bit:
                    after = self._after(rank, local, j, step.bit)
                    found.append(Move(step, first + j, after, bool(kernel.eager & step.bit)))
            reached += reached == first + j and not kernel.covered & ~mask
            waited, never_waits = complete, self.weak and all(step.early for step in kernel.steps)
            complete = (complete or never_waits) and not kernel.must & ~mask
            if not complete:
                running += 1
                released = (waited or kernel.trigger == "top") and not kernel.trigger_after & ~mask
                if not (kernel.trigger and released) or running == self.in_flight:
                    return tuple(found)
        raise AssertionError

    def _after(self, rank: int, local: Local, j: int, bit: int) -> Local:
        first, *masks = local
        masks += [0] * (j + 1 - len(masks))
        masks[j] |= bit
        while masks and masks[0] == (1 << len(self.kernel(rank, first).steps)) - 1:
            first, masks = first + 1, masks[1:]
        return (first, *masks)

    def _successors(self, state: State) -> Iterator[tuple[int, Move, State | Broken | None]]:
        """Every move with what comes of it, or an eager one; a period is subtracted once every rank is past two."""
        memory, places = state
        moves = [(rank, move, move.step.run(memory)) for rank, at in enumerate(places) for move in self.moves(rank, at)]
        for rank, move, new in next(([one] for one in moves if one[1].eager and one[2] is not None), moves):
            if isinstance(new, bytes):
                after = (*places[:rank], move.local, *places[rank + 1 :])
                if move.local[0] > 2 * self.period and all(one[0] > 2 * self.period for one in after):
                    new = new.translate(self._older)
                    after = tuple((one[0] - self.period, *one[1:]) for one in after)
                yield rank, move, (new, after)
            else:
                yield rank, move, new

    def search(self) -> Verdict:
        """Goes through all states, or up to the first that breaks a property or in which nothing can move."""
        start: State = (self.memory, ((self.period + 1,),) * self.ranks)
        parents: dict[State, State] = {start: start}
        queue = deque([start])
        while queue:
            state = queue.popleft()
            free = False
            for rank, move, new in self._successors(state):
                if isinstance(new, Broken):
                    trace = (*self._trace(parents, state), self._event(rank, move))
                    gap = self._call(new.found) - trace[-1].call if new.found else None
                    return Verdict(new.kind, len(parents), trace, gap=gap)
                if new is not None:
                    free = True
                    if new not in parents:
                        parents[new] = state
                        queue.append(new)
            if not free:
                stuck = tuple(self._event(rank, move) for rank, move, _ in self._successors(state))
                calls = [event.call for event in stuck]
                apart = max(calls) - min(calls)
                return Verdict("deadlock", len(parents), self._trace(parents, state), stuck, apart)
        return Verdict("holds", len(parents))

    def _trace(self, parents: dict[State, State], state: State) -> tuple[Event, ...]:
        events = []
        while (parent := parents[state]) is not state:
            rank, move = next((rank, move) for rank, move, new in self._successors(parent) if new == state)
            events.append(self._event(rank, move))
            state = parent
        return tuple(events[::-1])

    def _event(self, rank: int, move: Move) -> Event:
        return Event(rank, self._call(self.kernel(rank, move.number).n), move.step.text)

    def _call(self, n: int) -> int:
        """The call that data of the number n belongs to: the first is 1; less the periods that were subtracted."""
        return (n - 1 - self.period) // self.launches + 1


# What steps do


def on(cell: int, rule: Callable[[int], int | str | None]) -> Run:
    """A step on one word. rule(old) is the new word, or None to wait, or the property that this breaks."""

    def run(memory: bytes) -> bytes | Broken | None:
        old = memory[cell]
        new = rule(old)
        if isinstance(new, int):
            return memory if new == old else memory[:cell] + bytes((new,)) + memory[cell + 1 :]
        return new if new is None else Broken(new, old)

    return run


def both(*runs: Run) -> Run:
    """Several steps as one; it waits if any has to, and breaks what any breaks."""

    def run(memory: bytes) -> bytes | Broken | None:
        for one in runs:
            new = one(memory)
            if not isinstance(new, bytes):
                return new
            memory = new
        return memory

    return run


def publish(cell: int, value: int) -> Run:
    """Stores a word, which must be empty."""
    return on(cell, lambda old: "not empty" if old else value)


def store(cell: int, value: int) -> Run:
    """Stores a word, whatever it was."""
    return on(cell, lambda _: value)


def poll(cell: int, value: int, *, test: bool = True, cleared: int = 0) -> Run:
    """Waits until a word is not empty; it must then be the awaited one. Without `test` it is taken as it is.

    A word of `cleared` or less is empty to this rank, which has cleared it, whether or not that has taken effect.
    """
    return on(cell, lambda old: old if old == value else None if test and old <= cleared else "wrong data")


def match(cell: int, value: int, tag: Callable[[int], int], want: int) -> Run:
    """Waits until a word has the tag that is wanted; it must then be the awaited one."""
    return on(cell, lambda old: None if tag(old) != want else old if old == value else "stale tag")


def wipe(cell: int, newest: int) -> Run:
    """Empties a word, which must not be newer than `newest`."""
    return on(cell, lambda old: "lost data" if old > newest else 0)


def read(cell: int, value: int) -> Run:
    """Reads a counter, which must stand at `value`."""
    return on(cell, lambda old: old if old == value else "wrong count")


def await_value(cell: int, value: int) -> Run:
    """Waits until a word has a value."""
    return on(cell, lambda old: old if old == value else None)


def raise_to(cell: int, value: int) -> Run:
    """Stores a count. One that a later store of its writer has overtaken changes nothing: a word keeps their order."""
    return on(cell, lambda old: max(old, value))


def await_count(cell: int, value: int) -> Run:
    """Waits until a count has come to `value`."""
    return on(cell, lambda old: old if old >= value else None)


# The protocols


def mailbox(
    *,
    W: int = 2,
    R: int = 3,
    clear: Literal["lazy", "late", "first", "eager", "next"] = "lazy",
    m: Schedule = (2,),
    M: tuple[Schedule, ...] = (),
    own: bool = False,
    joined: bool = False,
    trigger: Trigger = None,
    early: bool = False,
    wrap: int = 0,
    counter: Literal["", "arrived", "own", "first", "early", "own live"] = "",
    skip: Literal["", "device", "host"] = "",
    fault: Literal["", "this m", "one word", "no barrier"] = "",
    order: tuple[Schedule, ...] = (),
) -> Model:
    """The all-reduce mailbox alone, of W ranks and R regions: publish to every peer, poll every peer, clear.

    Args:
        clear: "lazy": call n clears the region of call n-1. "late": so, but that may land after its kernel's end.
            "first": so, but before it publishes. "eager": each word right after it was polled. "next": the region of
            call n+1, after the polls.
        m, M: rows of a call; M[rank] where ranks differ.
        own: a rank publishes to itself too, as multicast and the host tail do.
        joined: see the module.
        trigger: with PDL.
        early: publishes before the wait.
        wrap: the region is (n mod wrap) mod R, as with a call number that wraps.
        counter: each row's CTA reads the call number from memory. CTA 0 advances it once all have "arrived", or once it
            has read it itself ("first"); or it is read before the wait ("early"). "own": each CTA has its own cell and
            advances it, all of them in every call; "own live": so, but only the CTAs of live rows run.
        skip: the last rank misses call 3 and goes on by its own "device" count or by the "host" count.
        fault: "this m": clears as many rows as this call has. "one word": tests row 0 only. "no barrier": a rank may
            fill its words with the sentinel when a peer publishes already.
        order: one resident CTA a rank takes its rows in this order, and publishes one when it has polled the last.
    """
    M = M or (m,) * W
    rows = max(map(max, M))
    period = lcm(R, *map(len, M), wrap or 1) * (2 if skip else 1)
    counters = W * R * W * rows

    def kernel(r: int, number: int) -> Kernel:
        n = number + (skip != "" and r == W - 1 and number >= period + 3)
        own_count = number if skip == "device" else n
        k = Kernel(n, trigger)
        live, past = (M[r][c % len(M[r])] for c in (n, n - (fault != "this m")))
        peers = [p for p in range(W) if own or p != r]
        ready = [0] * rows  # what the steps of each row come after
        last = polled = 0
        polls: list[tuple[str, Run, int]] = []

        def at(owner: int, source: int, f: int, back: int = 0) -> int:
            region = (own_count - back) % (wrap or period) % R
            return ((owner * R + region) * W + source) * rows + f

        def clears(number: int, back: int, newest: int) -> int:
            cells = [(f"row {f} of rank {p}", at(r, p, f, back), ready[f]) for f in range(number) for p in peers]
            steps = [(f"clears {word}", wipe(cell, newest), after) for word, cell, after in cells]
            return k.group(steps, "clears" if joined else None, posted=clear == "late")

        if counter:
            apart, ctas = counter.startswith("own"), live if counter == "own live" else rows
            cells = [counters + r * rows + apart * f for f in range(ctas)]
            ready = [k.step(f"CTA {f} reads", read(cells[f], n), early=counter == "early") for f in range(ctas)]
            for f, after in enumerate(ready if apart else ready[:1] if counter == "first" else [sum(ready)]):
                k.step(f"CTA {f} advances the counter", store(cells[f], n + 1), after)
            ready += [0] * (rows - ctas)
        if fault == "no barrier" and n == period + 1:
            ready = [clears(rows, 0, 0)] * rows
        if clear == "first":
            ready = [clears(past, 1, n - 1)] * rows
        for f in order[r] if order else range(live):
            words = [(f"row {f} of rank {p}", at(r, p, f)) for p in peers]
            test = fault != "one word" or f == 0
            takes = [(f"polls {word}", poll(cell, n, test=test), ready[f]) for word, cell in words]
            for p in peers:
                text, run = f"publishes row {f} to rank {p}", publish(at(p, r, f), n)
                k.step(text, run, ready[f] | last, early=early, posted=True)
            if order:
                last |= k.group(takes)
            elif clear == "eager" and not joined:
                for (word, cell), take in zip(words, takes, strict=True):
                    polled |= (bit := k.step(*take))
                    k.step(f"clears {word}", wipe(cell, n), bit)
            else:
                polls += takes + [("", wipe(cell, n), 0) for _, cell in words if clear == "eager"]
        polled |= k.group(polls, "polls" if joined or fault == "one word" else None)
        if clear in ("lazy", "late"):
            clears(past, 1, n - 1)
        if clear == "next":
            ready = [polled] * rows
            clears(rows, -1, n + 1 - R)
        k.place_trigger(polled)
        return k

    return Model(W, period, [0] * counters + [period + 1] * (W * rows if counter else 0), kernel)


def tail(
    *,
    W: int = 2,
    R: int = 3,
    clear: Literal["lazy", "eager"] = "lazy",
    depth: int = 1,
    launches: str = "r p g",
    m: Schedule = (1,),
    own: bool = False,
    joined: bool = False,
    trigger: Trigger = None,
    early: Literal["", "reduce", "gather"] = "",
    late: bool = False,
    in_flight: int = 3,
    weak: bool = False,
    word: Literal["", "publishes", "clears", "all"] = "",
    taken_at: Literal["start", "early", "end"] = "start",
    visible: Literal["at once", "any time", "fence", "credit"] = "at once",
    fault: Literal["", "sent early", "relaxed", "not awaited", "one less", "exact", "noted early"] = "",
    reduced: bool = False,
) -> Model:
    """The whole tail, layer after layer: all-reduce mailbox, projection, gather mailbox.

    Args:
        R, clear: regions of the all-reduce mailbox, cleared as in `mailbox`.
        depth: regions of the gather mailbox, whose one reader re-arms word by word.
        launches: the kernels of a layer: reduce, project, gather. "rpg": all in one, as on the host. x: a kernel that
            is not ours and never waits. "pg": gathers with no all-reduce in between.
        m, own, joined: as in `mailbox`.
        trigger: of every kernel. Unless it is "end" the gather re-arms after it has released its dependents.
        early: before the wait, "reduce" publishes its partials, or "gather" polls and re-arms.
        late: a re-arm may land after its kernel's end.
        in_flight, weak: as in `Model`.
        word: each layer ends by writing a completion word; the next "publishes" once it has seen it, or does "all"
            then. "clears": once it has seen it it clears, but it publishes and polls before, as soon as it has seen, in
            another word, that the credits of the call before are in; it looks for that before its wait.
        taken_at: with a word, a layer takes its number in one step at the "start", which its trigger follows unless
            that is at the "top"; or it reads the number first and advances it at the "end". "early": in one step
            before its wait, and later kernels of the layer read it there; a trigger at the "top" follows that.
        visible: when clears and re-arms take effect. "at once"; or they are weak, see the module, and do so at "any
            time", or before what their rank publishes first in the next call, a "fence" being in between, or before its
            "credit". That is a word for each ordered pair of ranks, which needs a completion word. Beside its other
            work the last kernel of a call waits for the completion word of the call before, stores the call's number
            with release in its credit on every peer, and waits until it has one itself from every peer; the call is
            not complete before that. The first call finds the credits there. Not with `own`.
        reduced: see the module; only for clears that are weak, with neither `early` nor a mistake in the numbers.
        fault: of the credits. "sent early": without a look at the completion word, so it covers the calls before that
            one only. "relaxed": a store that covers nothing. "not awaited": a call may be complete without the peers'
            credits. "one less": those of the call before are enough. "exact": larger ones are not. "noted early": that
            the credits are in is noted when they have been sent.
    """
    stages = launches.split()
    rows, size = max(m), len(stages)
    gather = W * R * W * rows
    finish = gather + W * depth * W * rows
    weak_clears = visible != "at once"
    period = size * lcm(R, depth, len(m))

    def kernel(r: int, number: int) -> Kernel:
        layer, place = divmod(number - 1, size)
        n, stage = number - place, stages[place]
        live, past = (m[one % len(m)] for one in (layer, layer - 1))
        peers, others = [p for p in range(W) if own or p != r], [p for p in range(W) if p != r]
        words = [(p, f) for f in range(live) for p in peers]
        k = Kernel(n, trigger if stage != "x" else trigger and "top")
        taken = seen = summed = sent = polled = 0

        def partial(owner: int, source: int, f: int, back: int = 0) -> int:
            return ((owner * R + (layer - back) % R) * W + source) * rows + f

        def output(owner: int, source: int, f: int) -> int:
            return gather + ((owner * depth + layer % depth) * W + source) * rows + f

        def credit(owner: int, source: int) -> int:
            return finish + 2 * W + owner * W + source

        noted = finish + 2 * W + W * W + r  # where the rank notes that it has all credits

        def take(cell: int) -> Run:
            return poll(cell, n, cleared=n - size if weak_clears else 0)

        if stage == "x":
            k.step("is not ours", both(), early=True)
        done, cell = finish + r, finish + W + r
        if word and "r" in stage:
            stepped = store(cell, n if taken_at == "end" else n + size)
            taken = k.step("takes its number", both(read(cell, n), stepped), early=taken_at == "early")
            seen = k.step("sees the completion word", await_value(done, n - size), taken)
        elif taken_at == "early" and stage != "x":
            taken = k.step("reads its number", read(cell, n + size), early=True)
        ready, opened = seen if word == "all" else 0, seen
        if word == "clears" and "r" in stage:
            opened = ready = k.step("sees that it has all credits", await_count(noted, n - size), taken, early=True)
        if "r" in stage:
            for p, f in words:
                text, run = f"publishes partial row {f} to rank {p}", publish(partial(p, r, f), n)
                covers = n if visible == "fence" else 0
                k.step(text, run, opened, early=early == "reduce", posted=True, covers=covers)
            takes = [(f"polls partial row {f} of rank {p}", take(partial(r, p, f)), ready) for p, f in words]
            summed = polled = k.group(takes, "polls partials" if joined else None)
            back, newest, after, used = (1, n - size, ready, past) if clear == "lazy" else (0, n, summed, live)
            old = [(f"partial row {f} of rank {p}", partial(r, p, f, back)) for f in range(used) for p in peers]
            after |= seen if word == "clears" else 0
            clears = [(f"clears {text}", wipe(cell, newest), after) for text, cell in old]
            k.covered |= k.group(clears, "clears partials" if joined else None, posted=weak_clears)
        for p, f in words if "p" in stage else ():
            k.step(f"publishes output row {f} to rank {p}", publish(output(p, r, f), n), summed, posted=True)
        if "g" in stage:
            soon, posted = early == "gather", late or weak_clears
            takes = [(f"polls output row {f} of rank {p}", take(output(r, p, f)), ready) for p, f in words]
            wipes = [(f"re-arms output row {f} of rank {p}", wipe(output(r, p, f), n)) for p, f in words]
            if joined:
                polled |= (bit := k.group(takes, "polls outputs", early=soon))
                k.covered |= k.group([(*one, bit) for one in wipes], "re-arms outputs", early=soon, posted=posted)
            else:
                for one, rearm in zip(takes, wipes, strict=True):
                    polled |= (bit := k.step(*one, early=soon))
                    k.covered |= k.step(*rearm, bit, early=soon, posted=posted)
        if visible == "credit" and "g" in stage:
            # In a kernel or a CTA of its own this runs from the start on: it needs nothing that the kernel before does.
            soon, after, least = "r" not in stage or word == "clears", taken, n - size if fault == "one less" else n
            if fault != "sent early":
                after = (0 if soon else seen) or k.step(
                    "sees the completion word", await_value(done, n - size), taken, early=True
                )
            covers = {"sent early": n - size, "relaxed": 0}.get(fault, n)
            for p in others:
                text, run = f"sends its credit to rank {p}", raise_to(credit(p, r), n)
                sent |= k.step(text, run, after, early=soon, posted=True, covers=covers)
            wait = await_value if fault == "exact" else await_count
            waits = [(f"has the credit of rank {p}", wait(credit(r, p), least), after) for p in others]
            had = k.group(waits, "has all credits" if joined else None, early=soon, posted=fault == "not awaited")
            if word == "clears":
                had = sent if fault == "noted early" else had
                k.step("notes that it has all credits", raise_to(noted, n), had, early=soon)
        if word and "g" in stage:
            if taken_at == "end":
                k.step("advances the number", store(cell, n + size), k.must)
            k.step("writes the completion word", store(done, n), k.must)
        if reduced:
            k.eager = (1 << len(k.steps)) - 1 & ~k.covered
        k.covered |= sent
        k.place_trigger(polled)
        if (trigger, taken_at) in {("wait", "start"), ("top", "early")}:
            k.trigger_after = taken
        return k

    memory = [0] * finish
    if weak_clears and clear == "lazy":  # what the first call clears is what a call before it left, as ever after
        for owner, source, f in product(range(W), range(W), range(m[-1])):
            memory[((owner * R + R - 1) * W + source) * rows + f] = (period + 1 - size) * (owner != source)
    if word:
        credits = [(period + 1) * (owner != source) for owner in range(W) for source in range(W)]
        memory += [period + 1 - size] * W + [period + 1] * W + credits + [period + 1 - size] * W
    return Model(W, period, memory, kernel, launches=size, in_flight=in_flight, weak=weak)


def push(
    *,
    W: int = 2,
    slots: int = 2,
    m: Schedule = (2,),
    M: tuple[Schedule, ...] = (),
    T: int = 4,
    tags: Literal["row", "call"] = "row",
    write: Literal["live", "all", "late"] = "live",
    skip0: bool = False,
    slot_of: Literal["count", "tag"] = "count",
    joined: bool = False,
    trigger: Trigger = None,
    early: bool = False,
) -> Model:
    """The tagged alternative: words (payload, tag out of T) stored in every peer, polled locally, never cleared.

    Args:
        tags: the "row"'s own count of the calls that it takes part in, or the count of all "call"s.
        write: "live": the rows of this call. "all": every row on every call; those that no one polls have landed at
            their kernel's end, or with "late" land at any time.
        skip0: tag 0 is left out.
        slot_of: the slot is the "count" or the "tag", modulo slots.
        m, M, joined, trigger, early: as in `mailbox`.
    """
    M = M or (m,) * W
    rows = max(map(max, M))
    number = [[_numbers(M[r], f, tags) for f in range(rows)] for r in range(W)]

    def tag(c: int) -> int:
        return 1 + (c - 1) % (T - 1) if c and skip0 else c % T

    def kernel(r: int, n: int) -> Kernel:
        k = Kernel(n, trigger)
        live = M[r][n % len(M[r])]
        peers = [p for p in range(W) if p != r]

        def at(owner: int, source: int, f: int) -> int:
            c = number[r][f][n]
            return ((owner * slots + (c if slot_of == "count" else tag(c)) % slots) * W + source) * rows + f

        def take(p: int, f: int) -> Run:
            return match(at(r, p, f), n, lambda old: tag(number[p][f][old]), tag(number[r][f][n]))

        for f in range(live if write == "live" else rows):
            for p in peers:
                posted = f < live or write == "late"
                k.step(f"pushes row {f} to rank {p}", store(at(p, r, f), n), early=early, posted=posted)
        takes = [(f"polls row {f} of rank {p}", take(p, f), 0) for f in range(live) for p in peers]
        polled = k.group(takes, "polls" if joined else None)
        k.place_trigger(polled)
        return k

    series = [one for ranks in number for one in ranks]
    return Model(W, _period(M, series, lcm(T - skip0, slots)), [0] * (W * slots * W * rows), kernel)


def split(
    *,
    C: int = 2,
    words: Schedule = (2,),
    T: int = 4,
    slots: int = 1,
    tags: Literal["row", "call"] = "row",
    write: Literal["all", "used"] = "all",
    advance: Literal["seen", "once"] = "seen",
    trigger: Literal["top", "wait"] | None = None,
    early: Literal["", "epoch", "words"] = "",
) -> Model:
    """A row that C CTAs of one device share: tagged words in two phases, their call number (the epoch) in memory.

    Args:
        words: how many words each CTA needs of the others in a call, over and over; 0: the row takes no part.
        tags: as in `push`.
        write: "all" words on every call, or the "used" ones.
        advance: CTA 0 steps the epoch when it has "seen" a word of every other CTA, or at "once".
        early: before the wait it reads the "epoch", or writes the "words" (the epoch then being an argument).
    """
    most, number = max(words), _numbers(words, 0, tags)
    epoch = slots * C * (most + 1)

    def following(n: int) -> int:
        return next(c for c in count(n + 1) if words[c % len(words)])

    def kernel(_: int, n: int) -> Kernel:
        k = Kernel(n, trigger)
        used = words[n % len(words)]

        def at(c: int, j: int) -> int:
            return (number[n] % slots * C + c) * (most + 1) + j

        def take(d: int, j: int) -> Run:
            return match(at(d, j), n, lambda old: number[old] % T, number[n] % T)

        if not used:
            k.step("the row takes no part", both())
        for c in range(C if used else 0):
            ready = 0
            if early != "words":
                ready = k.step(f"CTA {c} reads the epoch", read(epoch, n), early=early == "epoch")
            for j in range(most if write == "all" else used):
                k.step(f"CTA {c} writes word {j}", store(at(c, j), n), ready, early=early == "words")
            others = [(j, d) for j in range(used) for d in range(C)]
            seen = [k.step(f"CTA {c} polls word {j} of CTA {d}", take(d, j), ready) for j, d in others]
            if c == 0:
                step = store(epoch, following(n))
                k.step("CTA 0 steps the epoch", step, sum(seen[1:C]) if advance == "seen" else ready)
            ready = k.step(f"CTA {c} writes its second word", store(at(c, most), n), sum(seen))
            k.group([(f"CTA {c} polls the second word of CTA {d}", take(d, most), ready) for d in range(C)])
        return k

    period = _period([words], [number], lcm(T, slots))
    return Model(1, period, [0] * epoch + [following(period)], kernel)


def _numbers(schedule: Schedule, row: int, tags: str) -> list[int]:
    """[n]: the number of call n by "call", or by "row": how many of the calls 1..n the row takes part in."""
    return [0, *accumulate(int(tags == "call" or schedule[n % len(schedule)] > row) for n in range(1, 256))]


def _period(schedules: Sequence[Schedule], series: Sequence[list[int]], modulus: int) -> int:
    """Whole schedules in which every one of the series grows by a multiple of the modulus."""
    length = lcm(*map(len, schedules))
    return next(p for p in range(length, 120, length) if not any(one[p] % modulus for one in series))
