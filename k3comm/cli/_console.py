"""Text on the terminal: through rich where it is installed, plain where it is not. Both say the same.

Results go to standard output; progress goes to standard error, and only if that is a terminal.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import attrs

from k3comm.tiers import Tier

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120
"""Columns where there is no terminal to ask."""

PALETTE = ("#b07aa1", "#d1495b", "#e08e2b", "#c9b458", "#3a9d5d", "#2a9d8f", "#3f7cac", "#8d99ae")
COLOURS: Mapping[Tier, str] = dict(zip(Tier, itertools.cycle(PALETTE), strict=False))
"""One colour a tier, on the terminal and in plots."""

GOOD, BAD = "green", "bold red"


@attrs.frozen
class Cell:
    """A table's cell with a rich style."""

    text: str
    style: str = ""

    def __str__(self) -> str:
        return self.text


def tier_cell(tier: Tier) -> Cell:
    """A tier's name in its colour."""
    return Cell(tier.name, COLOURS[tier])


@attrs.frozen(kw_only=True)
class Table:
    """A table: columns whose name starts with ">" are set flush right, without the sign."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]


def show(*blocks: str | Table) -> None:
    """Prints lines and tables to standard output."""
    console = _console()
    for block in blocks:
        if console is None:
            print(_plain(block) if isinstance(block, Table) else block)
        elif isinstance(block, Table):
            _rich(block, console)
        else:
            # Lines that are longer than the terminal are its business; a pipe gets them whole.
            console.print(block, soft_wrap=True, markup=False, highlight=False)


def show_json(value: Mapping[str, Any]) -> None:
    """Prints a value for machines."""
    print(json.dumps(value, indent=2))


def verdict_cell(good: bool) -> Cell:
    """Well or not, as a sign and in a word; the word alone where the stream can't show the sign."""
    sign, word, style = ("✓", "ok", GOOD) if good else ("✗", "MISSED", BAD)
    try:
        sign.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return Cell(word, style)
    return Cell(f"{sign} {word}", style)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that disappears when it is done. Yields a function that moves it on by some of `total`."""
    if not sys.stderr.isatty():
        yield lambda steps: None
    elif find_spec("rich") is None:
        yield from _plain_progress(what, total)
    else:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda steps: bar.update(task, advance=steps)


def _plain_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    done, shown = 0, -1

    def advance(steps: int) -> None:
        nonlocal done, shown
        done += steps
        percent = 100 * done // max(total, 1)
        if percent != shown:
            shown = percent
            print(f"\r{what} {percent:3d} %", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        print("\r" + " " * (len(what) + 6) + "\r", end="", file=sys.stderr, flush=True)


def _console() -> Console | None:
    if find_spec("rich") is None:
        return None
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _plain(table: Table) -> str:
    names = [name.removeprefix(">") for name in table.columns]
    right = [name.startswith(">") for name in table.columns]
    lines = [names, *([str(cell) for cell in row] for row in table.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    lines.insert(1, ["-" * width for width in widths])
    aligned = (
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )
    return "\n".join([table.title, *aligned, ""])


def _rich(table: Table, console: Console) -> None:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    # The title goes before the table and not into it, where it would wrap at the width of the columns.
    console.print(Text(table.title, style="bold"), soft_wrap=True)
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name in table.columns:
        drawn.add_column(
            Text(name.removeprefix(">")), justify="right" if name.startswith(">") else "left", overflow="fold"
        )
    for row in table.rows:
        drawn.add_row(*(Text(str(cell), style=cell.style if isinstance(cell, Cell) else "") for cell in row))
    console.print(drawn)
    console.print()
