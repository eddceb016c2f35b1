"""What the ranks do, call by call, and whether it is the same: the recorder's source, and `settings.check_uniform`.

A call that differs between ranks is wrong sums, a time-out, or with gloo the end of the process. The check compares
before any tier talks: one MIN of two numbers, the digest of the call and its negative, so that a difference shows on
every rank alike; only then follows a gather of the texts. It runs before the shortcut of m = 0, since a rank that
leaves there alone is the commonest difference of all. Ranks that are in `reserve`, `resume` or `negotiate` instead meet
it in a collective of the same length (rounds.py); then all raise with one text, and go on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from k3comm.buffers.symmetric import Exchange
from k3comm.errors import CommunicationTimeoutError, DivergenceError, NegotiationError
from k3comm.negotiate.decide import digest, name_ranks
from k3comm.negotiate.report import Report
from k3comm.record import COMPARED, CallRecord, Recorder, parse_call

if TYPE_CHECKING:
    from k3comm.negotiate.watch import WatchedExchange

TEXT_BYTES = 512
"""Bytes in which a rank says what its call is. Fixed, since the gather needs equally many on every rank."""


class CallObserver:
    """Sees every call of a communicator's handles before it talks. Calls of several threads take turns.

    Args:
        name: the communicator's, for errors.
        recorder: takes a line a call; None: nobody does.
        exchange: compares the calls of all ranks; None: nobody does.
        missing: after a time-out, the ranks that don't answer.
        meet_round: where calls differ, raises NegotiationError if peers are in no call; gets what this rank is in.
    """

    def __init__(
        self,
        name: str,
        recorder: Recorder | None,
        exchange: Exchange | None,
        missing: Callable[[], tuple[int, ...]] = tuple,
        meet_round: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._name = name
        self._missing = missing
        self._meet_round = meet_round
        self._recorder = recorder
        self._exchange = exchange
        self._number = 0
        # A number, its line and its comparison belong together: else a file's lines are out of order, and two
        # comparisons meet in one collective.
        self._turn = threading.Lock()

    def __call__(self, **fields: Any) -> None:
        """Numbers the call, records it and, but while a graph is captured, compares it. Collective if it compares.

        Raises:
            DivergenceError: the ranks' calls differ, or some make none and are in a collective method; on every rank
                that makes one, with the same text.
            CommunicationTimeoutError: a rank did not come.
        """
        with self._turn:
            self._see(CallRecord(call=self._number, **fields))

    def _see(self, call: CallRecord) -> None:
        self._number += 1
        if self._recorder is not None:
            self._recorder.write(call.line())
        if self._exchange is None or call.capture:
            return
        with self._naming(call):
            if is_equal(call, self._exchange):
                return
        try:
            self._meet_round(f"call {call.call} of {self._name} (check_uniform)")
        except NegotiationError as error:
            self._number -= 1  # the peers in the round have not counted it
            raise DivergenceError(str(error)) from error
        with self._naming(call):
            tell(self._name, call, self._exchange)

    @contextmanager
    def _naming(self, call: CallRecord) -> Iterator[None]:
        """A collective whose time-out names the ranks that are missing."""
        try:
            yield
        except CommunicationTimeoutError as error:
            who = self._missing()
            text = f"{name_ranks(who)} did not come, or can't answer" if who else "which rank did not come is not known"
            raise CommunicationTimeoutError(
                f"check_uniform, call {call.call} of {self._name}: {text}: {error}"
            ) from error

    def close(self) -> None:
        """Ends the record."""
        if self._recorder is not None:
            self._recorder.close()


def observer_for(report: Report, exchange: WatchedExchange) -> CallObserver | None:
    """What the settings ask for; None for nothing, the usual case, which then costs a call one comparison."""
    settings, recorder = report.settings, None
    if settings.record is not None:
        recorder = Recorder(settings.record, report.name, report.global_ranks[report.rank], header(report))
    compares = settings.check_uniform and report.decision.world_size > 1
    if recorder is None and not compares:
        return None
    if not compares:
        return CallObserver(report.name, recorder, None)
    return CallObserver(report.name, recorder, exchange.at("check_uniform"), exchange.missing, exchange.meet_round)


def header(report: Report) -> dict[str, str]:
    """What a record says first: nothing that is one rank's alone."""
    windows = report.windows
    rows = digest(str(windows.describe()))
    return {
        "communicator": report.name,
        "group": " ".join(map(str, report.global_ranks)),
        "version": report.facts.versions.get("k3comm", "unknown"),
        "windows": f"family {windows.family}, world size {windows.world_size or 'any'}, rows {rows:016x}",
        "settings": "; ".join(f"{name}={value}" for name, value in report.settings.describe(uniform_only=True).items()),
        "tiers": " ".join(tier.name for tier in report.decision.capacities),
    }


def is_equal(call: CallRecord, exchange: Exchange) -> bool:
    """Whether all ranks make this call. Collective: one MIN."""
    mine = digest(_compared(call))
    least, negated = exchange.min([mine, -mine])
    return least == -negated


def tell(name: str, call: CallRecord, exchange: Exchange) -> NoReturn:
    """Says in what calls differ. Collective: one gather.

    Raises:
        DivergenceError: on every rank, with the same text, that names the odd ranks, and what differs with its values.
    """
    texts = exchange.gather(_compared(call).encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b" "))
    calls = dict(enumerate(parse_call(text.decode(errors="replace")) for text in texts))
    number = calls[0].get("call", "?")
    raise DivergenceError(
        f"call {number} of {name} differs between the ranks, and was made by none: {'; '.join(differences(calls))}",
        odd_ranks(calls),
    )


def _compared(call: CallRecord) -> str:
    return " ".join(word for word in call.line().split() if not word.startswith("by="))


def differences(calls: Mapping[int, Mapping[str, str]]) -> list[str]:
    """One text for each field that differs, with its values and ranks. `calls`: fields by rank."""
    found = []
    for field in COMPARED:
        ranks: dict[str, list[int]] = {}
        for rank, call in calls.items():
            ranks.setdefault(call.get(field, "absent"), []).append(rank)
        if len(ranks) == 1:
            continue
        usual = max(ranks, key=lambda value: len(ranks[value]))
        if 2 * len(ranks[usual]) > len(calls):
            odd = (f"{name_ranks(who)}: {field} {value}" for value, who in ranks.items() if value != usual)
            found.append(f"{', '.join(odd)}, the others {usual}")
        else:
            found.append(f"{field}: {', '.join(f'{value} on {name_ranks(who)}' for value, who in ranks.items())}")
    return found


def odd_ranks(calls: Mapping[int, Mapping[str, str]]) -> tuple[int, ...]:
    """The ranks whose call is not the one of most; none where no call is that of most."""
    keys = {rank: _key(call) for rank, call in calls.items()}
    usual, count = Counter(keys.values()).most_common(1)[0]
    return tuple(rank for rank, key in keys.items() if key != usual) if 2 * count > len(calls) else ()


def _key(call: Mapping[str, str]) -> Sequence[str | None]:
    return tuple(call.get(field) for field in COMPARED)
