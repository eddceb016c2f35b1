"""benchmarks/tail_stages.py without a GPU: what it makes of the kernels' source, and how it reads stamps."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tail_emulator
import torch
from kernel_checks import faults
from tail_emulator import Ranks, Recorded, outputs
from torch import Tensor

from k3comm.kernels import reference, tail_fusion
from k3comm.kernels.compile import FOLDER, CompiledKernel, compile_kernel
from k3comm.kernels.tail_fusion import Entry, Form, LaneAddresses
from k3comm.kernels.tail_geometry import Geometry
from k3comm.settings import Settings

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
lab: Any = importlib.import_module("tail_lab")
stages: Any = importlib.import_module("tail_stages")

K3 = Geometry.choose(lab.K3[0], lab.K3[1], stages.WORLD, arch="sm_90a", capacity=132)
EDITED = {"stamped": stages.STAMPED} | {name: arm.edits for name, arm in stages.LEFT_OUT.items() if arm.edits}


# Sources


def kernels(edits: Sequence[Any], folder: Path) -> list[CompiledKernel]:
    """The exchange of few rows and of many, and the finish; none of them spills."""
    exchange, *_, last, finish, _ = stages.variants(K3, stages.write_sources(folder / "sources", edits))
    found = []
    for variant, entry in ((exchange, Entry.tail_exchange), (last, Entry.tail_exchange), (finish, Entry.tail_finish)):
        assert variant.entry == entry.name
        kernel = compile_kernel(variant, "sm_90a", Settings(cache_dir=folder / "cache"))
        assert faults(variant, kernel) == []
        found.append(kernel)
    return found


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> list[CompiledKernel]:
    return kernels((), tmp_path_factory.mktemp("shipped"))


POLL, LOAD, STORE, PRODUCT, RELEASE = "ld.relaxed.sys", "ld.global.cg", "st.global", "wgmma.mma_async", "red.release"
FEWER = {
    "stamped": {},
    "no wait for latent": {POLL: "exchange"},
    "no gather": {POLL: "finish"},
    "no products": {PRODUCT: "exchange"},
    "no partial sums": {STORE: "exchange", LOAD: "finish"},
    "no release": {RELEASE: "finish"},
}
"""Of which instructions a kernel has fewer then; of all others it has as many as what ships."""


@pytest.mark.parametrize("name", EDITED)
def test_sources_compile_and_lack_just_what_is_left_out(
    name: str, shipped: list[CompiledKernel], tmp_path: Path
) -> None:
    for number, (now, before) in enumerate(zip(kernels(EDITED[name], tmp_path), shipped, strict=True)):
        kernel = now.entry.removeprefix("tail_")
        fewer = {what: kernel in (FEWER[name].get(what),) for what in (POLL, LOAD, STORE, PRODUCT, RELEASE)}
        counts = {what: (now.ptx.count(what), before.ptx.count(what)) for what in fewer}
        assert {what: few < many for what, (few, many) in counts.items()} == fewer
        assert all(few == many for what, (few, many) in counts.items() if not fewer[what])
        if name in ("no products", "no release"):
            assert all(counts[what][0] == 0 for what in (PRODUCT, RELEASE) if fewer[what])
        more = now.ptx.count("st.volatile") - before.ptx.count("st.volatile")
        two_shots = number == 1 and K3.two_shot(K3.tokens[-1])
        shown = [stage for stage in stages.STAGES.values() if two_shots or not stage.two_shots]
        mine = [stage for stage in shown if (stage.where == "exchange") == (kernel == "exchange")]
        assert more == (len(mine) if name == "stamped" else 0)


@pytest.mark.parametrize("sources", [["nothing", ""], ["this and this", ""], ["this", "this"]])
def test_a_place_that_is_not_there_once_is_refused(sources: list[str]) -> None:
    with pytest.raises(ValueError, match=r"have this [02] times, and not once: 'this'"):
        stages.edited(sources, [stages.Edit("this", "that")])


def test_kernels_are_built_from_another_folder_for_a_while(tmp_path: Path) -> None:

    def fail() -> None:
        with stages.built_from(tmp_path):
            assert tail_fusion.kernel_variant(K3, Entry.tail_finish).folder == tmp_path
            raise RuntimeError("out")

    with pytest.raises(RuntimeError, match="out"):
        fail()
    assert tail_fusion.kernel_variant(K3, Entry.tail_finish).folder == FOLDER


# Stamps


def test_nanoseconds_of_today_are_told_apart() -> None:
    """Two CTAs of the exchange, one of the finish and the one for credits; a call takes 1000 ns."""
    began = 1_700_000_000_000_000_001
    parts = {
        where: torch.zeros(stages.KEPT, 2, len(stages.STAGES), dtype=torch.int64) for where in ("exchange", "finish")
    }
    parts["credits"] = parts["finish"][:, 1:]
    parts["finish"] = parts["finish"][:, :1]
    for slot, stage in enumerate(stages.STAGES.values()):
        for call in range(stages.KEPT):
            for cta in range(parts[stage.where].shape[1]):
                parts[stage.where][call, cta, slot] = began + 1000 * call + 3 * slot + cta if stage.time else 7
    assert stages.missing(parts, True) == []
    names = list(stages.STAGES)
    first, last = names.index("BEGUN"), names.index("DONE")
    alone, found = stages.timeline(parts, isolated=True), stages.timeline(parts, isolated=False)
    for slot, (name, stage) in enumerate(stages.STAGES.items()):
        ctas = [0, 1, 1] if stage.where == "exchange" else [0, 0, 0]
        assert alone[name] == ([3 * (slot - first) + cta for cta in ctas] if stage.time else [7, 7, 7])
        assert found[name] == ([1000 + 3 * (slot - last) + cta for cta in ctas] if stage.time else [7, 7, 7])
    assert stages.clock_step(parts) == 1
    box = 2 * K3.columns * K3.latent_size / 28
    span = 3 * (names.index("OPENED") - names.index("ASKED"))
    assert stages.reading(parts, K3, 8) == pytest.approx((7 - 3) * box / span / 1e3)
    assert stages.reading(parts, K3, 64) is None  # in a ring
    parts["exchange"][3, 1, first] = 0
    parts["exchange"][..., names.index("OPENED")] = 0  # not every window has to open
    parts["exchange"][5, 0, names.index("SUMMED")] = 0
    assert (stages.missing(parts, False), stages.missing(parts, True)) == (["BEGUN"], ["BEGUN", "SUMMED"])
    span = 3 * (names.index("ALL_ASKED") - names.index("ASKED"))
    assert stages.reading(parts, K3, 8) == pytest.approx((28 - 3) * box / span / 1e3)


# On the emulator, in loopback as on a GPU


NEEDS_GXX = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is built by g++")
SHAPES, CAPACITY, RING = {False: (448, 256), True: (256, 320)}, 3, 2
"""In two shots there have to be two groups."""


def loopback(edits: Sequence[Any], folder: Path, monkeypatch: pytest.MonkeyPatch, two_shots: bool = False) -> Ranks:
    """One rank that stands for two; weights come in a ring."""
    rows = 32 if two_shots else 16
    monkeypatch.setattr(tail_emulator, "FOLDER", stages.write_sources(folder / "sources", edits))
    cut = Geometry.choose(*SHAPES[two_shots], 2, arch="sm_90a", capacity=CAPACITY)
    assert cut.box_rows
    assert cut.blocks == 2
    group = Ranks(tail_emulator.build(folder / "built", cut, rows, ring=RING, two_shot=two_shots), cut, rows)
    group.blocks = group.blocks[:1]
    lane = LaneAddresses.of_lane(group.layout, 0, rank=0, blocks=[group.blocks[0].data_ptr()] * 2, loopback=True)
    group.tails = [Recorded(cut, 0, [lane], 1.0, rows, two_shots)]
    return group


@cache
def case_of(shape: tuple[int, int], m: int, seed: int) -> tuple[reference.Case, Tensor]:
    case = reference.integer_case(2, m, *shape, dtype=torch.bfloat16, seed=seed)
    return case, reference.round_once(case.truth(), torch.bfloat16)


def chain(group: Ranks, rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Asks for a call of each number of rows: each rank's columns as they should be, and the results.

    What the first rank has stands for what both have: half the sum of the latent, and the other's shared columns where
    they are sent from.
    """
    cut, kept = group.geometry, []
    for number, m in enumerate(rows):
        case, expected = case_of((cut.hidden_size, cut.latent_size), m, number % 3)
        out = outputs(cut, m)[0]
        group.tails[0](
            routed=case.routed.sum(0) / 2,
            shared=torch.cat([case.shared[0, :, : cut.columns], case.shared[1, :, : cut.columns]], 1),
            residual=case.residual,
            up_weight=case.up_weight,
            sharded=False,
            norm_weight=case.norm_weight,
            out=out,
            form=Form.SPLIT,
        )
        kept.append((expected[:, : cut.columns], out))
    return kept


@NEEDS_GXX
@pytest.mark.parametrize("two_shots", [False, True])
def test_stamps_of_every_stage_and_the_results_of_what_ships(
    two_shots: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = loopback(stages.STAMPED, tmp_path, monkeypatch, two_shots)
    cut = group.geometry
    stamps = stages.blank(cut, 1)
    group.tails[0]._arguments[0].expert_weights = stamps.data_ptr()
    m = 17 if two_shots else 5
    kept = chain(group, [m] * (stages.KEPT + 3))  # so that the oldest is not the first
    assert group.run(seed=1) == 0
    assert all(torch.equal(block, expected) for expected, out in kept for block in out.split(cut.columns, 1))
    parts = stages.by_kernel(stamps, cut, cut.finish_blocks(m, 1))
    assert stages.missing(parts, two_shots) == []
    at = {name: parts[stage.where][..., slot] for slot, (name, stage) in enumerate(stages.STAGES.items())}
    for order in (
        ("BEGUN", "FREED", "PUBLISHED", "LATENT", *(["SUMMED"] if two_shots else []), "FIRST"),
        ("FIRST", "COME", "LANDED", "ISSUED", "EMPTIED", "MADE", "ENDED"),
        ("FREED", "TURN", *([] if two_shots else ["LATENT"])),
        *([("SUMMED", "ALL_SUMMED", "Z_ASKED")] if two_shots else []),
        ("ASKED", "ALL_ASKED"),
        ("STARTED", "KNOWN", "RECEIVED", "SENT", "GATHERED", "DONE"),
        ("CREDITS", "CREDITED"),
    ):
        for earlier, later in pairwise(order):
            assert bool((at[earlier] < at[later]).all()), (earlier, later)
    assert bool((at["ENDED"].amax(1) < at["KNOWN"].amin(1)).all())
    assert bool((at["DONE"][:-1].amax(1) < at["FREED"][1:].amin(1)).all())
    # A box of the emulator is there before its loader asks for the next one: no window has to open.
    absent = {"OPENED", "AHEAD"} | {name for name, stage in stages.STAGES.items() if stage.two_shots and not two_shots}
    assert set(stages.STAGES) - set(stages.timeline(parts, isolated=False)) == absent


@NEEDS_GXX
def test_no_chain_without_a_stage_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without all of them at once but the release, for which the emulator has no word."""
    edits = [edit for name, arm in stages.LEFT_OUT.items() if name != "no release" for edit in arm.edits]
    group = loopback(edits, tmp_path, monkeypatch)
    rows = (16, 1, 9, 2, 16, 5, 3)
    for seed in range(4):
        group.fill()
        chain(group, rows)
        assert group.run(seed=seed, skew=3) == 0
        assert group.completed() == [len(rows)]
