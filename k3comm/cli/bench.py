"""Times every agreed tier, and what else one would write with NCCL and cuBLAS, over the ranks that torchrun started.

    torchrun --standalone --nproc-per-node 2 -m k3comm bench

On GPUs each figure is from CUDA graph replays, on CPU from the host's clock. Each arm's result is held against float64
first, then all arms are timed in alternating order; a figure is the median over the repetitions of the slowest rank's
median. "chained" is a call that follows another layer's, "isolated" one that follows an ordinary kernel which leaves
nothing in the caches. The weights are other ones in each layer. How often an arm's own tier or collective really ran is
counted; the exit code is 1 if an arm was wrong or did not run what it says.

--seconds bounds what an arm may take at one size: calls of thousands of rows take milliseconds each, and 1000 passes
through 8 layers of them a minute. --memory also finds what memory each arm takes beside inputs and results.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from k3comm.cli import _bench_plot, _choice, _console, _plots
from k3comm.cli._results import (
    ENOUGH_LAYERS,
    ENOUGH_REPEATS,
    ENOUGH_REPLAYS,
    Measurement,
    Results,
    write_atomically,
)
from k3comm.errors import InputError
from k3comm.spec import DTYPES, LatentMoESpec
from k3comm.tiers import Tier

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

HELP = "every tier's time beside its rivals', under torchrun"

PRESETS = {"kimi-k3": LatentMoESpec.kimi_k3()}
PRESET = "kimi-k3"
GPU_ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096, 8192)
CPU_ROWS = (1, 4, 16, 64, 256)
CPU_REPLAYS = 10
SEED = 1
DEVICES = ("auto", "cpu", "cuda")
CENSUS_LINES = 12
"""Names of a census that are shown."""
MOST_SECONDS = 3600.0
FEW = "~"
"""Stands before a figure that rests on fewer passes than are enough, where not all do."""

EPILOG = """examples:
  torchrun --standalone --nproc-per-node 2 -m k3comm bench --json bench.json --plot bench.png
  torchrun --standalone --nproc-per-node 4 -m k3comm bench --device cpu --hidden 512 --latent 256 --rows 1,16,256
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bench`."""
    parser.epilog = EPILOG
    add_arguments(parser)
    parser.add_argument(
        "--memory", action="store_true", help="find out what memory each arm takes (default: not; calls on GPUs alone)"
    )
    parser.add_argument(
        "--reserve", action="store_true", help="make room for the largest size in tiers that stage rows (default: not)"
    )
    parser.add_argument(
        "--prefill",
        action="store_true",
        help="mark the tier that a prefill selects at every size (default: up to 64 rows that of a decode forward)",
    )
    add_outputs(parser)


def add_outputs(parser: argparse._ActionsContainer) -> None:
    """The arguments that say where the figures go."""
    parser.add_argument("--json", metavar="FILE", help="write all figures there, for `k3comm tune` (default: nowhere)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw times by number of rows (needs matplotlib)")


def add_arguments(
    parser: argparse._ActionsContainer,
    *,
    gpu_rows: Sequence[int] = GPU_ROWS,
    cpu_rows: Sequence[int] = CPU_ROWS,
    seconds: float | None = None,
) -> None:
    """The arguments that say what to measure.

    Args:
        gpu_rows, cpu_rows, seconds: defaults of --rows and --seconds.
    """
    parser.set_defaults(memory=False, reserve=False, prefill=False, gpu_rows=tuple(gpu_rows), cpu_rows=tuple(cpu_rows))
    parser.add_argument("--preset", choices=PRESETS, default=PRESET, help="the layer (default: %(default)s)")
    for name, letter in (("--hidden", "H"), ("--latent", "L")):
        parser.add_argument(
            name, type=_choice.whole(1), metavar=letter, help=f"{name[2:]} width (default: the preset's)"
        )
    parser.add_argument("--dtype", choices=DTYPES, default=PRESETS[PRESET].dtype, help="(default: %(default)s)")
    parser.add_argument(
        "--rows",
        type=_rows,
        metavar="M,...",
        help=f"numbers of rows (default: {','.join(map(str, gpu_rows))} on GPUs, "
        f"{','.join(map(str, cpu_rows))} on CPU)",
    )
    parser.add_argument("--tiers", type=_tiers, metavar="TIER,...", help="tiers to measure (default: every agreed one)")
    parser.add_argument("--no-rivals", action="store_true", help="measure tiers alone (default: rivals too)")
    parser.add_argument(
        "--repeats",
        type=_choice.whole(1),
        default=ENOUGH_REPEATS,
        metavar="N",
        help="repetitions (default: %(default)s; fewer make a short run)",
    )
    parser.add_argument(
        "--replays",
        type=_choice.whole(1),
        metavar="N",
        help=f"passes through the layers in a repetition (default: {ENOUGH_REPLAYS} on GPUs; {CPU_REPLAYS} on CPU, "
        f"which is a short run, as is all below {ENOUGH_REPLAYS})",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=seconds,
        metavar="S",
        help="what the repetitions of an arm may take at one size together; it has fewer passes then "
        f"(default: {'no limit' if seconds is None else f'{seconds:g}'})",
    )
    parser.add_argument(
        "--layers",
        type=_choice.whole(1),
        default=ENOUGH_LAYERS,
        metavar="N",
        help="layers, each with weights of its own (default: %(default)s; fewer make a short run)",
    )
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="where tensors live (default: %(default)s, a GPU if any)"
    )
    parser.add_argument(
        "--census", action="store_true", help="count what runs in a pass, by torch.profiler (default: not)"
    )
    parser.add_argument("--seed", type=_choice.whole(0), default=SEED, metavar="N", help="(default: %(default)s)")


def run(arguments: argparse.Namespace, *, script: str | None = None, beside_rivals: bool = False) -> int:
    """Measures, and shows it on rank 0.

    Args:
        script: the path of the script that torchrun started; None for `k3comm bench`.
        beside_rivals: show each time over the fastest rival's, not the noise.

    Raises:
        InputError: an output that could not be written, a tier that is not agreed, or one rank; before any time.
    """
    if arguments.plot is not None:
        _plots.check(arguments.plot)
    if arguments.json is not None and not Path(arguments.json).parent.is_dir():
        raise InputError(f"--json: {arguments.json!r} given; there is no folder {str(Path(arguments.json).parent)!r}")
    with job(arguments, script or "-m k3comm bench") as (group, first):
        results = measured(arguments, group, script or "k3comm")
        if first:
            if arguments.json is not None:
                write_atomically(arguments.json, json.dumps(results.to_dict(), indent=1) + "\n")
            if arguments.plot is not None and results.measurements:
                _bench_plot.draw(results, arguments.plot)
            show(results, beside_rivals=beside_rivals)
    return 1 if results.failures else 0


@contextmanager
def job(arguments: argparse.Namespace, what: str = "-m k3comm bench") -> Iterator[tuple[ProcessGroup, bool]]:
    """The ranks' group, made and ended here unless it is there already; and whether this rank is the first.

    Args:
        what: torchrun's argument that starts this, for an error.

    Raises:
        InputError: nobody started several ranks.
    """
    import torch
    import torch.distributed as dist

    made = not dist.is_initialized()
    if made:
        if not dist.is_torchelastic_launched():
            raise InputError(
                "started as one process; accepted are two or more, for example "
                f"torchrun --standalone --nproc-per-node 2 {what}"
            )
        on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
        if arguments.device == "cuda" and not on_gpu:
            raise InputError("--device: 'cuda' given; there is no GPU here; accepted are cpu and auto")
        if on_gpu:
            torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield cast("ProcessGroup", dist.group.WORLD), dist.get_rank() == 0
    finally:
        if made:
            dist.destroy_process_group()


def measured(arguments: argparse.Namespace, group: ProcessGroup, program: str = "k3comm") -> Results:
    """Runs the bench that the arguments ask for. Collective.

    Args:
        program: what stands before the arguments in the command that is noted.
    """
    import torch
    import torch.distributed as dist

    from k3comm.cli import _bench

    on_gpu = arguments.device != "cpu" and torch.cuda.is_available() and "nccl" in dist.get_backend_config(group)
    preset, rows = PRESETS[arguments.preset], arguments.rows or (arguments.gpu_rows if on_gpu else arguments.cpu_rows)
    spec = LatentMoESpec(
        hidden_size=arguments.hidden or preset.hidden_size,
        latent_size=arguments.latent or preset.latent_size,
        top_k=preset.top_k,
        rms_eps=preset.rms_eps,
        max_tokens=max(rows),
        dtype=arguments.dtype,
    )
    options = _bench.Options(
        spec=spec,
        rows=rows,
        tiers=arguments.tiers,
        rivals=not arguments.no_rivals,
        layers=arguments.layers,
        repeats=arguments.repeats,
        replays=arguments.replays or (ENOUGH_REPLAYS if on_gpu else CPU_REPLAYS),
        census=arguments.census,
        seconds=arguments.seconds,
        memory=arguments.memory,
        reserve=arguments.reserve,
        decode_rows=0 if arguments.prefill else _bench.DECODE_ROWS,
        seed=arguments.seed,
        command=f"{shlex.join([program, *sys.argv[1:]])} (under torchrun, {dist.get_world_size(group)} ranks)",
    )
    return _bench.measure(options, group, "cuda" if on_gpu else "cpu")


def show(results: Results, *, beside_rivals: bool = False) -> None:
    """The tables, what was left out, and what failed.

    Args:
        beside_rivals: as in `run`.
    """
    blocks: list[str | _console.Table] = [results.origin()]
    few = [results.rests_on_few(one) for one in results.measurements]
    in_part = any(few) and not all(few)
    if results.short:
        blocks.append(
            f"SHORT RUN{f' in part, marked {FEW}' if in_part else ''}: fewer than {ENOUGH_REPEATS} x {ENOUGH_REPLAYS} "
            f"passes through {ENOUGH_LAYERS} layers; no {f'figure with {FEW}' if in_part else 'figure'} to quote"
        )
    if results.measurements:
        blocks += [_table(results, figure, beside_rivals) for figure in ("chained", "isolated")]
        brackets = "the time over the fastest rival's" if beside_rivals else "max - min of the repetitions"
        some = f" {FEW}: few passes." if in_part else ""
        blocks.append(f"*: the selected tier.{some} us a call; in brackets {brackets}. rival: not a tier.")
        if any(one.replays is not None for one in results.measurements):
            blocks.append(_passes_table(results))
        if results.shared_bytes:
            blocks.append(_memory_table(results))
        blocks.append(_error_table(results))
    for one in results.measurements:
        if one.census and one.rows == results.rows[0]:  # the other sizes' are in the JSON
            top = list(one.census.items())[:CENSUS_LINES]
            more = f", and {len(one.census) - len(top)} more" if len(one.census) > len(top) else ""
            names = ", ".join(f"{count} x {name}" for name, count in top)
            blocks.append(f"census of {one.arm} at {one.rows} rows, {results.layers} calls: {names}{more}")
    blocks += [f"left out: {arm}: {why}" for arm, why in results.left_out.items()]
    blocks += [f"FAILED {failure}" for failure in results.failures]
    engaged = sum(one.engaged for one in results.measurements)
    counted = f"{engaged:,} timed calls, each of which ran what it is named after"
    blocks.append(f"FAILED: {len(results.failures)}; {counted}" if results.failures else counted)
    _console.show(*blocks)


def _table(results: Results, figure: str, beside_rivals: bool) -> _console.Table:
    few = [results.rests_on_few(one) for one in results.measurements]

    def cell(one: Measurement) -> str:
        times = one.chained_us if figure == "chained" else one.isolated_us
        value = one.chained if figure == "chained" else one.isolated
        mark = "*" if one.tier is not None and results.selected.get(one.rows) is one.tier else ""
        if results.rests_on_few(one) and not all(few):
            mark += FEW
        noise = _us(max(times) - min(times))
        if beside_rivals:
            ratio = results.over_rival(one, figure)
            noise = "-" if ratio is None else f"{ratio:.2f}"
        return f"{mark}{_us(value)} ({noise})"

    return _by_arm(results, f"{figure}, us{' - SHORT RUN' if results.short else ''}", cell)


def _by_arm(results: Results, title: str, cell: Callable[[Measurement], str]) -> _console.Table:
    """A row an arm, a column a number of rows."""
    rows: list[list[str | _console.Cell]] = []
    for arm in results.arms:
        every = [results.at(arm, m) for m in results.rows]
        rows.append([_arm_cell(arm), *("-" if one is None else cell(one) for one in every)])
    return _console.Table(title=title, columns=["arm", *(f">m={m}" for m in results.rows)], rows=rows)


def _passes_table(results: Results) -> _console.Table:
    title = f"Passes in each of {results.repeats} repetitions, as many as fit into the time; {results.replays} at most"
    return _by_arm(results, title, lambda one: str(results.passes(one)))


def _memory_table(results: Results) -> _console.Table:
    """What an arm takes: for good, and in a call."""

    def megabytes(nbytes: int | None) -> str:
        return "-" if nbytes is None else f"{nbytes / 1e6:.1f}"

    calls = _by_arm(results, "", lambda one: megabytes(one.extra_bytes))
    return _console.Table(
        title="Extra memory on a rank, MB (1e6 bytes): shared with the other ranks for good; and in a call, torch's "
        "allocator's peak beside inputs and result (known on GPUs)",
        columns=[calls.columns[0], ">shared", *calls.columns[1:]],
        rows=[
            [row[0], megabytes(results.shared_bytes.get(arm)), *row[1:]]
            for arm, row in zip(results.arms, calls.rows, strict=True)
        ],
    )


def _error_table(results: Results) -> _console.Table:
    rows: list[list[str | _console.Cell]] = []
    for arm in results.arms:
        every = [one for one in results.measurements if one.arm == arm]
        kind = every[0].numerics.name if every[0].numerics is not None else "rival"
        calls, engaged = sum(one.calls for one in every), sum(one.engaged for one in every)
        rows.append([_arm_cell(arm), kind, f"{max(one.error for one in every):.3g}", f"{calls:,}", f"{engaged:,}"])
    return _console.Table(
        title="Against float64, and what ran: rms(out - x) / rms(x - residual), the worst size",
        columns=["arm", "class", ">error", ">timed calls", ">engaged"],
        rows=rows,
    )


def _arm_cell(arm: str) -> str | _console.Cell:
    return _console.tier_cell(Tier[arm]) if arm in Tier.__members__ else arm


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _rows(text: str) -> tuple[int, ...]:
    return tuple(sorted({_choice.whole(1)(part.strip()) for part in text.split(",")}))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} given; accepted are seconds above 0, up to {MOST_SECONDS:g}")
    return value


def _tiers(text: str) -> tuple[Tier, ...]:
    names: Sequence[str] = [name.strip().upper() for name in text.split(",")]
    for name in names:
        if name not in Tier.__members__:
            raise argparse.ArgumentTypeError(
                f"no tier is called {name!r}; accepted are {', '.join(Tier.__members__)}, separated by commas"
            )
    return tuple(sorted({Tier[name] for name in names}))
