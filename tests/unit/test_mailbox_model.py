"""The mailbox protocols are right in every interleaving, and each known mistake fails the way it is known to fail.

Two ranks decide nearly every case in seconds. The whole table, three ranks and the larger schedules included, is slow.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest
from mailbox_model import Kernel, Model, Trigger, both, mailbox, poll, publish, push, split, store, tail

Protocol = partial[Model]

EVERY_3 = (1, 1, 1, 2, 1, 2, 2, 2)
"""Rows of a call, over and over: a de Bruijn sequence, so every three calls in a row occur."""

EVERY_5 = tuple(1 + int(bit) for bit in "00000100011001010011101011011111")
"""The same for every five calls."""

ABSENT_5 = tuple(rows - 1 for rows in EVERY_5)
"""The same with a row that takes no part in half of the calls."""

ABSENT_3 = tuple(int(rows) for rows in "000100201101202102211121222")
"""Every three calls of 0, 1 or 2."""

SCHEDULES = {EVERY_3: "EVERY_3", EVERY_5: "EVERY_5", ABSENT_5: "ABSENT_5", ABSENT_3: "ABSENT_3"}

eager = partial(mailbox, R=2, clear="eager")
foreign = partial(tail, launches="rpg x", trigger="wait")
worded = partial(foreign, weak=True, word="all")
fenced = partial(tail, launches="r pg", word="all", visible="fence")
credited = partial(tail, launches="r pg", word="all", visible="credit", depth=2)
# The number is taken, and the next kernel let go, before the wait.
credited_early = partial(credited, trigger="top", taken_at="early")
# As the kernels do it: the credits of the call before open a call, and it clears once that one is done whole.
shipped = partial(credited_early, word="clears")


def title(protocol: Protocol) -> str:
    """`mailbox W=3 joined`: what a protocol is built with."""
    arguments = [
        key if value is True else f"{key}={SCHEDULES.get(value, value)}" for key, value in protocol.keywords.items()
    ]
    return " ".join([protocol.func.__name__, *arguments])


# What is right: what ships, and its kin

RIGHT = {
    # The host: a call is one function, a rank writes to itself too, polls and clears go over whole mailboxes.
    "tail on the host": partial(tail, launches="rpg", own=True, joined=True, m=EVERY_3),
    "tail, one kernel": partial(tail, launches="rpg", m=(2, 1)),
    "tail, two kernels": partial(tail, launches="rp g", m=(2,)),
    "tail, three kernels": partial(tail, m=EVERY_3),
    "tail, PDL from the top": partial(tail, trigger="top", m=(2,)),
    "tail, PDL before the re-arm": partial(tail, trigger="polls", m=(2,)),
    "tail, a foreign kernel that the wait reaches past": foreign,
    "tail, a completion word done whole": worded,
    # Weak clears.
    "tail, a fence before what is published": partial(fenced, trigger="wait"),
    "tail, a fence before what is published, PDL before the re-arm": partial(fenced, trigger="polls"),
    "tail, a fence before what is published, a foreign kernel": partial(
        fenced, launches="r pg x", trigger="wait", weak=True
    ),
    "tail, a fence before what is published, three ranks": partial(
        fenced, trigger="wait", W=3, joined=True, reduced=True
    ),
    "tail, credits": partial(credited, trigger="wait"),
    "tail, credits, PDL before the re-arm": partial(credited, trigger="polls", reduced=True),
    "tail, credits, PDL from the top, a foreign kernel": partial(
        credited_early, launches="r pg x", weak=True, reduced=True
    ),
    "tail, credits, three ranks": partial(credited, trigger="wait", W=3, joined=True, reduced=True),
    "tail, credits that open the next call": partial(shipped, reduced=True),
    "tail, credits that open the next call, PDL after the wait": partial(shipped, trigger="wait", reduced=True),
    "tail, credits that open the next call, a foreign kernel": partial(
        shipped, launches="r pg x", weak=True, reduced=True
    ),
    "tail, credits that open the next call, three ranks": partial(shipped, W=3, joined=True, reduced=True),
    "tail, one kernel, credits that open the next call": partial(shipped, launches="rpg", reduced=True),
    "tail, one kernel, credits that open the next call, a foreign kernel": partial(
        shipped, launches="rpg x", weak=True, reduced=True
    ),
    "three regions, lazy": partial(mailbox),
    "three regions, lazy, rows in any sequence": partial(mailbox, m=EVERY_3),
    "three regions, lazy, also to itself": partial(mailbox, own=True, joined=True),
    "three regions, lazy, PDL from the top": partial(mailbox, trigger="top"),
    "three regions, lazy, PDL before the clears": partial(mailbox, trigger="polls"),
    "three regions, lazy, a count that wraps at a multiple of 3": partial(mailbox, wrap=6),
    "three regions, lazy, a counter for all CTAs, PDL": partial(mailbox, counter="arrived", trigger="top"),
    "three regions, lazy, a cell for each CTA, PDL": partial(mailbox, counter="own", trigger="top", m=(1, 1, 2)),
    "two regions, lazy, all clears before any publication": partial(mailbox, R=2, clear="first"),
    "two regions, eager": eager,
    "two regions, eager, rows in any sequence": partial(eager, m=EVERY_3),
    "two regions, eager, PDL before the clears": partial(eager, trigger="polls"),
    "two regions, eager, parity survives the wrap": partial(eager, wrap=4),
    "gathers with nothing in between, depth 2": partial(tail, launches="pg", depth=2),
    "rows in the same order, one resident CTA": partial(mailbox, order=((0, 1), (0, 1))),
    "two tagged slots": partial(push, T=3),
    "two tagged slots, rows in any sequence": partial(push, m=EVERY_5),
    "two tagged slots, rows in any sequence, PDL from the top": partial(push, m=EVERY_5, trigger="top"),
    "two tagged slots, a common count, all rows written": partial(push, m=EVERY_5, tags="call", write="all"),
    "two tagged slots by count, tag 0 left out": partial(push, skip0=True),
    "split row, all words written": partial(split, words=EVERY_5),
    "split row, absent now and then": partial(split, words=ABSENT_5),
}


@pytest.mark.parametrize("protocol", RIGHT.values(), ids=RIGHT)
def test_right_protocols_hold(protocol: Protocol) -> None:
    verdict = protocol().search()
    assert verdict.kind == "holds", str(verdict)


# What is wrong, and how


@attrs.frozen
class Failure:
    """How a protocol fails: see `Verdict`; `step`, or one of several, begins the last step or each that is stuck."""

    protocol: Protocol
    kind: str
    steps: int
    gap: int | None
    step: str | tuple[str, ...]


WRONG = {
    # Too few regions: a peer that is one call ahead meets a region that is still in use.
    "two regions, lazy": Failure(partial(mailbox, R=2), "lost data", 8, +1, "clears row"),
    "two regions, lazy, on the strength of the chain": Failure(
        partial(tail, launches="rpg", R=2, m=(2,)), "lost data", 18, +1, "clears partial"
    ),
    "one region, eager": Failure(partial(mailbox, R=1, clear="eager"), "not empty", 8, -1, "publishes row"),
    "one region, eager, on the strength of the chain": Failure(
        partial(tail, launches="rpg", R=1, clear="eager"), "not empty", 9, -1, "publishes partial"
    ),
    "gathers with nothing in between, depth 1": Failure(
        partial(tail, launches="pg"), "not empty", 5, -1, "publishes output"
    ),
    # A fast peer has already published call n+1 there.
    "the region that comes next is cleared": Failure(partial(mailbox, clear="next"), "lost data", 12, +1, "clears row"),
    # It lands when the peer is in call n+2, which uses that region.
    "a clear performed late": Failure(partial(mailbox, clear="late"), "lost data", 14, +2, "clears row"),
    "a re-arm performed late": Failure(partial(tail, late=True), "not empty", 14, -1, "publishes output"),
    "a re-arm performed late, depth 2": Failure(
        partial(tail, late=True, depth=2), "not empty", 24, -2, "publishes output"
    ),
    # Weak clears that nothing bounds, or too late: a peer publishes into what is not empty yet.
    "no credits": Failure(partial(credited, visible="any time"), "not empty", 28, -3, "publishes partial"),
    "no fence": Failure(partial(fenced, visible="any time"), "not empty", 21, -1, "publishes output"),
    "a fence, two regions": Failure(partial(fenced, R=2), "not empty", 16, -2, "publishes partial"),
    "credits, two regions": Failure(partial(credited, R=2), "not empty", 16, -2, "publishes partial"),
    "credits, gather depth 1": Failure(partial(credited, depth=1), "not empty", 25, -1, "publishes output"),
    "a credit sent before the completion word is seen": Failure(
        partial(credited, fault="sent early"), "not empty", 32, -3, "publishes partial"
    ),
    "a credit sent without release": Failure(
        partial(credited, fault="relaxed"), "not empty", 36, -3, "publishes partial"
    ),
    "a credit that may come after the next publication": Failure(
        partial(credited, fault="not awaited"), "not empty", 31, -3, "publishes partial"
    ),
    "the credit of the call before is enough": Failure(
        partial(credited, fault="one less"), "not empty", 34, -3, "publishes partial"
    ),
    # The peer's next credit has overwritten it.
    "a credit awaited by equality": Failure(
        partial(credited, trigger="wait", fault="exact"), "deadlock", 28, 1, ("polls partial", "has the credit")
    ),
    # A row that only the larger call had is full when its region comes round.
    "this call's m": Failure(partial(mailbox, m=EVERY_3, fault="this m"), "not empty", 37, -3, "publishes row 1"),
    # The order of kernels means nothing to what runs before the wait.
    "published before the wait, lazy": Failure(
        partial(mailbox, early=True, trigger="wait"), "lost data", 8, +2, "clears row"
    ),
    "published before the wait, eager": Failure(
        partial(eager, early=True, trigger="wait"), "not empty", 8, -2, "publishes row"
    ),
    "published before the wait, tail": Failure(
        partial(tail, early="reduce", trigger="polls"), "not empty", 15, -1, "publishes output"
    ),
    "gathered before the wait, tail": Failure(
        partial(tail, early="gather", trigger="top", in_flight=4), "wrong data", 8, -1, "polls output"
    ),
    "three slots pushed before the wait": Failure(
        partial(push, m=(1,), T=60, early=True, trigger="wait", slots=3), "deadlock", 8, 2, "polls row"
    ),
    # Counters.
    "a counter read before the wait": Failure(
        partial(mailbox, counter="early", trigger="wait"), "wrong count", 1, -1, "CTA 0 reads"
    ),
    "a counter stepped when one CTA has read it": Failure(
        partial(mailbox, counter="first"), "wrong count", 3, +1, "CTA 1 reads"
    ),
    "cells that only live CTAs step": Failure(
        partial(mailbox, counter="own live", m=EVERY_3), "wrong count", 17, -2, "CTA 1 reads"
    ),
    "an epoch stepped at once": Failure(partial(split, advance="once"), "wrong count", 3, +1, "CTA 1 reads"),
    "an epoch read before the wait": Failure(
        partial(split, early="epoch", trigger="wait"), "wrong count", 1, -1, "CTA 0 reads"
    ),
    # Numbers 0 1 2 3 0 use the regions 0 1 2 0 0: one call finds the data of the last.
    "n mod 3 at the wrap": Failure(partial(mailbox, wrap=4), "wrong data", 31, -1, "polls row"),
    "n mod 2 at an odd wrap": Failure(partial(eager, wrap=5), "not empty", 44, -1, "publishes row"),
    # Not the same calls, rows or order everywhere.
    "a skipped call, counted on the device": Failure(
        partial(mailbox, skip="device"), "wrong data", 26, -1, "polls row"
    ),
    "a skipped call, counted on the host": Failure(partial(mailbox, skip="host"), "not empty", 19, -3, "publishes row"),
    "rows that differ between ranks": Failure(partial(mailbox, M=((2,), (2, 1))), "deadlock", 12, 1, "polls row"),
    "rows that differ between ranks, tagged": Failure(
        partial(push, M=((2,), (2, 1))), "stale tag", 4, -1, "polls row 1"
    ),
    "rows that differ between ranks, tagged by a common count": Failure(
        partial(push, M=((2,), (2, 1)), tags="call"), "deadlock", 7, 1, "polls row"
    ),
    "rows in different order, one resident CTA": Failure(
        partial(mailbox, order=((0, 1), (1, 0))), "deadlock", 8, 0, "polls row"
    ),
    # A rank wipes out what its peer has published in this very call.
    "no barrier after the fill": Failure(partial(mailbox, fault="no barrier"), "lost data", 4, 0, "clears row"),
    # The other word is still empty.
    "one word of two polled": Failure(partial(mailbox, fault="one word"), "wrong data", 2, None, "polls"),
    # A kernel that never waits, between two of ours.
    "a foreign kernel and no completion word": Failure(
        partial(foreign, weak=True), "lost data", 4, +2, "clears partial"
    ),
    "a completion word that gates the publish only": Failure(
        partial(worded, word="publishes"), "wrong data", 7, -1, "polls output"
    ),
    "a number advanced at the end": Failure(partial(worded, taken_at="end"), "wrong count", 2, -1, "takes its number"),
    "a number taken after the trigger": Failure(
        partial(worded, trigger="top"), "wrong count", 2, -1, "takes its number"
    ),
    # Tags: a peer one call ahead overwrites what was not read yet; or a stale word has the tag of the present call.
    "one tagged slot": Failure(partial(push, slots=1), "deadlock", 8, 1, "polls row"),
    "one tagged slot of a split row, written before the wait": Failure(
        partial(split, words=(1,), early="words", trigger="wait"), "deadlock", 4, 0, "CTA "
    ),
    "used words only, a common count": Failure(
        partial(push, m=EVERY_5, tags="call"), "stale tag", 35, -4, "polls row 1"
    ),
    "used words only, the others land late": Failure(
        partial(push, m=EVERY_5, tags="call", write="late"), "stale tag", 16, -4, "polls row 1"
    ),
    "used words only, split row": Failure(
        partial(split, words=EVERY_5, write="used"), "stale tag", 128, -4, "CTA 0 polls word 1"
    ),
    "a common count, split row absent now and then": Failure(
        partial(split, words=ABSENT_5, tags="call"), "stale tag", 24, -4, "CTA 0 polls word"
    ),
    "as many tags as slots": Failure(partial(push, T=2), "stale tag", 5, None, "polls row"),
    # 1 2 3 1: an odd number of tags, and the slot by the parity of the tag.
    "tag 0 left out": Failure(partial(push, skip0=True, slot_of="tag"), "deadlock", 24, 1, "polls row"),
}


@pytest.mark.parametrize("failure", WRONG.values(), ids=WRONG)
def test_known_mistakes_are_found(failure: Failure) -> None:
    verdict = failure.protocol().search()
    found = (verdict.kind, len(verdict.trace), verdict.gap)
    assert found == (failure.kind, failure.steps, failure.gap), str(verdict)
    last = verdict.stuck or verdict.trace[-1:]
    assert all(event.text.startswith(failure.step) for event in last), str(verdict)


@pytest.mark.parametrize("fault", ["any time", "R", "depth", "sent early", "relaxed", "not awaited", "one less"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_reduced_search_finds_what_is_wrong_with_credits(fault: str, ranks: int) -> None:
    wrong: dict[str, Any] = {"any time": {"visible": fault}, "R": {"R": 2}, "depth": {"depth": 1}}
    verdict = credited_early(W=ranks, joined=ranks > 2, reduced=True, **wrong.get(fault, {"fault": fault})).search()
    assert verdict.kind in {"not empty", "lost data"}, str(verdict)


@pytest.mark.parametrize("fault", ["R", "depth", "sent early", "relaxed", "noted early", "one less"])
def test_nor_does_it_miss_what_is_wrong_with_what_ships(fault: str) -> None:
    """With a kernel between that is not ours: without one "noted early" does no harm, the kernels' order does."""
    wrong: dict[str, Any] = {"R": {"R": 2}, "depth": {"depth": 1}}
    beside = partial(shipped, launches="r pg x", weak=True, reduced=True)
    verdict = beside(**wrong.get(fault, {"fault": fault})).search()
    assert verdict.kind in {"not empty", "lost data"}, str(verdict)


# Publishing before the wait: the fewest regions or slots that are enough, by the place of the trigger. No tail can
# afford them. At the top three kernels are in flight.

BEFORE_THE_WAIT = {
    "lazy": (partial(mailbox, m=(1,), early=True), "R", "lost data", {"top": 7, "wait": 5, "polls": 4, "end": 3}),
    "eager": (partial(eager, m=(1,), early=True), "R", "not empty", {"top": 6, "wait": 4, "polls": 3, "end": 2}),
    "tagged": (
        partial(push, m=(1,), T=60, early=True),
        "slots",
        "deadlock",
        {"top": 6, "wait": 4, "polls": 2, "end": 2},
    ),
}
FEWEST = {
    f"{name}, trigger at {trigger}": (
        partial(protocol, trigger=trigger, **{size: fewest}),
        partial(protocol, trigger=trigger, **{size: fewest - 1}),
        kind,
    )
    for name, (protocol, size, kind, by_trigger) in BEFORE_THE_WAIT.items()
    for trigger, fewest in by_trigger.items()
}


@pytest.mark.parametrize(("enough", "one_less", "kind"), FEWEST.values(), ids=FEWEST)
def test_fewest_regions_when_publishing_before_the_wait(enough: Protocol, one_less: Protocol, kind: str) -> None:
    verdict = enough().search()
    assert verdict.kind == "holds", str(verdict)
    verdict = one_less().search()
    assert verdict.kind == kind, str(verdict)
    last = verdict.stuck or verdict.trace[-1:]
    if kind == "lost data":  # a clear of the region before meets the next call that uses it
        assert verdict.gap == one_less.keywords["R"] - 1, str(verdict)
        assert last[0].text.startswith("clears"), str(verdict)
    elif kind == "not empty":  # a rank is a whole round ahead
        assert verdict.gap == -one_less.keywords["R"], str(verdict)
        assert last[0].text.startswith("publishes"), str(verdict)
    else:  # ... and has overwritten what was not read yet
        assert {event.text for event in last} == {"polls row 0 of rank 0", "polls row 0 of rank 1"}, str(verdict)


# The whole table

three: dict[str, Any] = {"W": 3, "joined": True}
HOLD = [
    *RIGHT.values(),
    *(enough for enough, _, _ in FEWEST.values()),
    partial(mailbox, m=(3,)),
    partial(mailbox, W=3, m=(1,)),
    partial(mailbox, **three),
    partial(mailbox, **three, m=EVERY_3),
    partial(mailbox, **three, trigger="top"),
    partial(mailbox, counter="own", trigger="top", m=EVERY_3),
    partial(eager, W=3, m=(1,)),
    partial(eager, **three),
    *(
        partial(tail, depth=depth, launches=launches, m=(2,))
        for depth in (1, 2)
        for launches in ("rpg", "rp g", "r pg", "r p g")
    ),
    partial(tail, launches="rpg", m=EVERY_3),
    partial(tail, W=3),
    partial(tail, **three, launches="rpg"),
    partial(tail, **three, launches="rpg", own=True),
    partial(tail, W=3, trigger="polls"),
    partial(tail, early="reduce", trigger="polls", depth=2),
    partial(tail, early="gather", trigger="wait"),
    *(partial(tail, R=1, clear="eager", launches=launches, m=(2,)) for launches in ("r pg", "r p g")),
    *(partial(tail, R=2, launches=launches, m=(2,)) for launches in ("r pg", "r p g")),
    partial(tail, trigger="polls", m=(2,), weak=True),
    partial(worded, in_flight=5),
    partial(worded, visible="fence"),
    partial(fenced, trigger="wait", W=3, joined=True),
    partial(fenced, trigger="wait", m=EVERY_3, reduced=True),
    partial(credited, trigger="polls"),
    partial(credited, launches="rpg"),
    partial(credited, launches="rpg", m=(2, 1), reduced=True),
    partial(credited, launches="r pg x", trigger="wait", weak=True),
    partial(credited_early, launches="r pg x", weak=True, in_flight=5, reduced=True),
    partial(credited, **three, trigger="polls", reduced=True),
    partial(credited_early, **three, reduced=True),
    partial(credited_early, **three, launches="r pg x", weak=True, reduced=True),
    partial(push, W=3, m=(1,)),
    partial(push, **three, m=EVERY_5),
    partial(push, **three, m=EVERY_5, trigger="top"),
    partial(split, words=EVERY_5, slots=2),
    partial(split, C=3, words=(1,)),
    partial(split, words=ABSENT_3, T=2),
    partial(split, words=ABSENT_3, T=3, slots=2),
    partial(split, words=ABSENT_3, trigger="top"),
    partial(split, words=(1,), early="words", trigger="wait", slots=2),
]
FAIL = [
    *((failure.protocol, failure.kind) for failure in WRONG.values()),
    *((one_less, kind) for _, one_less, kind in FEWEST.values()),
    (partial(mailbox, **three, R=2), "lost data"),
    (partial(mailbox, **three, R=1, clear="eager"), "not empty"),
    (partial(mailbox, **three, clear="next"), "lost data"),
    (partial(mailbox, **three, skip="device"), "wrong data"),
    (partial(tail, launches="rp g", R=1, clear="eager"), "not empty"),
    (partial(tail, launches="rp g", R=2, m=(2,)), "lost data"),
    (partial(push, slots=3, slot_of="tag"), "deadlock"),
    (partial(push, early=True, trigger="wait"), "deadlock"),
    (partial(split, words=EVERY_5, write="used", slots=2), "stale tag"),
    (partial(split, T=2, slots=2), "stale tag"),
]
TABLE = {title(protocol): (protocol, kind) for protocol, kind in [*((one, "holds") for one in HOLD), *FAIL]}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("protocol", "kind"), TABLE.values(), ids=TABLE)
def test_whole_table(protocol: Protocol, kind: str) -> None:
    verdict = protocol().search()
    assert verdict.kind == kind, str(verdict)


# The search itself


def free(model: Model, *places: int) -> set[tuple[int, str]]:
    """What a rank in these places may do next, as (kernel, step), the first kernel being 1."""
    local = (model.period + 1, *places)
    return {(move.number - model.period, move.step.text) for move in model.moves(0, local)}


def simple(trigger: Trigger, *, in_flight: int = 3) -> Model:
    """An early step (bit 1), a first one (2) that a second one (4) comes after, and a posted one (8)."""

    def kernel(_: int, n: int) -> Kernel:
        k = Kernel(n, trigger)
        k.step("early", both(), early=True)
        first = k.step("first", both())
        k.step("second", both(), first)
        k.step("posted", both(), posted=True)
        k.place_trigger(first)
        return k

    return Model(1, 1, [], kernel, in_flight=in_flight)


WAITING = {"early", "first", "posted"}
"""What may be done when the wait is over."""


def of(number: int, *texts: str) -> set[tuple[int, str]]:
    return {(number, text) for text in texts}


def test_a_step_comes_after_its_predecessors() -> None:
    assert free(simple(None)) == of(1, *WAITING)
    assert free(simple(None), 2) == of(1, "early", "second", "posted")


def test_without_pdl_a_kernel_starts_when_the_last_is_complete() -> None:
    assert free(simple(None), 6) == of(1, "early", "posted")
    assert free(simple(None), 7) == of(1, "posted") | of(2, *WAITING)  # what is posted lands at any later time


@pytest.mark.parametrize(
    ("trigger", "at_once", "after_first"),
    [("top", {2, 3}, {2, 3}), ("wait", {2}, {2}), ("polls", set(), {2}), ("end", set(), set())],
)
def test_with_pdl_a_kernel_starts_at_the_trigger(trigger: Trigger, at_once: set[int], after_first: set[int]) -> None:
    assert free(simple(trigger)) == of(1, *WAITING) | {(number, "early") for number in at_once}
    after = of(1, "early", "second", "posted") | {(number, "early") for number in after_first}
    assert free(simple(trigger), 2) == after


def test_kernels_in_flight() -> None:
    assert free(simple("top", in_flight=1)) == of(1, *WAITING)
    assert max(number for number, _ in free(simple("top", in_flight=5))) == 5


@pytest.mark.parametrize(("weak", "reached"), [(False, set()), (True, {3})])
def test_a_wait_reaches_past_a_kernel_that_never_waits_unless_weak(weak: bool, reached: set[int]) -> None:
    def kernel(_: int, n: int) -> Kernel:
        k = Kernel(n, "top")
        foreign = n % 2 == 1  # the second, as the first number is one more than the period
        k.step("foreign" if foreign else "ours", both(), early=foreign)
        return k

    model = Model(1, 1, [], kernel, weak=weak)
    assert {number for number, text in free(model, 0, 1) if text == "ours"} == {1} | reached


def test_a_step_comes_after_what_it_covers_in_the_kernels_before() -> None:
    def kernel(_: int, n: int) -> Kernel:
        k = Kernel(n, None)
        k.covered = k.step("clears", both(), posted=True)
        k.step("goes on", both())
        k.step("covers", both(), covers=n)
        return k

    model = Model(1, 1, [], kernel)
    assert free(model, 6) == of(1, "clears") | of(2, "clears", "goes on")
    assert free(model, 7) == of(2, "clears", "goes on", "covers")  # whatever its own kernel has cleared


def test_a_reduced_search_takes_an_eager_step_alone_unless_it_has_to_wait() -> None:
    def kernel(_: int, n: int) -> Kernel:
        k = Kernel(n, None)
        k.step("first", store(0, n))
        k.eager = k.step("waits", poll(0, n))
        k.step("other", both())
        return k

    model = Model(1, 1, [0], kernel)

    def moves(memory: int) -> list[str]:
        found = model._successors((bytes([memory]), ((2,),)))
        return [move.step.text for _, move, new in found if new is not None]

    assert moves(0) == ["first", "other"]
    assert moves(2) == ["waits"]


def test_a_search_sees_every_state() -> None:
    # One row, each word cleared as it is polled. Both ranks have taken k words: the next word of either has landed or
    # not, 4 states. One has taken k + 1, so the other has published that and is in call k + 1: of the first one's words
    # k + 1 and k + 2 each has landed or not, 4 states, and 4 the other way round. All that for either region.
    verdict = mailbox(R=2, clear="eager", m=(1,), joined=True).search()
    assert (verdict.kind, verdict.states) == ("holds", 2 * (4 + 4 + 4))


def test_a_counterexample_is_a_shortest_run() -> None:
    def kernel(r: int, n: int) -> Kernel:
        k = Kernel(n, None)
        sent = k.step("publishes", publish(1 - r, n))
        k.step("takes", poll(r, n, test=False), sent)
        return k

    verdict = Model(2, 1, [0, 0], kernel).search()
    assert str(verdict) == "wrong data (3 states, 2 steps, gap None)\n  rank 0, call 1: publishes; takes"


def test_a_deadlock_names_all_that_waits() -> None:
    def kernel(r: int, n: int) -> Kernel:
        k = Kernel(n, None)
        if r == 0:
            k.step("publishes", publish(1, n))
        k.step("takes", both(poll(r, n), store(r, 0)))
        return k

    verdict = Model(2, 1, [0, 0], kernel).search()
    assert str(verdict).splitlines() == [
        "deadlock (3 states, 2 steps, gap 1)",
        "  rank 0, call 1: publishes",
        "  rank 1, call 1: takes",
        "  rank 0, call 1: for ever blocked: takes",
        "  rank 1, call 2: for ever blocked: takes",
    ]
