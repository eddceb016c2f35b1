"""Text on the terminal: through rich where it is installed, plain where it is not. Both say the same.

Results go to standard output; progress goes to standard error, and only if that is a terminal. What can't be shown, or
a terminal would obey, is escaped here, for all commands.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import attrs

from k3comm.errors import K3CommError
from k3comm.negotiate.decide import printable
from k3comm.tiers import Tier

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120
"""Columns where there is no terminal to ask."""

PALETTE = ("#b07aa1", "#d1495b", "#e08e2b", "#c9b458", "#3a9d5d", "#2a9d8f", "#3f7cac", "#8d99ae")
COLOURS: Mapping[Tier, str] = dict(zip(Tier, itertools.cycle(PALETTE), strict=False))
"""One colour a tier, on the terminal and in plots."""

RICH = ("rich.box", "rich.console", "rich.progress", "rich.table", "rich.text")

GOOD, BAD = "green", "bold red"


@attrs.frozen
class Cell:
    """A table's cell with a rich style."""

    text: str
    style: str = ""

    def __str__(self) -> str:
        return self.text


class OutputError(K3CommError):
    """Standard output can't be written."""


def import_failure(*modules: str) -> Exception | None:
    """Why one of the modules can't be imported: it is absent, or it is there and broken; None if all can."""
    try:
        for module in modules:
            import_module(module)
    except Exception as error:  # a broken installation raises whatever it runs into
        return error
    return None


@contextmanager
def writing() -> Iterator[None]:
    """What is written within has reached standard output at the end; OutputError if it can't, but for a broken pipe."""
    try:
        if sys.stdout is None:
            raise OutputError("standard output is closed")
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors != "backslashreplace":
            # A file's name, say, may hold what the stream can't show.
            sys.stdout.reconfigure(errors="backslashreplace")
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output can't be written: {error.strerror or error}") from None


def complain(text: str) -> None:
    """Prints to standard error, if there is one: with None, print() would take standard output."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(printable(text, keep="\n"), file=sys.stderr, flush=True)


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
    """Prints texts, which may have several lines, and tables to standard output."""
    with writing():
        console = _console()
        for block in blocks:
            if isinstance(block, Table):
                table = _printable(block)
                if console is None:
                    print(_plain(table))
                else:
                    _rich(table, console)
            elif console is None:
                print(printable(block, keep="\n"))
            else:
                # Lines that are longer than the terminal are its business; a pipe gets them whole.
                console.print(printable(block, keep="\n"), soft_wrap=True, markup=False, highlight=False)


def show_json(value: Mapping[str, Any]) -> None:
    """Prints a value for machines."""
    with writing():
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
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda steps: None
    elif import_failure(*RICH):
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
    if import_failure(*RICH):
        return None
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _printable(table: Table) -> Table:
    def cell(one: str | Cell) -> Cell:
        return Cell(printable(str(one)), one.style if isinstance(one, Cell) else "")

    return Table(
        title=printable(table.title),
        columns=[printable(name) for name in table.columns],
        rows=[[cell(one) for one in row] for row in table.rows],
    )


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
    for place, name in enumerate(table.columns):
        drawn.add_column(
            Text(name.removeprefix(">")),
            justify="right" if name.startswith(">") else "left",
            overflow="fold",
            no_wrap=place == 0,  # a row's name stays whole, so that it can be searched for
        )
    for row in table.rows:
        drawn.add_row(*(Text(str(cell), style=cell.style if isinstance(cell, Cell) else "") for cell in row))
    console.print(drawn)
    console.print()
