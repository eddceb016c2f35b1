"""A timeline of the fused tail's kernels, and what each stage costs. Prints short tables last; all figures to $OUT.

    PYTHONPATH=. python benchmarks/tail_stages.py                   # both sections
    PYTHONPATH=. python benchmarks/tail_stages.py stages link       # one of them, with a link emulated

    stages      when each stage is over, by clock stamps in the kernels, and how fast the weights are read
    left-out    the same chain without stamps, and without one stage at a time: what a call takes then

    link        each publication is 0.6 us late, as NVLink would make it
    isolated    before each call a kernel writes twice the L2 cache: a call that finds nothing there
    one-shot    no row in two shots (tail_two_shot.cuh)
    two-shots   rows in two shots from 17 on

Both are of the two-kernel form on sm_90a's path, in loopback (tail_lab.py), in chains of 192 calls in a graph. The
kernels are built from copies of their source in which a few places are changed (`STAMPED`, `LEFT_OUT`); a place that is
not there exactly once is an error, here and in tests/unit/test_tail_stages.py.

**Stamps** are %globaltimer, read by the first thread of a CTA (another one asks about the calls before, and a warp of
its own reads the weights), so what no barrier stands in front of is that thread's own share. They are counted from when
the last CTA of the call before has said that it is done; `isolated`, from when the first CTA of the call itself starts.
They cost something themselves: what a call takes without them is in the other section. How far the clock moves at a
time is printed.

**Left out**: results are garbage, and nothing may hang. For the mailboxes that rests on kernel boundaries: on one GPU
no kernel of a call empties or publishes anything before the kernels of the call before have ended, with all that they
stored, whether anybody has waited for it or not. Differences don't add up: stages overlap.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import tail_lab as lab
import torch
from torch import Tensor

from k3comm.kernels import tail_fusion
from k3comm.kernels.compile import FOLDER, KernelVariant, compile_kernel
from k3comm.kernels.tail_fusion import Entry, Form, kernel_variant
from k3comm.kernels.tail_geometry import FINISH_BLOCKS, STRIPE, TILE, Geometry

WORLD = 2
KEPT = 64
"""The last calls of a chain, whose stamps are kept."""

EDGE = 8
"""The very last ones, which are not looked at: fewer and fewer calls come behind them."""

# Sources


SOURCES = ("tail_fusion.cu", "tail_hopper.cuh", "tail_two_shot.cuh", "tail_finish.cuh")


class Edit(NamedTuple):
    """A place of SOURCES, and what stands there instead."""

    old: str
    new: str


def behind(place: str, more: str) -> Edit:
    return Edit(place, f"{place} {more}")


def before(place: str, more: str) -> Edit:
    return Edit(place, f"{more} {place}")


def edited(sources: Sequence[str], edits: Sequence[Edit]) -> list[str]:
    """Raises ValueError for a place that is not there exactly once in all of them."""
    for old, new in edits:
        count = sum(source.count(old) for source in sources)
        if count != 1:
            raise ValueError(f"{', '.join(SOURCES)} have this {count} times, and not once: {old!r}")
        sources = [source.replace(old, new) for source in sources]
    return list(sources)


def write_sources(folder: Path, edits: Sequence[Edit]) -> Path:
    """The kernels' sources in `folder`, which is made, with the edits in them."""
    folder.mkdir(parents=True)
    for path in FOLDER.glob("*.cuh"):
        shutil.copy(path, folder)
    sources = [(FOLDER / name).read_text(encoding="utf-8") for name in SOURCES]
    for name, source in zip(SOURCES, edited(sources, edits), strict=True):
        (folder / name).write_text(source, encoding="utf-8")
    return folder


# Stamps


@attrs.frozen
class Stage:
    """What a stamp says.

    Attributes:
        words: for the table.
        where: "exchange", "finish", or "credits", the last CTA of the finish.
        time: whether it is a time.
        always: whether every CTA comes by.
        two_shots: whether every CTA comes by in two shots, and none in one.
    """

    words: str
    where: str
    time: bool = True
    always: bool = True
    two_shots: bool = False


STAGES = {
    "ASKED": Stage("first box of weights asked for", "exchange"),
    "BEGUN": Stage("exchange starts", "exchange"),
    "FREED": Stage("the kernel before is over", "exchange"),
    "TURN": Stage("all calls before are done whole", "exchange"),
    "PUBLISHED": Stage("latent published", "exchange"),
    "LATENT": Stage("its share of the latent seen", "exchange"),
    "SUMMED": Stage("its share of the sums said", "exchange", always=False, two_shots=True),
    "ALL_SUMMED": Stage("sums of all groups said", "exchange", always=False, two_shots=True),
    "Z_ASKED": Stage("last stripe of sums asked for", "exchange", always=False, two_shots=True),
    "OPENED": Stage("the window opens", "exchange", always=False),
    "AHEAD": Stage("  boxes asked for by then", "exchange", time=False, always=False),
    "ALL_ASKED": Stage("last box of weights asked for", "exchange"),
    "FIRST": Stage("products begin", "exchange"),
    "COME": Stage("products come to the last stripe", "exchange"),
    "LANDED": Stage("its weights (and z) are there", "exchange"),
    "ISSUED": Stage("products issued", "exchange"),
    "EMPTIED": Stage("the call before is emptied", "exchange"),
    "MADE": Stage("products made", "exchange"),
    "ENDED": Stage("exchange has ended", "exchange"),
    "CREDITS": Stage("exchange of credits starts", "credits"),
    "CREDITED": Stage("credits are in", "credits"),
    "STARTED": Stage("finish starts", "finish"),
    "KNOWN": Stage("the finish knows of that end", "finish"),
    "RECEIVED": Stage("partial sums, shared rows there", "finish"),
    "SENT": Stage("columns published", "finish"),
    "GATHERED": Stage("columns of all others seen", "finish"),
    "DONE": Stage("said to be done", "finish"),
}
"""In the kernels `AT_` stands before the names. A count of zero boxes is none, and so is a time of zero."""

SLOTS = {name: slot for slot, name in enumerate(STAGES)}

_DEFINED = f"""\
constexpr int KEPT = {KEPT}, STAMPS = {len(STAGES)};
enum Stamp : int {{ {", ".join(f"AT_{name}" for name in STAGES)} }};
// [KEPT, CTAs, STAMPS] of the exchange and then of the finish, where only a finalize would look for its weights.
DEVICE void stamp(const Arguments& a, u64 call, Stamp which, u64 value) {{
#if K3_ENTRY == 2
  const u64 place = KEPT * CELLS + call % KEPT * gridDim.x + blockIdx.x;
#else
  const u64 place = call % KEPT * CELLS + blockIdx.x;
#endif
  ((volatile u64*)a.expert_weights)[place * STAMPS + which] = value;
}}
DEVICE void stamp(const Arguments& a, u64 call, Stamp which) {{
  if (threadIdx.x == 0) stamp(a, call, which, nanoseconds());
}}

"""

STAMPED = (
    before("DEVICE Waiting waiting(const Arguments& a, u64 call) {", _DEFINED),
    # The exchange. The number of the call is read anew each time: kept, it would cost registers.
    behind("  u64 mine = 0, credited = 0;", "const u64 began = nanoseconds();"),
    Edit(
        "  if (threadIdx.x == THREADS - 1) *(u32*)(memory + USED) = turn(a, call);",
        """\
  if (threadIdx.x == 0) stamp(a, call, AT_BEGUN, began);
  stamp(a, call, AT_FREED);
  if (threadIdx.x == THREADS - 1) {
    *(u32*)(memory + USED) = turn(a, call);
    stamp(a, call, AT_TURN, nanoseconds());
  }""",
    ),
    behind("  publish<true, SHARED_AT_ONCE>(a, region);", "stamp(a, *number, AT_PUBLISHED);"),
    Edit(
        "  project(a, group, slice, memory, [&] {",
        """\
  stamp(a, *number, K3_TWO_SHOT ? AT_SUMMED : AT_LATENT);
  project(a, group, slice, memory, [&] {
    stamp(a, *number, AT_ISSUED);""",
    ),
    Edit(
        "clear(a, *(const u32*)(memory + USED), region);\n  });",
        """\
clear(a, *(const u32*)(memory + USED), region);
    stamp(a, *number, AT_EMPTIED);
  });
  stamp(a, *number, AT_ENDED);""",
    ),
    behind("  product_wait<0>(sum);", "stamp(a, *(const u64*)(memory + NUMBER), AT_MADE);"),
    before(
        "#if K3_TWO_SHOT\n    barrier_wait(weights + Z_LANDED",
        "if (i == STRIPES - 1) stamp(a, *(const u64*)(memory + NUMBER), AT_COME);\n",
    ),
    before(
        "    product_begin();",
        """\
    if (i == 0) stamp(a, *(const u64*)(memory + NUMBER), AT_FIRST);
    if (i == STRIPES - 1) stamp(a, *(const u64*)(memory + NUMBER), AT_LANDED);
""",
    ),
    # The warp that loads weights, which must not look for what has landed: that cost 0.6 to 4 us a call. What is known
    # of it is that a box was there when the one a window further was asked for. The call's number is there once the
    # polls are over.
    Edit(
        """\
  if (lane == 0) {
    if (a.flags & FRESH_WEIGHTS) wait_for_predecessor();
    const u64 policy = evict_first();""",
        """\
  u64 asked = 0, opened = 0, all_asked = 0, ahead = 0;
  if (lane == 0) {
    if (a.flags & FRESH_WEIGHTS) wait_for_predecessor();
    const u64 policy = evict_first();
    asked = nanoseconds();""",
    ),
    Edit(
        "window = now == OPEN ? BOXES : a.poll_window;",
        """\
{
          window = now == OPEN ? BOXES : a.poll_window;
          if (now == OPEN && !opened) { opened = nanoseconds(); ahead = i; }
        }""",
    ),
    Edit(
        "weights + LANDED + 8 * place, policy);\n    }\n  }\n",
        """\
weights + LANDED + 8 * place, policy);
    }
    all_asked = nanoseconds();
    while (look_shared(progress) < FIRST_ROWS_IN) __nanosleep(200);
    const u64 call = *(volatile u64*)(memory + NUMBER);
    stamp(a, call, AT_ASKED, asked);
    stamp(a, call, AT_OPENED, opened);
    stamp(a, call, AT_AHEAD, ahead);
    stamp(a, call, AT_ALL_ASKED, all_asked);
  }
""",
    ),
    # In two shots, and the warp that loads z.
    before("  sync_block();  // thread THREADS - 1 has been in `turn`", "stamp(a, call, AT_LATENT);\n"),
    before(
        "  fence_loads();\n  for (int i = 0; i < STRIPES; i++) {",
        "  stamp(a, call, AT_ALL_SUMMED, nanoseconds());\n",
    ),
    behind(
        """\
    load_bytes(base + Z + i % Z_RING * Z_STRIPE, terms_of(a, slice) + i * Z_STRIPE, Z_STRIPE,
               base + Z_LANDED + 8 * (i % Z_RING));
  }
  if (Z_RING == STRIPES) set_shared((u32*)(memory + PROGRESS), Z_ON_ITS_WAY);
""",
        "  stamp(a, call, AT_Z_ASKED, nanoseconds());\n",
    ),
    # The finish.
    behind("  __shared__ u64 number;", "const u64 began = nanoseconds();"),
    behind(
        "  expect_finished(a, units);\n  wait_for_predecessor();",
        "\n  if (threadIdx.x == 0) stamp(a, call, AT_STARTED, began);\n  stamp(a, call, AT_KNOWN);",
    ),
    behind("  add_ranks<Rest::COUNT, uint2>(total, from, w, PHASE_SHARED, token);", "stamp(a, call, AT_RECEIVED);"),
    # The next two places are all of a loop, and what is behind them is behind the loop.
    behind(
        "    else finish_unit(a, call, region, units.token(i), units.column(i));\n  }",
        "\n  stamp(a, call, AT_SENT);",
    ),
    behind(
        "    gather_ranks<0>(a, w, units.token(i), units.column(i));",
        "\n  stamp(a, call, AT_GATHERED);",
    ),
    Edit("complete(a);\n}\n#elif K3_ENTRY == 3", "complete(a);\n  stamp(a, call, AT_DONE);\n}\n#elif K3_ENTRY == 3"),
    behind("  call = __shfl_sync(~0u, call, 0);", "stamp(a, call, AT_CREDITS);"),
    behind("  exchange_credits<W>(waiting(a, call), a.credits);", "stamp(a, call, AT_CREDITED);"),
)


# What is left out


@attrs.frozen
class Without:
    """How a stage is left out: by options of TailKernels, or by edits of the source."""

    edits: tuple[Edit, ...] = ()
    options: Mapping[str, Any] = attrs.field(factory=dict)


LEFT_OUT = {
    # The products are then of what lies in shared memory; of 64 rows a few registers spill.
    "no weights read": Without(options={"weights": False}),
    # For a chain on one GPU kernel boundaries do what they are for.
    "no credits": Without(options={"credits": False}),
    # Each word is looked at once, and taken for what it is: the products begin earlier, and all weights are asked for
    # earlier. What is late comes before the kernel ends; the next call empties it all the same, behind that end.
    "no wait for latent": Without(
        (
            Edit("    if (missing < 0) return;", "    return;"),
            Edit(
                "    receive<FIRST>(v, from, w, phase, token);",
                "    if (phase != PHASE_LATENT) receive<FIRST>(v, from, w, phase, token);",
            ),
        )
    ),
    # Neither looked at nor waited for; zeros are copied out, and the words emptied. In loopback the thread that empties
    # a word is the one that has published it, so none comes late; and nobody looks any more.
    "no gather": Without(
        (
            Edit(
                "  ask<FIRST>(v, from);\n  receive<FIRST>(v, from, w, PHASE_GATHER, token);",
                "#pragma unroll\n  for (int i = 0; i < COUNT; i++) v[i] = make_uint2(0, 0);",
            ),
        )
    ),
    # Weights are waited for and room is made for them as ever; the sums stay zero.
    "no products": Without(
        (
            Edit(
                "      product(sum, left + ((i % RING * GROUP_ROWS * 128 + 32 * k) >> 4),"
                " right + ((i % Z_RING * Z_STRIPE + 32 * k) >> 4));",
                "      {}",
            ),
        )
    ),
    # Nor the squares. Products are made all the same; the finish still begins behind the exchange.
    "no partial sums": Without(
        (
            Edit("put_product(a, slice, token, to + 8 * (i >> 1), v);", "(void)v;"),
            Edit("a.squares[(group * MAX_ROWS + token) * SLICES + slice] = v;", "(void)v;"),
            Edit("v[s] = load_partial(partials + (u64)s * C);", "v[s] = make_float4(0, 0, 0, 0);"),
            Edit("four = load_partial(squares + s);", "four = make_float4(0, 0, 0, 0);"),
            Edit("square[s] = __uint_as_float(load_l2(squares + s, u32()));", "square[s] = 0.0f;"),
            Edit("more = load_partial(partials + (u64)s * C);", "more = make_float4(0, 0, 0, 0);"),
            Edit("sum += __uint_as_float(load_l2(squares + s, u32()));", ""),
        )
    ),
    # It is still counted, or the next call would wait for ever; only without order, which the kernel's end gives too.
    "no release": Without((Edit("add_release(&a.counters->completed, ", "atomicAdd(&a.counters->completed, "),)),
}
"""The stages. What is waited for and not named (shared rows, other groups' sums, completion, credits) is waited for as
ever."""


# Kernels


def variants(cut: Geometry, folder: Path = FOLDER, **options: Any) -> list[KernelVariant]:
    """What TailKernels makes of sources in `folder` for the two-kernel form, without a finalize."""
    found = [kernel_variant(cut, Entry.tail_exchange, tokens=tokens, **options) for tokens in cut.tokens]
    found += [kernel_variant(cut, entry, **options) for entry in (Entry.tail_finish, Entry.tail_next_norm)]
    return [attrs.evolve(variant, folder=folder) for variant in found]


def compile_all(todo: Sequence[KernelVariant]) -> None:
    """On all cores, beforehand, each once; the loading finds them on disk."""
    start, todo = time.time(), list(dict.fromkeys(todo))
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        made = list(pool.map(compile_kernel, todo, [variant.archs[0] for variant in todo]))
    took = sum(kernel.seconds for kernel in made)
    lab.say(f"{len(todo)} kernels, {took:.1f} s of work, there in {time.time() - start:.1f} s")


@contextlib.contextmanager
def built_from(folder: Path) -> Iterator[None]:
    """TailKernels that are made inside are made of the sources in `folder`."""
    shipped = tail_fusion.kernel_variant

    def changed(*args: Any, **kind: Any) -> KernelVariant:
        return attrs.evolve(shipped(*args, **kind), folder=folder)

    tail_fusion.kernel_variant = changed
    try:
        yield
    finally:
        tail_fusion.kernel_variant = shipped


def rank_of(cut: Geometry, folder: Path, stamps: Tensor | None = None, **options: Any) -> lab.Rank:
    with built_from(folder):
        one = lab.loopback(lab.K3, WORLD, cut=cut, forms=(Form.SPLIT,), **options)
    if stamps is not None:
        one.tail._arguments[0].expert_weights = stamps.data_ptr()  # calls without a finalize leave it as it is
    return one


# Chains


@attrs.frozen
class Kind:
    """What the command line asks for: `link`, `isolated`, `one-shot`, `two-shots`."""

    link: bool = False
    isolated: bool = False
    one_shot: bool = False
    two_shots: bool = False

    @property
    def two_shot(self) -> bool | None:
        """As `Geometry.two_shot` takes it."""
        return self.two_shots if self.one_shot or self.two_shots else None

    @property
    def options(self) -> dict[str, Any]:
        """Of TailKernels."""
        return {"link_cycles": lab.LINK_CYCLES if self.link else 0, "two_shot": self.two_shot}


@cache
def layers() -> list[lab.Data]:
    return [lab.Data(WORLD, 64, lab.K3, 900 + n) for n in range(lab.LAYERS)]


cold_caches = cache(lab.cold_caches)


def chain_of(one: lab.Rank | None, m: int, kind: Kind) -> lab.Chain:
    """A chain of `one`'s calls, or of nothing but the kernels in front of them."""
    return lab.Chain(one, layers(), m, before=cold_caches() if kind.isolated else None)


# When each stage is over


def blank(cut: Geometry, capacity: int) -> Tensor:
    """Room for the stamps of every grid up to MAX_ROWS rows."""
    return torch.zeros(KEPT * (cut.blocks + FINISH_BLOCKS * capacity) * len(STAGES), dtype=torch.int64)


def by_kernel(stamps: Tensor, cut: Geometry, finish_blocks: int) -> dict[str, Tensor]:
    """int64 [KEPT, CTAs, STAMPS], calls in order, by `Stage.where`."""
    places = KEPT * cut.blocks * len(STAGES), KEPT * finish_blocks * len(STAGES)
    exchange = stamps[: places[0]].view(KEPT, cut.blocks, -1)
    finish = stamps[places[0] : sum(places)].view(KEPT, finish_blocks, -1)
    oldest = int(exchange[:, 0, SLOTS["BEGUN"]].argmin())
    exchange, finish = exchange.roll(-oldest, 0), finish.roll(-oldest, 0)
    return {"exchange": exchange, "finish": finish[:, :-1], "credits": finish[:, -1:]}


def missing(parts: Mapping[str, Tensor], two_shots: bool) -> list[str]:
    """Stages that every CTA comes by in every call, and one was not seen to."""
    due = [(name, stage.where) for name, stage in STAGES.items() if stage.always or (two_shots and stage.two_shots)]
    always = [(name, parts[where][..., SLOTS[name]]) for name, where in due]
    return [name for name, stamps in always if not bool(stamps.all())]


def timeline(parts: Mapping[str, Tensor], isolated: bool) -> dict[str, list[float]]:
    """Of each stage the least, the median and the greatest CTA, as medians over calls; ns."""
    begun, done = parts["exchange"][..., SLOTS["BEGUN"]], parts["finish"][..., SLOTS["DONE"]]
    zero = begun[1:-EDGE].amin(1) if isolated else done[: -EDGE - 1].amax(1)
    found = {}
    for name, stage in STAGES.items():
        calls = []
        for stamps, start in zip(parts[stage.where][1:-EDGE, :, SLOTS[name]], zero, strict=True):
            # Differences of integers: a float can't tell today's nanoseconds apart.
            values = sorted((stamps[stamps > 0] - (start if stage.time else 0)).tolist())
            if values:
                calls.append((values[0], values[len(values) // 2], values[-1]))
        if calls:
            found[name] = [float(statistics.median(column)) for column in zip(*calls, strict=True)]
    return found


def reading(parts: Mapping[str, Tensor], cut: Geometry, rows: int, two_shot: bool | None = None) -> float | None:
    """TB/s at which weights arrive before the window opens, if all CTAs were as fast as the median one; median
    over calls. So many boxes as a window has less were there when the last box of that time was asked for.

    None where weights come in a ring: once that is full they wait for products, which no stamp tells.
    """
    if cut.ring(cut.tokens_for(rows), two_shot) < cut.stripes:
        return None
    slots = parts["exchange"][1:-EDGE]
    asked, opened, ahead, all_asked = (slots[..., SLOTS[name]] for name in ("ASKED", "OPENED", "AHEAD", "ALL_ASKED"))
    boxes = (torch.where(opened > 0, ahead, boxes_of(cut)) - cut.windows(rows, two_shot)[1]).clamp(min=0)
    until = torch.where(opened > 0, opened, all_asked)
    nbytes = 2 * cut.columns * cut.latent_size / boxes_of(cut)  # of a box, for all CTAs
    return float((nbytes * boxes / (until - asked)).median(1).values.median()) / 1e3


def boxes_of(cut: Geometry) -> int:
    """Of weights, a CTA."""
    return cut.slice_width // STRIPE * (cut.group_tiles * TILE // cut.box_rows)


def clock_step(parts: Mapping[str, Tensor]) -> int:
    """The least difference between two stamps, ns."""
    times = [slot for slot, stage in enumerate(STAGES.values()) if stage.time]
    every = torch.cat([part[..., times].flatten() for part in parts.values()]).unique()
    return int(every[every > 0].diff().min())


def stages(kind: Kind, cut: Geometry, folder: Path) -> None:
    source = write_sources(folder / "stamped", STAMPED)
    compile_all(variants(cut, source, link=kind.link, two_shot=kind.two_shot))
    stamps = blank(cut, lab.sms()).cuda()
    timelines: list[dict[str, list[float]]] = []
    rates: list[float | None] = []
    taken: list[float] = []
    one = rank_of(cut, source, stamps, **kind.options)
    for m in lab.BENCH_ROWS:
        chain = chain_of(one, m, kind)
        for _ in range(3):
            chain.replay()
        stamps.zero_()
        us = chain.replay()
        parts = by_kernel(stamps.cpu(), cut, cut.finish_blocks(m, lab.sms()))
        absent = missing(parts, cut.two_shot(cut.tokens_for(m), kind.two_shot))
        lab.check(not absent, f"m {m}: a stamp is missing: {', '.join(absent)}")
        found, rate, step = timeline(parts, kind.isolated), reading(parts, cut, m, kind.two_shot), clock_step(parts)
        lab.results[f"stages m {m}"] = {
            "us_with_stamps": us,
            "clock_step_ns": step,
            "least_median_greatest_ns": {STAGES[name].words.strip(): ns for name, ns in found.items()},
            "weights_tb_s": rate,
        }
        timelines.append(found)
        taken.append(us)
        rates.append(rate)
        print(f"\nm {m}: {us:.2f} us a call with stamps; the clock moves by {step} ns; least, median, greatest CTA")
        print("\n".join(f"  {STAGES[name].words:<34}" + "".join(f"{t:9.0f}" for t in found[name]) for name in found))
    since = "it starts" if kind.isolated else "the call before"
    lab.summary.append(f"{f'median CTA, ns after {since}':<36}" + "".join(f"{f'm={m}':>8}" for m in lab.BENCH_ROWS))
    for name, stage in STAGES.items():
        medians = [f"{found[name][1]:8.0f}" if name in found else f"{'-':>8}" for found in timelines]
        lab.summary.append(f"  {stage.words:<34}" + "".join(medians))
    lab.summary.append(f"{'us a call with stamps':<36}" + "".join(f"{us:8.2f}" for us in taken))
    rates_there = "".join(f"{'-':>8}" if tb is None else f"{tb:8.2f}" for tb in rates)
    lab.summary.append(f"{'weights, TB/s, until the window opens':<36}{rates_there}")


# Without a stage


def left_out(kind: Kind, cut: Geometry, folder: Path) -> None:
    arms = {"whole": Without(), **LEFT_OUT, "whole, again": Without()}  # the last one shows how far times wander
    sources = {name: write_sources(folder / name, arm.edits) if arm.edits else FOLDER for name, arm in arms.items()}
    more = {"link": kind.link, "two_shot": kind.two_shot}
    compile_all([v for name, arm in arms.items() for v in variants(cut, sources[name], **more, **arm.options)])
    table: dict[str, list[float]] = {}
    for name, arm in arms.items():
        one = rank_of(cut, sources[name], **kind.options, **arm.options)
        table[name] = [statistics.median(chain_of(one, m, kind).times()) for m in lab.BENCH_ROWS]
        lab.say(f"{name}: {' '.join(f'{us:.2f}' for us in table[name])}")
    if kind.isolated:
        table["the kernels in front alone"] = [statistics.median(chain_of(None, 1, kind).times())] * len(lab.BENCH_ROWS)
    lab.summary.append(f"{'us a call, and more than whole':<32}" + "".join(f"{f'm={m}':>14}" for m in lab.BENCH_ROWS))
    for name, row in table.items():
        for m, us, whole in zip(lab.BENCH_ROWS, row, table["whole"], strict=True):
            lab.results[f"left out: {name}, m {m}"] = {"median_us": us, "more_us": us - whole}
        pairs = zip(row, table["whole"], strict=True)
        lab.summary.append(f"  {name:<30}" + "".join(f"{us:7.2f}{us - whole:+7.2f}" for us, whole in pairs))


SECTIONS: dict[str, Callable[[Kind, Geometry, Path], None]] = {"stages": stages, "left-out": left_out}
KINDS = tuple(name.replace("_", "-") for name in attrs.fields_dict(Kind))


def main() -> None:
    start = time.time()
    for name, value in lab.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    arguments = sys.argv[1:]
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return
    unknown = [name for name in arguments if name not in (*SECTIONS, *KINDS)]
    if unknown:
        there = f"sections {', '.join(SECTIONS)}, and kinds {', '.join(KINDS)}"
        raise SystemExit(f"{', '.join(unknown)}: not known; there are {there}")
    if {"one-shot", "two-shots"} <= {*arguments}:
        raise SystemExit("one-shot and two-shots given; accepted is one of them, or none for what ships")
    lab.need_gpu()
    kind = Kind(**{name.replace("-", "_"): name in arguments for name in KINDS})
    lab.say(f"{torch.cuda.get_device_name()}, {lab.sms()} SMs, torch {torch.__version__}, {kind}")
    cut = lab.geometry(lab.K3, WORLD, lab.sms())
    if not cut.box_rows:
        raise SystemExit(f"{lab.arch()}: this is about sm_90a's path")
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in SECTIONS if name in arguments] or SECTIONS:
            with lab.section(name):
                SECTIONS[name](kind, cut, Path(folder))
    print("\n".join(["", *lab.summary, *(f"FAILED {text[:300]}" for text in lab.failures[:20])]), flush=True)
    print(f"{len(lab.failures)} failures, {time.time() - start:.0f} s", flush=True)
    kinds = [name for name in KINDS if name in arguments]
    given = {"kind": attrs.asdict(kind), "world": WORLD, "results": lab.results, "failures": lab.failures}
    lab.write_json("-".join(["tail_stages", *kinds]), given)
    os._exit(bool(lab.failures))


if __name__ == "__main__":
    main()
