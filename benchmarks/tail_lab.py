"""The fused tail's kernels on one GPU: right first, then how fast. Prints a short table last; all figures to $OUT.

    PYTHONPATH=. python benchmarks/tail_lab.py                      # everything, in about three minutes
    PYTHONPATH=. python benchmarks/tail_lab.py numerics bench       # some of it

    numerics   loopback, one rank that stands for W: against float64, any m, every option, batch invariance, the forms
               against each other, many rows in one shot against two, deferred finalize
    ranks      W ranks as W streams of this process, a share of the SMs each: random skew, graphs against eager calls,
               two graphs of different m, lanes, counters near a wrap, special values, order-sensitive sums
    processes  W processes over torch symmetric memory on this GPU (time-sliced, so few calls)
    stop       a rank that stops: who is named, and when
    sanitize   some of `numerics` and `processes` under compute-sanitizer's memcheck, few rows and calls
    bench      loopback, chains of 24 layers in a graph, weights rotated; with and without an emulated link of 0.6 us,
               on both paths of the projection, and what windows, credits, other cuts and the weights themselves cost

Loopback: what is sent to rank p goes into this rank's own memory as if rank p had sent it, so all stages of a W-rank
call run, and every column block of the result is this rank's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from k3comm.buffers.mailbox import COUNTER_BYTES, MailboxLayout
from k3comm.kernels import reference
from k3comm.kernels.compile import KernelVariant, arch_of, compile_kernel
from k3comm.kernels.expiry import Expired
from k3comm.kernels.finalize import Deferred, finalize
from k3comm.kernels.tail_fusion import (
    COMPLETED,
    COMPLETIONS,
    CREDITED,
    Entry,
    Form,
    LaneAddresses,
    TailKernels,
    kernel_variant,
)
from k3comm.kernels.tail_geometry import MAX_CELLS, MAX_ROWS, TILE, Geometry
from k3comm.settings import Settings
from k3comm.tiers.tier import Numerics

ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # so many streams run at once
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}

BF16 = torch.bfloat16
K3 = (7168, 3584)
EPS = 1e-5
LINK_CYCLES = 1150
"""0.6 us at the clock that an H200 runs at: one store becoming visible to a peer."""

results: dict[str, Any] = {}
summary: list[str] = []
failures: list[str] = []
_start = time.time()


def say(text: str) -> None:
    print(f"[{time.time() - _start:6.1f}] {text}", flush=True)


def check(good: bool, text: str) -> bool:
    if not good:
        failures.append(text)
        say(f"FAILED {text}")
    return good


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


# Ranks and their memory


class Rank:
    """One rank's block and kernels; `connect` makes the latter, once every rank has its block."""

    def __init__(self, rank: int, world: int, shape: tuple[int, int], *, lanes: int = 1, block: Tensor | None = None):
        self.rank, self.world, (self.hidden, self.latent) = rank, world, shape
        self.columns = self.hidden // world
        self.layout = MailboxLayout(
            hidden_size=self.hidden, latent_size=self.latent, world_size=world, max_rows=MAX_ROWS, lanes=lanes
        )
        self.block = torch.empty(self.layout.nbytes, dtype=torch.uint8, device="cuda") if block is None else block
        self.tail: Any = None
        self.fill()

    def fill(self, calls: int = 0) -> None:
        """Empty, as after `calls` calls. No rank may be in a call."""
        self.block[: self.layout.nbytes].fill_(0xFF)
        for lane in range(self.layout.lanes):
            start = self.layout.counters(lane)
            self.block[start : start + COUNTER_BYTES].zero_()
            words = self.block[start : start + COUNTER_BYTES].view(torch.int64)
            words[:MAX_CELLS] = calls
            words[COMPLETED], words[CREDITED] = calls * COMPLETIONS, calls
        if self.tail is not None:
            self.tail.fill()

    def connect(
        self, geometry: Geometry, blocks: Sequence[int], capacity: int, *, loopback: bool = False, **options: Any
    ) -> Rank:
        layout = self.layout
        lanes = [
            LaneAddresses.of_lane(layout, lane, rank=self.rank, blocks=blocks, loopback=loopback)
            for lane in range(layout.lanes)
        ]
        options.setdefault("deferred", ())
        self.tail = TailKernels(
            geometry,
            rank=self.rank,
            device=torch.device("cuda", torch.cuda.current_device()),
            lanes=lanes,
            eps=EPS,
            capacity=capacity,
            **options,
        )
        return self


def sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def arch() -> str:
    return arch_of(torch.cuda.get_device_capability())


def geometry(shape: tuple[int, int], world: int, capacity: int, general: bool = False) -> Geometry:
    return Geometry.choose(*shape, world, arch=arch(), capacity=capacity, general=general)


def recut(cut: Geometry, group_rows: int, slices: int) -> Geometry:
    """Another cut of the same shape for sm_90a's path."""
    return attrs.evolve(
        cut,
        slices=slices,
        slice_width=cut.latent_size // slices,
        group_tiles=group_rows // TILE,
        groups=cut.columns // group_rows,
        box_rows=next(rows for rows in range(64, 0, -8) if group_rows % rows == 0),
    )


def loopback(
    shape: tuple[int, int], world: int, *, rank: int = 0, lanes: int = 1, cut: Geometry | None = None, **options: Any
) -> Rank:
    one = Rank(rank, world, shape, lanes=lanes)
    cut = geometry(shape, world, sms()) if cut is None else cut
    options.setdefault("settings", Settings(poll_deadline=3.0))
    return one.connect(cut, [one.block.data_ptr()] * world, sms(), loopback=True, **options)


def ranks_of(shape: tuple[int, int], world: int, lanes: int = 1, **options: Any) -> list[Rank]:
    """W ranks of this process. Their kernels wait for one another, so each gets a share of the SMs and no PDL."""
    capacity = sms() // world
    cut = geometry(shape, world, capacity)
    every = [Rank(rank, world, shape, lanes=lanes) for rank in range(world)]
    blocks = [one.block.data_ptr() for one in every]
    options.setdefault("settings", Settings(pdl=False, poll_deadline=5.0))
    for one in every:
        one.connect(cut, blocks, capacity, **options)
    torch.cuda.synchronize()
    return every


class Data:
    """One layer's inputs for every rank, made on the GPU; distributed as reference.random_case."""

    def __init__(
        self, world: int, m: int, shape: tuple[int, int], seed: int, *, weights: Data | None = None, **kind: Any
    ):
        hidden, latent = shape
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*size: int, sigma: float, mean: float = 0.0) -> Tensor:
            return (torch.randn(*size, generator=generator, device="cuda") * sigma + mean).to(BF16)

        self.world, self.m, self.shape = world, m, shape
        self.up_weight: Tensor
        self.routed, self.shared = normal(world, m, latent, sigma=0.1), normal(world, m, hidden, sigma=0.1)
        self.residual = normal(m, hidden, sigma=kind.get("residual_sigma", 1.0)) if kind.get("residual", True) else None
        self.up_weight = normal(hidden, latent, sigma=0.02) if weights is None else weights.up_weight
        self.norm = normal(latent, sigma=0.1, mean=1.0) if kind.get("norm", True) else None
        self.bias = normal(hidden, sigma=0.1) if kind.get("bias", False) else None
        if kind.get("wide", False):
            self.norm = None if self.norm is None else self.norm.float() * 1.001
            self.bias = None if self.bias is None else self.bias.float() * 1.001
        self.scale = kind.get("scale", 1.0)

    def arguments(self, rank: int, rows: slice = slice(None), *, sharded: bool = False) -> dict[str, Any]:
        """Of rank `rank`'s call."""
        columns = self.shape[0] // self.world
        return {
            "routed": self.routed[rank, rows],
            "shared": self.shared[rank, rows],
            "residual": None if self.residual is None else self.residual[rows],
            "up_weight": self.up_weight[rank * columns : (rank + 1) * columns] if sharded else self.up_weight,
            "sharded": sharded,
            "norm_weight": self.norm,
            "up_bias": self.bias,
            "routed_scale": self.scale,
        }

    def truth(self, loop_rank: int | None = None) -> tuple[Tensor, Tensor | None]:
        """float64 [m, H] and the residual; in loopback of `loop_rank` only its columns, [m, H/W]."""
        columns = self.shape[0] // self.world
        routed, shared, weight, residual, bias = self.routed, self.shared, self.up_weight, self.residual, self.bias
        if loop_rank is not None:
            own = slice(loop_rank * columns, (loop_rank + 1) * columns)
            routed = routed[loop_rank][None].expand(self.world, -1, -1)
            shared = shared[loop_rank].unflatten(1, (self.world, columns)).transpose(0, 1)
            weight, residual = weight[own], None if residual is None else residual[:, own]
            bias = None if bias is None else bias[own]
        truth = reference.moe_tail(
            routed,
            shared,
            weight,
            residual=residual,
            norm_weight=self.norm,
            eps=EPS,
            up_bias=bias,
            routed_scale=self.scale,
        )
        return truth, residual


def judge(what: str, meter: reference.AccuracyMeter) -> None:
    accuracy = meter.result()
    broken = reference.accept(Numerics.K0, accuracy, dtype=BF16, pair=True)
    check(not broken, f"{what}: {'; '.join(broken)}")
    results[f"accuracy {what}"] = {
        "error": accuracy.error,
        "ideal": accuracy.ideal_error,
        "misrounded": accuracy.misrounded,
        "paired_bias": accuracy.paired_bias,
        "rows": accuracy.rows,
    }
    say(
        f"{what}: error {accuracy.error:.4e} (ideal {accuracy.ideal_error:.4e}), misrounded {accuracy.misrounded:.2e}, "
        f"paired bias {accuracy.paired_bias:.1e}, {accuracy.rows} rows"
    )


# Compiling beforehand, on all cores


def _compile(variant: KernelVariant) -> float:
    return compile_kernel(variant, variant.archs[0]).seconds


def cuts(sections: Sequence[str]) -> Iterator[tuple[Geometry, Sequence[Form], Sequence[torch.dtype], dict[str, Any]]]:
    """What the sections below make kernels of; what is left out is compiled when it is needed, which takes longer."""
    n, both = sms(), tuple(Form)
    if "numerics" in sections:
        for shape, world, general in NUMERICS:
            cut = geometry(shape, world, n, general)
            yield cut, both, deferred_in(shape, world), {}
            if cut.box_rows:
                yield from ((cut, both, (), {"two_shot": asked}) for asked in (False, True))
                yield cut, both, (), {"cells": True}
    if "ranks" in sections:
        yield from ((geometry(shape, world, n // world), both, (), {}) for shape, world in STREAMS)
        for kind in ({"two_shot": False}, {"cells": True}):
            yield from ((geometry(shape, world, n // world), both, (), kind) for shape, world in STREAMS)
    if "processes" in sections:
        yield from ((geometry(PROCESS_SHAPE, world, n), both, (), {}) for world in PROCESS_WORLDS)
    if "stop" in sections:
        yield from ((geometry(shape, 2, n // 2), both, (), {}) for shape in STOP_SHAPES.values())
    if "bench" in sections:
        for world in BENCH_WORLDS:
            for _, cut, form, options in arms(world):
                kind = {
                    name: value
                    for name, value in options.items()
                    if name in ("credits", "weights", "two_shot", "cells")
                }
                yield cut, (form,), (), kind | {"link": "link_cycles" in options}


def everything(sections: Sequence[str]) -> list[KernelVariant]:
    found: dict[str, KernelVariant] = {}
    for cut, forms, deferred, options in cuts(sections):
        of: list[tuple[Entry, int, torch.dtype | None]] = [(Entry.tail_next_norm, cut.tokens[0], None)]
        for form in forms:
            entry = Entry.tail_whole if form is Form.WHOLE else Entry.tail_exchange
            of += [(entry, tokens, dtype) for tokens in cut.tokens for dtype in (None, *deferred)]
            of += [(Entry.tail_finish, cut.tokens[0], None)] if form is Form.SPLIT else []
        for entry, tokens, dtype in of:
            kind: dict[str, Any] = dict(options)
            if entry in (Entry.tail_exchange, Entry.tail_whole):
                kind |= {"tokens": tokens, "expert_weights": dtype}
            v = kernel_variant(cut, entry, **kind)
            found[v.name] = v
    return list(found.values())


def precompile(sections: Sequence[str]) -> None:
    start = time.time()
    todo = everything(sections)
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        took = list(pool.map(_compile, todo))
    say(f"compiled {len(todo)} kernels, {sum(took):.1f} s of work in {time.time() - start:.1f} s")


# Numerics in loopback


ODD = [((2904, 1000), 3), ((5 * 8 * 27, 72), 5), ((1904, 4104), 7)]
"""Shapes whose fragments a slice, columns a rank and tiles a group come out odd."""

IDLE = [((4096, 2048), 4), ((6144, 3072), 2)]
"""Shapes for sm_90a's path of which some warps don't multiply: groups of 64 rows, and of 192."""

NUMERICS = [
    *((K3, world, False) for world in (2, 4, 8, 16)),
    *((shape, world, False) for shape, world in IDLE),
    *((K3, world, True) for world in (2, 8)),
    *((shape, world, False) for shape, world in ODD),
]
"""Shape, world size, and whether on the general path even where there is another one."""

ROWS = (*range(1, 18), 33, 64)


def deferred_in(shape: tuple[int, int], world: int) -> tuple[torch.dtype, ...]:
    return (BF16, torch.float32) if shape == K3 and world in (2, 8) else ()


def poisoned(m: int, hidden: int) -> Tensor:
    return torch.full((m, hidden), float("nan"), dtype=BF16, device="cuda")


def own_columns(what: str, out: Tensor, one: Rank) -> Tensor:
    """The block of this rank; all blocks have the same bits in loopback."""
    blocks = out.unflatten(1, (one.world, one.columns))
    check(all(same(blocks[:, 0], blocks[:, p]) for p in range(1, one.world)), f"{what}: blocks differ")
    own: Tensor = blocks[:, one.rank]
    return own


def numerics() -> None:
    for shape, world, general in NUMERICS:
        deferred = deferred_in(shape, world)
        cut = geometry(shape, world, sms(), general)
        one = loopback(shape, world, rank=world - 1, cut=cut, deferred=deferred)
        layer = Data(world, 64, shape, 1)
        whole = layer.arguments(one.rank)
        expected = one.tail(**whole, out=poisoned(64, shape[0]))
        what = f"H {shape[0]} L {shape[1]} W {world} {'boxes' if cut.box_rows else 'general'}"
        meter = reference.AccuracyMeter()
        for m in ROWS:
            for form in Form:
                out = poisoned(m, shape[0])
                one.tail(**layer.arguments(one.rank, slice(m)), form=form, out=out)
                torch.cuda.synchronize()
                check(same(out, expected[:m]), f"{what}: row bits change with m = {m}, {form.value}")
        if cut.box_rows:
            # Of two layers in turn: what the call before left of one would be right for it.
            other = Data(world, 64, shape, 2, weights=layer)
            rights = [(layer, expected), (other, one.tail(**other.arguments(one.rank), out=poisoned(64, shape[0])))]
            kinds: list[tuple[str, dict[str, Any]]] = [
                ("one shot", {"two_shot": False}),
                ("two shots", {"two_shot": True}),
                ("cells", {"cells": True}),
            ]
            for kind, asked in kinds:
                two = loopback(shape, world, rank=world - 1, cut=cut, **asked)
                for swapped, m, (turn, form) in product((0, 1), ROWS[ROWS.index(15) :], enumerate(Form)):
                    data, right = rights[swapped ^ turn]
                    out = two.tail(**data.arguments(two.rank, slice(m)), form=form, out=poisoned(m, shape[0]))
                    check(same(out, right[:m]), f"{what}, {kind}: row bits change with m = {m}, {form.value}")
        own = own_columns(what, expected, one)
        meter.add(own, *layer.truth(one.rank))
        for seed in range(2, 2 + max(1, 400_000 // (64 * one.columns))):
            data = Data(world, 64, shape, seed, weights=layer)
            out = one.tail(**data.arguments(one.rank), out=poisoned(64, shape[0]))
            meter.add(own_columns(what, out, one), *data.truth(one.rank))
        judge(what, meter)
        options(what, one, layer)
        if deferred:
            deferrals(what, one, whole)


def options(what: str, one: Rank, layer: Data) -> None:
    kinds: list[dict[str, Any]] = [
        {"norm": False},
        {"residual": False},
        {"bias": True, "scale": 0.75},
        {"bias": True, "scale": 2.5, "wide": True},
        {"residual": False, "norm": False, "scale": -1.0},
        {"residual_sigma": 8.0},
    ]
    for seed, kind in enumerate(kinds):
        data = Data(one.world, 64, one_shape(one), 50 + seed, weights=layer, **kind)
        meter = reference.AccuracyMeter()
        for form in Form:
            out = one.tail(**data.arguments(one.rank), form=form, out=poisoned(64, one.hidden))
            meter.add(own_columns(f"{what} {kind}", out, one), *data.truth(one.rank))
        accuracy = meter.result()
        close = accuracy.error <= 1.02 * accuracy.ideal_error and accuracy.misrounded < 0.006
        check(
            close, f"{what} {kind}: error {accuracy.error:.3e} of {accuracy.ideal_error:.3e}, {accuracy.misrounded:.2e}"
        )
    # Layouts: sharded weights; rows that are apart, misaligned, or the wrong way round; the next norm.
    data = Data(one.world, 9, one_shape(one), 60, weights=layer)
    plain = one.tail(**data.arguments(one.rank), out=poisoned(9, one.hidden))
    check(same(plain, one.tail(**data.arguments(one.rank, sharded=True))), f"{what}: sharded weights")
    odd = data.arguments(one.rank)
    apart = torch.zeros(9, one.latent + 24, dtype=BF16, device="cuda")
    apart[:, 8 : 8 + one.latent] = odd["routed"]
    shifted = torch.zeros(9 * one.hidden + 1, dtype=BF16, device="cuda")
    shifted[1:] = odd["shared"].reshape(-1)
    odd |= {
        "routed": apart[:, 8 : 8 + one.latent],
        "shared": shifted[1:].view(9, one.hidden),
        "residual": odd["residual"].t().contiguous().t(),
        "up_weight": torch.cat((odd["up_weight"], odd["up_weight"][:, :8]), 1)[:, : one.latent],
    }
    check(same(plain, one.tail(**odd)), f"{what}: strided inputs")
    for wide in (False, True):
        g = torch.randn(one.hidden, device="cuda").to(torch.float32 if wide else BF16)
        normed = poisoned(9, one.hidden)
        out = one.tail(**data.arguments(one.rank), next_norm_weight=g, normed=normed)
        x = plain.double()
        truth = x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * g.double()
        accuracy = reference.measure(normed, truth)
        close = accuracy.error <= 1.005 * accuracy.ideal_error
        check(close and same(out, plain), f"{what}: next norm, error {accuracy.error:.3e}")


def one_shape(one: Rank) -> tuple[int, int]:
    return one.hidden, one.latent


def deferrals(what: str, one: Rank, arguments: dict[str, Any]) -> None:
    for m, k, rows in ((1, 16, 40), (7, 6, 9), (16, 64, 100), (33, 3, 1), (5, 17, 0), (64, 16, 300)):
        generator = torch.Generator("cuda").manual_seed(m * k)
        source = torch.randn(rows, one.latent + 8, generator=generator, device="cuda").to(BF16)
        index = torch.randint(-1, max(rows, 1), (m * k,), generator=generator, device="cuda", dtype=torch.int32)
        if not rows:
            index.fill_(-1)
        index[torch.rand(m * k, generator=generator, device="cuda") < 0.2] = -1
        for dtype in (BF16, torch.float32):
            weights = torch.rand(m * k, generator=generator, device="cuda").to(dtype)
            later = Deferred(source, weights, index, m)
            # Rows that no slot names are never read: NaN there must not show.
            spoiled = source.clone()
            named = torch.zeros(rows, dtype=torch.bool, device="cuda")
            named[index[index >= 0].long()] = True
            spoiled[~named] = float("nan")
            spoiled[:, one.latent :] = float("nan")
            call = arguments | {name: arguments[name][:m] for name in ("shared", "residual")}
            ready = one.tail(**(call | {"routed": finalize(later, one.latent)}), out=poisoned(m, one.hidden))
            for form in Form:
                given = Deferred(spoiled, weights, index, m)
                out = one.tail(**(call | {"routed": given}), form=form, out=poisoned(m, one.hidden))
                check(same(out, ready), f"{what}: deferred m {m} K {k} R {rows} {dtype} {form.value}")


# Ranks on streams


STREAMS = [((7168, 3584), 2), ((3584, 1792), 2), ((3584, 1792), 4), ((1792, 896), 8), ((1024, 520), 8)]
"""K3 on half the SMs and the last one have no cut for sm_90a's path; the others do."""

COUNTS = {2: 4000, 4: 800, 8: 400}
"""Calls of the random walk, by world size."""


def ranks() -> None:
    for shape, world in STREAMS:
        every = ranks_of(shape, world, lanes=2)
        streams = [torch.cuda.Stream() for _ in range(world)]
        random_walk(shape, world, every, streams)
        graphs(shape, world, every, streams)
        special_values(shape, world, every, streams)
        random_walk(shape, world, ranks_of(shape, world, lanes=2, cells=True), streams, ", cells")
        if geometry(shape, world, sms() // world).box_rows:
            random_walk(shape, world, ranks_of(shape, world, lanes=2, two_shot=False), streams, " in one shot")


def all_ranks(
    every: list[Rank],
    streams: list[torch.cuda.Stream],
    data: Data,
    outs: list[Tensor],
    **options: Any,
) -> None:
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for one, stream in zip(every, streams, strict=True):
        with torch.cuda.stream(stream):
            one.tail(**data.arguments(one.rank), out=outs[one.rank], **options)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


def random_walk(
    shape: tuple[int, int], world: int, every: list[Rank], streams: list[torch.cuda.Stream], note: str = ""
) -> None:
    """Eager calls of changing m, form and lane under random skew, from counters that are about to wrap at 32 bits."""
    what, rng = f"ranks {shape} W {world}{note}", random.Random(world)
    cases = []
    meter = reference.AccuracyMeter()
    layer = None
    for one in every:
        one.fill()
    torch.cuda.synchronize()
    for seed, m in enumerate((1, 2, 3, 5, 8, 9, 16, 17, 33, 64)):
        layer = data = Data(world, m, shape, 100 + seed, weights=layer)
        outs = [poisoned(m, shape[0]) for _ in every]
        all_ranks(every, streams, data, outs)
        torch.cuda.synchronize()
        check(all(same(outs[0], out) for out in outs), f"{what}: ranks differ at m = {m}")
        meter.add(outs[0], *data.truth())
        cases.append((data, outs, outs[0].clone()))
    if world == 2:
        judge(what, meter)
    else:
        accuracy = meter.result()
        check(accuracy.error <= 1.02 * accuracy.ideal_error, f"{what}: error {accuracy.error:.3e}")
    for one in every:
        one.fill(calls=2**32 - 20)
    torch.cuda.synchronize()
    start, calls, wrong = time.time(), 0, torch.zeros(world, dtype=torch.int64, device="cuda")

    def compare(rank: int, out: Tensor, expected: Tensor) -> None:
        wrong[rank].add_((out.view(torch.int16) != expected.view(torch.int16)).any())

    # Once before any kernel waits for another: memory that is taken anew could wait for all of them.
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            for _, outs, expected in cases:
                compare(rank, outs[0], expected)
                torch.cuda._sleep(10)
        torch.cuda.synchronize()
    wrong.zero_()
    torch.cuda.synchronize()
    while calls < COUNTS[world]:
        batch = [rng.randrange(len(cases)) for _ in range(10)]
        kinds: list[dict[str, Any]] = [{"form": rng.choice(list(Form)), "lane": rng.randrange(2)} for _ in batch]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for number, kind in zip(batch, kinds, strict=True):
            data, outs, _ = cases[number]
            order = rng.sample(range(world), world)
            for rank in order:
                with torch.cuda.stream(streams[rank]):
                    if rng.random() < 0.3:
                        torch.cuda._sleep(rng.randrange(1, 60_000))
                    outs[rank].fill_(float("nan"))
                    every[rank].tail(**data.arguments(rank), out=outs[rank], **kind)
                    compare(rank, outs[rank], cases[number][2])
            calls += 1
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    bad = int(wrong.sum())
    check(bad == 0, f"{what}: {bad} wrong results in {calls} calls")
    say(f"{what}: {calls} calls under skew, {bad} wrong, {time.time() - start:.1f} s")
    results[f"{what} walk"] = {"calls": calls, "wrong": bad}


def capture(
    every: list[Rank], streams: list[torch.cuda.Stream], data: Data, outs: list[Tensor]
) -> list[torch.cuda.CUDAGraph]:
    """One graph a rank: a call in each form."""
    made = []
    for one, stream in zip(every, streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for form in Form:
                one.tail(**data.arguments(one.rank), out=outs[one.rank], form=form)
        made.append(graph)
    return made


def graphs(shape: tuple[int, int], world: int, every: list[Rank], streams: list[torch.cuda.Stream]) -> None:
    """Two graphs of different m, replayed in turn with eager calls between, inputs changed in place."""
    what, rng = f"graphs {shape} W {world}", random.Random(7)
    for one in every:
        one.fill()
    small, large = Data(world, 3, shape, 301), Data(world, 21, shape, 302)
    sets = [(data, [poisoned(data.m, shape[0]) for _ in every]) for data in (small, large)]
    captured = [capture(every, streams, data, outs) for data, outs in sets]
    versions = []
    for seed in range(3):
        new = [Data(world, data.m, shape, 310 + seed, weights=data) for data, _ in sets]
        for (data, outs), fresh in zip(sets, new, strict=True):
            load(data, fresh)
            all_ranks(every, streams, data, outs)
        torch.cuda.synchronize()
        versions.append([(fresh, outs[0].clone()) for fresh, (_, outs) in zip(new, sets, strict=True)])
    wrong, replays = 0, 0
    for _ in range(60 if world == 2 else 15):
        version = rng.choice(versions)
        for (data, outs), (fresh, _) in zip(sets, version, strict=True):
            load(data, fresh)
            for out in outs:
                out.fill_(float("nan"))
        torch.cuda.synchronize()
        for number in (rng.randrange(2) for _ in range(6)):
            data, outs = sets[number]
            if rng.random() < 0.25:
                all_ranks(every, streams, data, outs)
                torch.cuda.synchronize()
            for rank in rng.sample(range(world), world):
                with torch.cuda.stream(streams[rank]):
                    captured[number][rank].replay()
            replays += 2
            torch.cuda.synchronize()
            wrong += sum(not same(out, version[number][1]) for out in outs)
    check(wrong == 0, f"{what}: {wrong} wrong of {replays} replayed calls")
    say(f"{what}: {replays} replayed calls, {wrong} wrong")
    results[what] = {"replays": replays, "wrong": wrong}


def load(data: Data, fresh: Data) -> None:
    data.routed.copy_(fresh.routed)
    data.shared.copy_(fresh.shared)
    for mine, new in ((data.residual, fresh.residual), (data.norm, fresh.norm)):
        assert mine is not None
        assert new is not None
        mine.copy_(new)


def special_values(shape: tuple[int, int], world: int, every: list[Rank], streams: list[torch.cuda.Stream]) -> None:
    """Order-sensitive sums, and payloads with every bit pattern that could go wrong; clean rows keep their bits."""
    what = f"special {shape} W {world}"
    for one in every:
        one.fill()
    data = Data(world, 12, shape, 401)
    clean = [poisoned(12, shape[0]) for _ in every]
    all_ranks(every, streams, data, clean)
    torch.cuda.synchronize()
    assert data.residual is not None
    last = world - 1
    data.routed[0, 1, 8:10].view(torch.int16).fill_(-1)  # exactly an empty word
    data.shared[last, 2].view(torch.int16).fill_(-1)
    data.shared[0, 3, 5], data.shared[last, 3, 40] = float("inf"), float("-inf")
    data.routed[:, 4], data.shared[:, 4], data.residual[4] = -0.0, -0.0, -0.0
    data.routed[:, 5], data.shared[:, 5] = 1e-40, -1e-40
    data.residual[5] = 0.0
    data.routed[last, 6, 3] = float("inf")
    # Sums that only rank order gives: 2^24 + 1 - 2^24 from the first rank on is 0, from the last on 1 or 0.
    data.routed[:, 7], data.shared[:, 7] = 0.0, 0.0
    data.routed[0, 7], data.routed[last, 7] = 2.0**24, -(2.0**24)
    data.shared[0, 7], data.shared[last, 7] = 2.0**24, -(2.0**24)
    if world > 2:
        data.routed[1, 7], data.shared[1, 7] = 1.0, 1.0
    data.residual[7] = 0.0
    data.residual[8] *= 1e4
    data.routed[0, 9, 0] = float("nan")
    data.shared[0, 10] = 3e38
    data.shared[last, 10] = 3e38
    outs = {form: [poisoned(12, shape[0]) for _ in every] for form in Form}
    for _ in range(4):  # all three regions, and the first one again
        for form in Form:
            all_ranks(every, streams, data, outs[form], form=form)
    torch.cuda.synchronize()
    out = outs[Form.SPLIT][0]
    check(all(same(out, other) for form in Form for other in outs[form]), f"{what}: ranks or forms differ")
    check(all(same(out[row], clean[0][row]) for row in (0, 11)), f"{what}: clean rows changed")
    model = reference.model(
        Numerics.K0,
        data.routed,
        data.shared,
        data.up_weight,
        residual=data.residual,
        norm_weight=data.norm,
        eps=EPS,
        pair=True,
    )
    same_kind = torch.equal(out.isnan(), model.isnan()) and torch.equal(out.isinf(), model.isinf())
    off = [
        row
        for row in range(12)
        if not torch.allclose(out[row].double(), model[row].double(), rtol=2**-7, atol=1e-2, equal_nan=True)
    ]
    check(same_kind and not off, f"{what}: other specials than the model's, or rows off: {off}")
    check(same(out[7], model[7]), f"{what}: the order-sensitive row differs from the model")
    say(f"{what}: NaN in rows {[row for row in range(12) if bool(out[row].isnan().any())]}, off {off}")


# Processes


PROCESS_SHAPE = (2048, 1032)
PROCESS_WORLDS = (2, 4, 8)
PROCESS_CALLS = {2: 60, 4: 24, 8: 12}


def processes() -> None:
    for world in PROCESS_WORLDS:
        start = time.time()
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), __file__,
            "--worker", str(PROCESS_CALLS[world]),
        ]  # fmt: skip
        done = run_process(command, 90)
        good = done.returncode == 0 and done.stdout.count("worker ok") == world
        check(good, f"processes W {world}: exit {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
        say(f"processes W {world}: {PROCESS_CALLS[world]} calls, {time.time() - start:.1f} s with the start")
        results[f"processes W {world}"] = {"calls": PROCESS_CALLS[world], "ok": good}


def run_process(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as late:
        text = [
            (part or b"").decode() if isinstance(part, bytes) else (part or "") for part in (late.stdout, late.stderr)
        ]
        return subprocess.CompletedProcess(command, 124, text[0], f"{text[1]} over {seconds} s")


def worker(calls: int, sizes: Sequence[int]) -> None:
    """One rank of `processes`, under torchrun."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    nbytes = Rank(rank, world, PROCESS_SHAPE).layout.nbytes
    block = symmetric.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", 0))
    handle = symmetric.rendezvous(block, dist.group.WORLD.group_name)
    one = Rank(rank, world, PROCESS_SHAPE, block=block)
    cut = geometry(PROCESS_SHAPE, world, sms())
    one.connect(cut, [int(p) for p in handle.buffer_ptrs], sms(), settings=Settings(pdl=False, poll_deadline=20.0))
    torch.cuda.synchronize()
    dist.barrier()
    layer, wrong = None, []
    for call in range(calls):
        m = sizes[call % len(sizes)]
        layer = data = Data(world, m, PROCESS_SHAPE, 500 + call, weights=layer)
        out = one.tail(**data.arguments(rank), out=poisoned(m, PROCESS_SHAPE[0]), form=list(Form)[call // 6 % 2])
        torch.cuda.synchronize()
        accuracy = reference.measure(out, *data.truth())
        bits = out.cpu().view(torch.int16).long()
        digest = torch.stack([bits.sum(), (bits * torch.arange(bits.numel()).view_as(bits)).sum()])
        every = [torch.empty_like(digest) for _ in range(world)]
        dist.all_gather(every, digest)
        if not accuracy.error <= 1.05 * accuracy.ideal_error or any(not torch.equal(digest, d) for d in every):
            wrong.append((call, m, accuracy.error, accuracy.ideal_error))
    dist.barrier()
    print("worker ok" if not wrong else f"worker {rank} wrong: {wrong[:5]}", flush=True)
    os._exit(0 if not wrong else 1)


# A rank that stops


STOP_SHAPES = {"latent": (1024, 512), "gather": (1024, 520)}
"""By the phase that the others wait in; the first is cut for sm_90a's path."""


def stop() -> None:
    for phase in STOP_SHAPES:
        done = run_process([sys.executable, __file__, "--stop", phase], 60)
        line = next((text for text in done.stdout.splitlines() if text.startswith("expired")), "")
        check(
            f"phase {phase}" in line and "rank 1 within" in line, f"stop in {phase}: {done.stdout} {done.stderr[-800:]}"
        )
        say(f"stop in {phase}: {line}")
        results[f"stop {phase}"] = line


def stopped(phase: str) -> None:
    """Rank 1 of 2 is late for ever: it never starts, or goes no further than its exchange."""
    shape = STOP_SHAPES[phase]
    every = ranks_of(shape, 2, settings=Settings(pdl=False, poll_deadline=0.3))
    streams = [torch.cuda.Stream() for _ in every]
    data = Data(2, 3, shape, 1)
    outs = [poisoned(3, shape[0]) for _ in every]
    all_ranks(every, streams, data, outs)
    torch.cuda.synchronize()
    start = time.time()
    if phase == "gather":
        tail: Any = every[1].tail
        tail._finish = dict.fromkeys(tail._finish, lambda packed: None)
        with torch.cuda.stream(streams[1]):
            tail(**data.arguments(1), out=outs[1], layer=7)
    with torch.cuda.stream(streams[0]):
        every[0].tail(**data.arguments(0), out=outs[0], layer=7)
    try:
        torch.cuda.synchronize()
        print("no error")
    except RuntimeError as problem:
        found = Expired.read(every[0].tail.record)
        text = "no record" if found is None else str(found.error(2, 0.3))
        print(f"expired after {time.time() - start:.2f} s: {text} ({type(problem).__name__})", flush=True)
    os._exit(0)


# Under compute-sanitizer


def sanitize() -> None:
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        raise RuntimeError("compute-sanitizer is not on PATH, nor in /usr/local/cuda/bin")
    check = [tool, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9"]
    check += ["--report-api-errors", "no"]  # libraries ask what a driver does not have, and go on
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    runs = {"loopback": [sys.executable, __file__, "--few"], "two processes": [*ranks, "--worker", "6", "few"]}
    for name, command in runs.items():
        start = time.time()
        done = run_process([*check, *command], 150)
        said = done.stdout + done.stderr
        clean = done.returncode == 0 and "ERROR SUMMARY: 0 errors" in said
        check_text = f"sanitize {name}: exit {done.returncode}: {said[-1500:]}"
        failures.extend([] if clean else [check_text])
        say(f"sanitize {name}: {'no errors' if clean else check_text}, {time.time() - start:.1f} s")
        results[f"sanitize {name}"] = {"clean": clean}


def few() -> None:
    """One rank in loopback, 1 to 4 and 40 rows, on both paths, both forms, every kind of finalize."""
    for general in (False, True):
        one = loopback(K3, 2, cut=geometry(K3, 2, sms(), general), deferred=(BF16, torch.float32))
        layer = Data(2, 40, K3, 1)
        for m in (1, 4, 40, 3):
            given = layer.arguments(0, slice(m))
            outs = [one.tail(**given, form=form, out=poisoned(m, K3[0])) for form in Form]
            index = torch.arange(m * 2, dtype=torch.int32, device="cuda").view(m, 2)
            index[:, 1] = -1
            for dtype in (BF16, torch.float32):
                ones = torch.ones(m, 2, dtype=dtype, device="cuda")
                rows = given["routed"].repeat_interleave(2, 0)
                given["routed"], plain = Deferred(rows, ones, index, m), given["routed"]
                outs += [one.tail(**given, form=form, out=poisoned(m, K3[0])) for form in Form]
                given["routed"] = plain
            torch.cuda.synchronize()
            assert all(same(out, outs[0]) for out in outs)
            assert not bool(outs[0].isnan().any())
    print("few ok", flush=True)


# How fast


LAYERS = 24
BENCH_ROWS = (1, 2, 4, 8, 16, 32, 64)


CALLS = 192
"""Of a chain."""


class Chain:
    """Calls of m rows in a graph, the residual of each the result before, weights of all layers in turn.

    Args:
        one: whose; None for nothing but what comes before each call.
        before: is told the number of each call, and puts kernels in front of it.
    """

    def __init__(
        self,
        one: Rank | None,
        layers: Sequence[Data],
        m: int,
        form: Form = Form.SPLIT,
        *,
        calls: int = CALLS,
        before: Callable[[int], object] | None = None,
    ) -> None:
        outs = [torch.empty(m, layers[0].shape[0], dtype=BF16, device="cuda") for _ in range(2)]

        def act(n: int) -> None:
            for call in range(n):
                if before is not None:
                    before(call)
                if one is None:
                    continue
                given = layers[call % len(layers)].arguments(one.rank, slice(m))
                if call:
                    given["residual"] = outs[(call + 1) % 2]
                one.tail(**given, out=outs[call % 2], form=form)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            act(3)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.calls, self.outs, self.graph = calls, outs, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            act(calls)

    def replay(self) -> float:
        """Microseconds a call."""
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        self.graph.replay()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / self.calls

    def times(self, replays: int = 11) -> list[float]:
        """Of so many replays behind a first one."""
        self.replay()
        return [self.replay() for _ in range(replays)]


def cold_caches() -> Callable[[int], object]:
    """Something for `Chain`'s `before`: a kernel that writes twice the L2 cache of the current GPU."""
    nbytes = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return lambda call: memory.fill_(call % 7)


BENCH_WORLDS = (2, 4, 8)
PLAIN = Settings(pdl=False, poll_deadline=3.0)


def arms(world: int) -> Iterator[tuple[str, Geometry, Form, dict[str, Any]]]:
    """Name, cut, form, and options of TailKernels."""
    cut, general = (geometry(K3, world, sms(), kind) for kind in (False, True))
    link = {"link_cycles": LINK_CYCLES}
    yield "general split pdl", general, Form.SPLIT, {}
    if world == 2:
        yield "general whole plain", general, Form.WHOLE, {"settings": PLAIN}
    if not cut.box_rows:
        return
    yield "boxes split pdl", cut, Form.SPLIT, {}
    yield "boxes split pdl link", cut, Form.SPLIT, link
    yield "boxes split pdl uncredited", cut, Form.SPLIT, {"credits": False}
    yield "boxes split pdl, no weights read", cut, Form.SPLIT, {"weights": False}
    for asked, shots in ((False, "one shot"), (True, "two shots")):
        yield f"boxes split pdl, {shots}", cut, Form.SPLIT, {"two_shot": asked}
        yield f"boxes split pdl, {shots} link", cut, Form.SPLIT, link | {"two_shot": asked}
    yield "boxes whole pdl", cut, Form.WHOLE, {}
    yield "boxes whole plain", cut, Form.WHOLE, {"settings": PLAIN}
    yield "boxes whole plain, cells link", cut, Form.WHOLE, link | {"settings": PLAIN, "cells": True}
    yield "boxes whole plain link", cut, Form.WHOLE, link | {"settings": PLAIN}
    if world == 2:
        yield "boxes whole pdl link", cut, Form.WHOLE, link
        yield "boxes split plain", cut, Form.SPLIT, {"settings": PLAIN}
    for window in (1, 2, 3, 4, 6) if world == 2 else (3, 8):
        yield f"boxes split pdl link, window {window}", cut, Form.SPLIT, link | {"windows": (window, window)}
    yield "boxes split pdl, in one burst", cut, Form.SPLIT, {"windows": (64, 64)}
    for group_rows, slices in {4: [(224, 14)], 8: [(64, 8), (224, 28)]}.get(world, []):
        yield f"boxes split pdl, {group_rows} x {slices}", recut(cut, group_rows, slices), Form.SPLIT, {}


def bench() -> None:
    for world in BENCH_WORLDS:
        base = Data(world, 64, K3, 900)
        layers = [base, *(Data(world, 64, K3, 901 + n) for n in range(LAYERS - 1))]
        table: dict[str, list[float]] = {}
        for name, cut, form, options in arms(world):
            one = loopback(K3, world, cut=cut, forms=(form,), **options)
            before = one.tail.launches
            medians = []
            for m in BENCH_ROWS:
                times = Chain(one, layers, m, form).times()
                medians.append(statistics.median(times))
                results[f"bench W {world} {name} m {m}"] = {"median_us": medians[-1], "least_us": min(times)}
            check(one.tail.launches > before, f"bench {name}: nothing was launched")
            table[name] = medians
            say(f"bench W {world} {name}: {' '.join(f'{t:.2f}' for t in medians)}")
        summary.append(f"{f'loopback W {world}, us a call':<34}" + "".join(f"{f'm={m}':>8}" for m in BENCH_ROWS))
        summary.extend(f"  {name:<32}" + "".join(f"{t:8.2f}" for t in medians) for name, medians in table.items())
        del layers


SECTIONS: dict[str, Callable[[], None]] = {
    "numerics": numerics,
    "ranks": ranks,
    "processes": processes,
    "stop": stop,
    "sanitize": sanitize,
    "bench": bench,
}


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    start, failed = time.time(), len(failures)
    try:
        yield
    except Exception as problem:
        check(False, f"{name}: {type(problem).__name__}: {str(problem)[:600]}")
    summary.append(f"{name:<12} {'ok' if len(failures) == failed else 'FAILED'}  {time.time() - start:.1f} s")


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here, and this measures on one")


def write_json(name: str, values: dict[str, Any]) -> None:
    """To the folder $OUT, which is made; nowhere without."""
    out = os.environ.get("OUT")
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        Path(out, f"{name}.json").write_text(json.dumps(values, indent=1))


def main() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    arguments = sys.argv[1:]
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
        return None
    if arguments[:1] == ["--worker"]:
        return worker(int(arguments[1]), (1, 4, 3) if arguments[2:] == ["few"] else (1, 5, 16, 17, 64, 2))
    if arguments[:1] == ["--few"]:
        return few()
    if arguments[:1] == ["--stop"]:
        return stopped(arguments[1])
    unknown = [name for name in arguments if name not in SECTIONS]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: not a section; there are {', '.join(SECTIONS)}")
    need_gpu()
    say(f"{torch.cuda.get_device_name()}, {sms()} SMs, torch {torch.__version__}, {arch()}")
    precompile(arguments or list(SECTIONS))
    for name in arguments or SECTIONS:
        with section(name):
            SECTIONS[name]()
    print("\n".join(["", *summary, *(f"FAILED {text[:300]}" for text in failures[:20])]), flush=True)
    print(f"{len(failures)} failures, {time.time() - _start:.0f} s", flush=True)
    write_json("tail_lab", {"results": results, "failures": failures})
    os._exit(bool(failures))


if __name__ == "__main__":
    main()
