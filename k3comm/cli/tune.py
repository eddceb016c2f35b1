"""Makes a windows file from measured times: for which numbers of rows each tier is worth choosing on this machine.

    torchrun --standalone --nproc-per-node 2 -m k3comm bench --json bench.json
    k3comm tune bench.json --out sm90_2.toml           # then: K3COMM_WINDOWS=sm90_2.toml

Without BENCH.json it measures by itself, under torchrun and with bench's arguments. Sizes between two measured ones are
judged by the larger one; outside them the incumbent table stays. A tier replaces the incumbent's choice only if all its
repetitions were faster than all of the other's. A less accurate class (K0, K1, K2) replaces a more accurate one only
with --allow-less-accurate; the other way is free.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

from k3comm.cli import _console, _tuning, bench
from k3comm.cli._results import Results, load_results, write_atomically
from k3comm.errors import InputError
from k3comm.settings import Settings
from k3comm.tiers import Tier, Windows, choose_windows, load_windows, parse_windows
from k3comm.tiers.windows import windows_toml

HELP = "a windows file from measured times"

EPILOG = """examples:
  k3comm tune bench.json --out mine.toml
  k3comm tune bench.json --dry-run --allow-less-accurate
  torchrun --standalone --nproc-per-node 2 -m k3comm tune --out mine.toml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tune`."""
    parser.epilog = EPILOG
    parser.add_argument(
        "results", nargs="?", metavar="BENCH.json", help="what `bench --json` wrote (default: measure now)"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the file to write, in place of one that is there (default: FAMILY_RANKS.toml, as sm90_2.toml)",
    )
    parser.add_argument(
        "--incumbent",
        metavar="FILE",
        help="the table in use until now (default: K3COMM_WINDOWS if set, else the packaged one)",
    )
    parser.add_argument(
        "--figure",
        choices=_tuning.FIGURES,
        default=_tuning.FIGURES[0],
        help="the times that count (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-less-accurate",
        action="store_true",
        help="let a less accurate class replace a more accurate one (default: not)",
    )
    parser.add_argument("--dry-run", action="store_true", help="write nothing (default: write)")
    measuring = parser.add_argument_group("measuring, without BENCH.json")
    bench.add_arguments(measuring)


def run(arguments: argparse.Namespace) -> int:
    """Tunes, shows what changes, and writes."""
    if arguments.results is not None:
        results = load_results(arguments.results)
        return _conclude(arguments, results, _tuned(arguments, results))
    with bench.job(arguments) as (group, first):
        results = bench.measured(arguments, group)
        if results.failures:
            if first:
                bench.show(results)
            return 1
        tuned = agreed(_tuned(arguments, results), results, group)
        if first:
            bench.show(results)
        return _conclude(arguments, results, tuned) if first else 0


def agreed(tuned: _tuning.Tuned, results: Results, group: object) -> _tuning.Tuned:
    """Rank 0's table, on every rank, read by the loader that will read the file. Collective.

    The ranks tune from the same times, the slowest rank's; where they still differ (another incumbent on one of them),
    the first one's table holds and is said to differ.
    """
    from torch.distributed import ProcessGroup

    from k3comm.cli._timing import Ranks

    if not isinstance(group, ProcessGroup):
        raise InputError(f"group: {group!r} given; accepted is a torch.distributed.ProcessGroup")
    ranks, mine = Ranks(group), windows_toml(tuned.windows)
    text = ranks.from_first(mine)
    (odd,) = ranks.first_bad([text != mine])
    if odd >= 0 and ranks.rank == 0:
        _console.complain(f"k3comm: rank {odd} made another table from the same times; rank 0's holds on all ranks")
    return _tuning.Tuned(windows=_read(text, results), changes=tuned.changes)


def _tuned(arguments: argparse.Namespace, results: Results) -> _tuning.Tuned:
    if results.failures:
        raise InputError(
            f"{arguments.results}: {len(results.failures)} arms failed ({results.failures[0]}, ...); accepted are "
            "results of a bench that ended well"
        )
    incumbent = _incumbent(arguments.incumbent, results)
    return _tuning.tune(
        _tuning.measured_of(results, arguments.figure),
        incumbent,
        _tuning.Rules(allow_less_accurate=arguments.allow_less_accurate),
        family=results.family,
        world_size=results.world_size,
        provenance=f"k3comm tune, {arguments.figure} times: {results.origin()}",
        about={
            "command": results.command,
            "layer": f"H {results.hidden}, L {results.latent}, {results.dtype}",
            "figure": arguments.figure,
            "clock": "CUDA graph replay" if results.graph else "wall clock",
            "date": results.date,
            "device": f"{results.world_size} x {results.device}",
            "incumbent": incumbent.source,
            "less_accurate_allowed": "yes" if arguments.allow_less_accurate else "no",
            "short_run": "yes" if results.short else "no",
            "versions": ", ".join(f"{name} {version}" for name, version in results.versions.items()),
        },
    )


def _incumbent(path: str | None, results: Results) -> Windows[Tier]:
    if path is not None:
        return load_windows(path, Tier)
    settings = Settings.from_env()
    if settings.windows is not None:
        return load_windows(settings.windows, Tier)
    return choose_windows(results.family, results.world_size).windows


def _read(text: str, results: Results) -> Windows[Tier]:
    """The table that the text holds, by the loader: what can't be loaded is not written."""
    return parse_windows(tomllib.loads(text), Tier, f"{results.family}_{results.world_size}.toml")


def _conclude(arguments: argparse.Namespace, results: Results, tuned: _tuning.Tuned) -> int:
    text = windows_toml(tuned.windows)
    _read(text, results)
    path = arguments.out or f"{results.family}_{results.world_size}.toml"
    notes = []
    if results.short:
        notes.append("the times are those of a short run")
    kept = _tuning.rules_kept(tuned.windows, sorted(tuned.windows.timings))
    if kept:
        notes.append(f"rules on the kind of forward stay as they were: {'; '.join(kept)}")
    if arguments.dry_run:
        notes.append("nothing was written (--dry-run)")
    else:
        if not Path(path).parent.is_dir():
            raise InputError(f"--out: {path!r} given; there is no folder {str(Path(path).parent)!r}")
        if arguments.results is not None and Path(path).resolve() == Path(arguments.results).resolve():
            raise InputError(f"--out: {path!r} given, which holds the measured times; accepted are other files")
        if Path(path).exists():
            notes.append(f"{path} was there, and is replaced")
        write_atomically(path, text)
        load_windows(path, Tier)
        notes.append(f"written to {path}; K3COMM_WINDOWS={path} uses it")
    _console.show(results.origin(), "", _table(tuned), _windows_table(tuned), *(f"note: {note}" for note in notes))
    return 0


def _table(tuned: _tuning.Tuned) -> _console.Table:
    return _console.Table(
        title="What changes, at the measured sizes, where all measured tiers are agreed",
        columns=[">m", "before", ">us", "after", ">us", "fastest", ">us", "why not the fastest"],
        rows=[
            [
                str(one.rows),
                _console.tier_cell(one.before),
                f"{one.before_us:.2f}",
                _console.tier_cell(one.after),
                f"{one.after_us:.2f}",
                _console.tier_cell(one.fastest),
                f"{one.fastest_us:.2f}",
                one.why,
            ]
            for one in tuned.changes
        ],
    )


def _windows_table(tuned: _tuning.Tuned) -> _console.Table:
    return _console.Table(
        title="The table",
        columns=["tier", "window"],
        rows=[[_console.tier_cell(tier), str(row)] for tier, row in tuned.windows.rows.items()],
    )
