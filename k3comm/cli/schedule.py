"""A plain continuous-batching schedule: which forwards an engine would run for a trace, and when.

The rules, all of them:

- A request is admitted, in order of arrival, once it has arrived and fewer than `max_batch` are in the batch.
- A forward holds one row for each admitted request that is past its prompt, and prompt tokens of those that are not,
  the oldest first, at most `prefill_chunk` of them together.
- The forward that finishes a prompt also gives the request's first token; each later token takes one row of one
  forward. The last token is not fed back, so an answer of n tokens takes n - 1 rows.
- A forward of m rows takes A + B * m microseconds. With nobody in the batch the clock jumps to the next arrival.

No key-value cache that runs full, no preemption, no prefix reuse, no speculation: what is asked is how large forwards
are, not how an engine could do better. Pure: no torch, no clock of the machine's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

import attrs

from k3comm.cli.trace import Request
from k3comm.errors import InputError


@attrs.frozen
class StepCost:
    """How long a forward takes: `fixed` + `per_row` * m microseconds."""

    fixed: float
    per_row: float

    def __attrs_post_init__(self) -> None:
        for value in (self.fixed, self.per_row):
            if not 0 <= value < math.inf:
                raise InputError(f"step cost: {value!r} given; accepted are finite microseconds from 0")

    def of(self, num_tokens: int) -> float:
        """Microseconds of a forward of `num_tokens` rows."""
        return self.fixed + self.per_row * num_tokens


@attrs.frozen
class Forward:
    """One forward.

    Attributes:
        start: microseconds since the trace's first request.
        decode_rows: rows that each belong to a request past its prompt.
        prefill_tokens: rows that are prompt tokens.
    """

    start: float
    decode_rows: int
    prefill_tokens: int

    @property
    def num_tokens(self) -> int:
        """All rows: m."""
        return self.decode_rows + self.prefill_tokens

    @property
    def decode(self) -> bool:
        """Whether every row is a decode row; only such a forward is a CUDA graph's."""
        return self.prefill_tokens == 0


def rows_of(requests: Sequence[Request]) -> int:
    """The rows of all forwards of any schedule together: each prompt token once, and the decode rows."""
    return sum(request.prompt + max(request.generated - 1, 0) for request in requests)


def schedule(requests: Sequence[Request], *, max_batch: int, prefill_chunk: int, cost: StepCost) -> Iterator[Forward]:
    """The forwards for `requests` (in order of arrival), one by one, as the module's docstring says.

    Raises:
        InputError: `max_batch` or `prefill_chunk` below 1.
    """
    for name, value in (("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
        if value < 1:
            raise InputError(f"{name}: {value} given; accepted are whole numbers from 1")
    return _forwards(deque(requests), max_batch, prefill_chunk, cost)


def _forwards(waiting: deque[Request], max_batch: int, prefill_chunk: int, cost: StepCost) -> Iterator[Forward]:
    filling: deque[tuple[Request, int]] = deque()  # with the prompt tokens still to come
    running: list[int] = []  # decode rows still to come, of each request past its prompt
    clock = 0.0
    while waiting or filling or running:
        while waiting and waiting[0].arrival <= clock and len(running) + len(filling) < max_batch:
            request = waiting.popleft()
            filling.append((request, request.prompt))
        if not filling and not running:
            clock = float(waiting[0].arrival)
            continue
        begun: list[int] = []
        budget = prefill_chunk
        while filling and budget:
            request, left = filling.popleft()
            taken = min(left, budget)
            budget -= taken
            if taken < left:
                filling.appendleft((request, left - taken))
            elif request.generated > 1:
                begun.append(request.generated - 1)
        forward = Forward(clock, len(running), prefill_chunk - budget)
        yield forward
        clock += cost.of(forward.num_tokens)
        running = [left - 1 for left in running if left > 1] + begun
