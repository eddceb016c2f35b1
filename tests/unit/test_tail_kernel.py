"""The fused tail's kernels: how they are cut, what is compiled, and, on a CPU emulator, what they compute."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import hypothesis.strategies as st
import pytest
import tail_emulator
import torch
from hypothesis import given
from tail_emulator import Overlap, Ranks, outputs
from torch import Tensor

from k3comm.buffers import mailbox
from k3comm.errors import InputError
from k3comm.kernels import reference
from k3comm.kernels.compile import FOLDER, SHARED_LIMITS
from k3comm.kernels.expiry import OPERATIONS, PHASES, RECORD_WORDS, Expired
from k3comm.kernels.finalize import Deferred, finalize
from k3comm.kernels.tail_fusion import (
    COMPLETIONS,
    COUNTER_BYTES,
    FRESH_WEIGHTS,
    Arguments,
    Entry,
    Form,
    aligned_rows,
    aligned_vector,
    variants,
)
from k3comm.kernels.tail_geometry import MAX_CELLS, MAX_ROWS, MAX_SLICE, STATIC_SHARED, STEP, STRIPE, TILE, Geometry
from k3comm.tiers.tier import Numerics

BF16 = torch.bfloat16
ARCHS = st.sampled_from(sorted(SHARED_LIMITS))


# Geometry


@given(
    world=st.integers(2, 16),
    per_rank=st.integers(1, 1024),
    fragments=st.integers(1, 1280),
    arch=ARCHS,
    capacity=st.integers(33, 300),
)
def test_a_geometry_covers_everything_once_and_fits(
    world: int, per_rank: int, fragments: int, arch: str, capacity: int
) -> None:
    g = Geometry.choose(8 * world * per_rank, 8 * fragments, world, arch=arch, capacity=capacity)
    assert g.columns == 8 * per_rank
    assert 1 <= g.blocks <= min(capacity, MAX_CELLS) - 1
    assert g.slice_width % STEP == 0
    assert g.slice_width <= MAX_SLICE
    assert (g.slices - 1) * g.slice_width < g.latent_size <= g.slices * g.slice_width
    tiles = -(-g.columns // TILE)
    assert (g.groups - 1) * g.group_tiles < tiles <= g.groups * g.group_tiles
    sizes = [g.shared_bytes(t) for t in g.tokens]
    assert sizes == sorted(sizes)
    assert sizes[-1] + STATIC_SHARED <= SHARED_LIMITS[arch]
    for rows in (1, 16, MAX_ROWS):
        assert 1 <= g.finish_blocks(rows, capacity) <= 4 * capacity


@given(
    world=st.integers(2, 16),
    per_rank=st.integers(1, 128),
    stripes=st.integers(1, 112),
    capacity=st.integers(1, 150),
)
def test_a_cut_for_boxes_is_equal_everywhere(world: int, per_rank: int, stripes: int, capacity: int) -> None:
    hidden, latent = 16 * world * per_rank, STRIPE * stripes
    try:
        g = Geometry.choose(hidden, latent, world, arch="sm_90a", capacity=capacity)
    except InputError:
        return
    if not g.box_rows:
        return
    rows = g.group_tiles * TILE
    assert g.groups * rows == g.columns
    assert g.slices * g.slice_width == g.latent_size
    assert g.slice_width % STRIPE == 0
    assert 64 <= rows <= 256
    assert rows % g.box_rows == 0
    assert g.box_rows % 8 == 0
    assert g.blocks <= capacity - 1
    assert g.threads >= 128 * -(-rows // 64)
    assert g.threads >= g.slice_width // 8
    other = Geometry.choose(hidden, latent, world, arch="sm_100a", capacity=max(capacity, 64))
    assert other.box_rows == 0


def test_a_cut_for_boxes_leaves_room_for_what_is_not_asked_for() -> None:
    """These widths once had a ring that the launch refused: the compiler's and the driver's share was forgotten."""
    g = Geometry.choose(2496, 4096, 2, arch="sm_90a", capacity=132)
    assert g.box_rows
    for two_shot in (False, True):
        sizes = [g.shared_bytes(tokens, two_shot) for tokens in g.tokens]
        assert max(sizes) + STATIC_SHARED <= SHARED_LIMITS["sm_90a"]


def test_rows_of_z_never_share_a_bank() -> None:
    """A quarter-warp reads 64 bytes of each of two neighbouring rows at once."""
    for width in range(STEP, MAX_SLICE + 1, STEP):
        g = Geometry(
            hidden_size=16, latent_size=width, world_size=2, arch="sm_90a",
            slice_width=width, slices=1, group_tiles=1, groups=1,
        )  # fmt: skip
        rows = 8
        pitch = (g.shared_bytes(8) - 4 * rows * width // 8) // (2 * rows)
        assert pitch >= 2 * width
        assert pitch % 16 == 0
        banks = [(row * pitch + byte) // 4 % 32 for row in range(2) for byte in range(0, 64, 4)]
        assert len(set(banks)) == len(banks)


def test_kimi_k3_keeps_the_prototype_s_cut() -> None:
    g = Geometry.choose(7168, 3584, 2, arch="sm_90a", capacity=132)
    assert (g.groups, g.group_tiles, g.slices, g.slice_width, g.box_rows) == (16, 14, 8, 448, 56)
    assert (g.threads, [g.block(tokens) for tokens in g.tokens]) == (512, [544, 544, 544, 544, 576])
    assert (g.block(64, two_shot=False), g.block(32, two_shot=True), g.block(16, two_shot=True)) == (544, 576, 544)
    assert [(g.ring(tokens, two_shot=False), g.ring(tokens, two_shot=True)) for tokens in (32, 64)] == [(6, 6), (4, 5)]
    assert g.partial_bytes == 64 * 8 * 3584 * 4
    assert g.square_bytes == 16 * 64 * 8 * 4
    assert [g.finish_blocks(m, 132) for m in (1, 2, 64)] == [8, 15, 449]


@pytest.mark.parametrize(("world", "twice"), [(2, (64,)), (4, (32, 64)), (8, (32, 64)), (16, (32, 64))])
def test_many_rows_of_many_ranks_are_summed_once(world: int, twice: tuple[int, ...]) -> None:
    g = Geometry.choose(7168, 3584, world, arch="sm_90a", capacity=132)
    assert tuple(tokens for tokens in g.tokens if g.two_shot(tokens)) == twice
    assert not any(g.two_shot(tokens, False) for tokens in g.tokens)
    assert tuple(tokens for tokens in g.tokens if g.two_shot(tokens, True)) == (32, 64)
    words, squares, z = 8 * g.blocks, 4 * 64 * g.slices, 4 * 64 * 3584
    assert g.two_shot_bytes() - squares - z in range(words, words + 128)
    assert g.workspace_bytes() == g.partial_bytes + g.square_bytes + g.two_shot_bytes()
    assert g.workspace_bytes(False) == g.partial_bytes + g.square_bytes
    assert g.workspace_bytes(cells=True) - g.workspace_bytes(True) == g.cell_bytes == 16 * g.slices * g.columns * 5
    assert g.two_shot_bytes(False) == 0
    general = Geometry.choose(7168, 3584, world, arch="sm_90a", capacity=132, general=True)
    assert not any(general.two_shot(tokens, True) for tokens in general.tokens)
    assert general.two_shot_bytes() == 0


def test_two_shots_want_several_groups_and_few_fragments_a_thread() -> None:
    """With one group each row is summed once anyway; with many fragments a thread registers spilled."""
    one = Geometry.choose(1024, 512, 16, arch="sm_90a", capacity=132)
    assert (one.box_rows > 0, one.groups) == (True, 1)
    assert not any(one.two_shot(tokens, asked) for tokens in one.tokens for asked in (None, True))
    for world in range(2, 17):
        for hidden, latent in ((1024 * world, 1536), (512 * world, 3072), (256 * world, 512)):
            g = Geometry.choose(hidden, latent, world, arch="sm_90a", capacity=24)
            for tokens in g.tokens:
                share = -(-tokens // g.groups)
                assert not g.two_shot(tokens, True) or share * g.slice_width // 8 <= 4 * g.threads


def test_windows_as_they_were_measured() -> None:
    """By rows where an SM holds the weights of one CTA; two boxes where it holds those of two."""
    one, two = (Geometry.choose(7168, 3584, world, arch="sm_90a", capacity=132) for world in (2, 4))
    expected = {1: (4, 4), 2: (4, 4), 3: (3, 3), 8: (3, 3), 9: (2, 4), 16: (2, 4), 17: (3, 3), 32: (3, 3), 33: (8, 8)}
    assert {rows: one.windows(rows) for rows in expected} == expected
    assert one.windows(64, two_shot=False) == (3, 3)
    plain = {1: (6, 6), 16: (6, 6), 32: (6, 6), 64: (8, 8)}
    assert {rows: one.windows(rows, pdl=False) for rows in plain} == plain
    assert {two.windows(rows) for rows in expected} == {(2, 2)}


@pytest.mark.parametrize("world", [4, 8, 16])
def test_kimi_k3_on_more_ranks_fits_an_sm_twice(world: int) -> None:
    """Call n + 1 loads its weights under call n: two blocks and one of the finish, a KiB each for the driver."""
    g = Geometry.choose(7168, 3584, world, arch="sm_90a", capacity=132)
    assert g.box_rows == 56
    assert g.threads == 256
    for tokens in g.tokens[:2]:
        assert 2 * (g.shared_bytes(tokens) + 1024) + 1024 <= 228 * 1024


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((100, 64, 2, "sm_90a", 8), "hidden_size: 100 given; accepted are multiples of 16"),
        ((64, 60, 2, "sm_90a", 8), "latent_size: 60 given; accepted are multiples of 8"),
        ((64, 64, 1, "sm_90a", 8), "world_size: 1 given; accepted are 2 to 16"),
        ((64 * 17, 64, 17, "sm_90a", 8), "world_size: 17 given; accepted are 2 to 16"),
        ((64, 64, 2, "sm_80", 8), "arch: 'sm_80' given"),
        ((64, 64, 2, "sm_90a", 1), "capacity: 1 given; accepted are whole numbers from 2"),
        ((64, 4096, 2, "sm_90a", 4), "latent_size: 4096 given; accepted are up to 1536 with 4 resident blocks"),
    ],
)
def test_a_shape_that_is_not_served(arguments: tuple[int, int, int, str, int], text: str) -> None:
    hidden, latent, world, arch, capacity = arguments
    with pytest.raises(InputError, match=re.escape(text)):
        Geometry.choose(hidden, latent, world, arch=arch, capacity=capacity)


def test_tokens() -> None:
    boxed = Geometry.choose(7168, 3584, 2, arch="sm_90a", capacity=132)
    general = Geometry.choose(7168, 3584, 2, arch="sm_90a", capacity=132, general=True)
    assert general.box_rows == 0
    assert [general.tokens_for(m) for m in (1, 8, 9, 16, 17, 32, 33, 64)] == [8, 8, 16, 16, 32, 32, 64, 64]
    assert [boxed.tokens_for(m) for m in (1, 4, 5, 8, 9, 16, 17, 64)] == [4, 4, 8, 8, 16, 16, 32, 64]
    for g in (boxed, general):
        for rows in (0, 65, True):
            with pytest.raises(InputError, match="accepted are 1 to 64"):
                g.tokens_for(rows)


# The source


def test_constants_are_the_mailbox_s_own() -> None:
    source = (FOLDER / "mailbox.cuh").read_text(encoding="utf-8")
    constants = dict(re.findall(r"constexpr \w+ (\w+) = (\w+);", source))
    assert int(constants["EMPTY"].rstrip("u"), 16) == mailbox.EMPTY
    assert int(constants["REPLACEMENT"].rstrip("u"), 16) == mailbox.REPLACEMENT
    assert int(constants["MAX_CELLS"]) == MAX_CELLS
    assert COUNTER_BYTES <= mailbox.COUNTER_BYTES
    assert "constexpr u64 COMPLETIONS = 1 << 20;" in source
    assert COMPLETIONS == 1 << 20
    phases = re.findall(r"PHASE_(\w+) = (\d+)", source + (FOLDER / "lane_one_shot.cu").read_text(encoding="utf-8"))
    assert {int(n): name.lower() for name, n in phases} == PHASES
    operations = re.search(r"enum Operation : u32 \{(.*?)\}", source)
    assert operations is not None
    assert {int(n): name.lower() for name, n in re.findall(r"(\w+) = (\d)", operations[1])} == OPERATIONS


def test_arguments_are_the_kernels_own() -> None:
    """The size is asserted by the source; here the names, in order."""
    source = (FOLDER / "tail_fusion.cu").read_text(encoding="utf-8")
    body = re.search(r"struct Arguments \{(.*?)\n\};", source, re.DOTALL)
    assert body is not None
    names = []
    plain = re.sub(r"#if.*?#else\n(.*?)#endif", r"\1", body[1], flags=re.DOTALL)
    for line in re.sub(r"//.*", "", plain).split(";"):
        names += [re.sub(r"\[\d+\]", "", part).split()[-1].lstrip("*") for part in line.split(",") if part.strip()]
    assert names == [field[0] for field in Arguments._fields_]
    assert names[0] == "boxes"
    assert ctypes.sizeof(Arguments) % 64 == 0


def test_variants_have_names_of_their_own() -> None:
    found = [variant.name for variant in variants()]
    assert len(set(found)) == len(found)
    assert {variant.entry for variant in variants()} == {entry.name for entry in Entry}
    assert {variant.transport for variant in variants()} == {None, "peer", "multicast"}


def test_no_store_to_a_multicast_address_but_multimem() -> None:
    """The two addresses go to `store_all` alone, and nothing creates a multicast object."""
    source = "".join((FOLDER / name).read_text(encoding="utf-8") for name in tail_emulator.SOURCES)
    code = re.sub(r"//.*", "", source)
    assert len(re.findall(r"latent_all", code)) == 2
    assert len(re.findall(r"gather_all", code)) == 2
    assert re.findall(r"\bto_all\b.*", code) == [
        "to_all, u64 offset, T v) {",
        "to_all + offset, v);",
    ]
    for path in FOLDER.rglob("*.cu*"):
        assert "MulticastCreate" not in path.read_text(encoding="utf-8")


# Layouts


def test_rows_that_fit_are_not_copied() -> None:
    x = torch.zeros(4, 32, dtype=BF16)
    fitting = [x, x[1:], x[:, :16], x[:, 8:], x[:1, 8:], torch.zeros(64, dtype=BF16).as_strided((1, 16), (3, 1))]
    assert all(aligned_rows(y).data_ptr() == y.data_ptr() for y in fitting)
    for y in (x[:, 4:], x.t(), torch.zeros(4, 36, dtype=BF16)[:, :32][:, ::2], torch.zeros(4, 36, dtype=BF16)):
        copy = aligned_rows(y)
        assert copy.data_ptr() != y.data_ptr()
        assert copy.is_contiguous()
        assert torch.equal(copy, y)
    v = torch.zeros(32)
    assert aligned_vector(v[4:]).data_ptr() == v[4:].data_ptr()
    assert aligned_vector(v[1:]).data_ptr() != v[1:].data_ptr()
    assert aligned_vector(v[::2]).is_contiguous()


def test_an_expired_wait_is_told() -> None:
    record = torch.zeros(RECORD_WORDS, dtype=torch.int32)
    assert Expired.read(record) is None
    record[:9] = torch.tensor([1, 1, 7, -1, 2, 2, 3, 1, 0])
    found = Expired.read(record)
    assert found == Expired("moe_tail", 7, 0, (2 << 32) + 0xFFFFFFFF, "latent", 3, 1, 0)
    error = found.error(4, 0.5)
    assert error.ranks == (1,)
    assert str(error) == (
        "moe_tail on rank 0 of 4: layer 7, call 12884901887 of lane 0, phase latent, token 3: nothing from rank 1 "
        "within 0.5 s (settings.poll_deadline); it is late, or gone"
    )
    own = Expired("moe_tail", 1, 1, 2, "completion", 0, 3, 3).error(4, 30.0)
    assert "a kernel of this rank did not end within 30 s" in str(own)
    blocks = Expired("moe_tail", 1, 1, 2, "partials", 0, 3, 3).error(4, 30.0)
    assert "its other blocks did not come within 30 s" in str(blocks)


# On the emulator


NEEDS_GXX = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is built by g++")

CUTS = {
    # hidden, latent, world, capacity: several slices and groups, a last slice and a last tile that are not whole
    "two": (160, 136, 2, 13),
    "three": (96, 104, 3, 7),
    "one block": (64, 40, 2, 2),
    "sixteen": (256, 72, 16, 5),
    # rows of several chunks of 32 fragments, and a last group with fewer tiles
    "long rows": (1072, 552, 2, 10),
    # sm_90a's path: two slices and groups of one tile each; tiles that overlap and two stripes a slice; many ranks
    "boxes": (256, 128, 2, 5),
    "wide boxes": (448, 256, 4, 3),
    "ring of boxes": (448, 256, 2, 2),
    "ring of sums": (384, 256, 2, 4),
    "odd shares": (640, 192, 2, 6),
    "boxes of six": (384, 64, 6, 2),
}
BOXES = ("boxes", "wide boxes", "ring of boxes", "ring of sums", "odd shares", "boxes of six")
RINGS = {"ring of boxes": 2, "ring of sums": 2}
"""Stripes of weights in shared memory, of four."""


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ranks]:
    folder = tmp_path_factory.mktemp("emulator")

    @cache
    def library(
        cut: str, tokens: int, weights: torch.dtype | None, two_shot: bool | None, cells: bool
    ) -> tuple[Any, Geometry, int]:
        hidden, latent, world, capacity = CUTS[cut]
        g = Geometry.choose(hidden, latent, world, arch="sm_90a", capacity=capacity)
        assert (g.box_rows > 0) == (cut in BOXES)
        assert not two_shot or g.two_shot(tokens, two_shot)
        place = folder / f"{cut} {tokens} {weights} {two_shot} {cells}"
        return tail_emulator.build(place, g, tokens, weights, RINGS.get(cut, 0), two_shot, cells), g, tokens

    def make(
        cut: str,
        tokens: int = 16,
        weights: torch.dtype | None = None,
        two_shot: bool | None = None,
        cells: bool = False,
        **options: Any,
    ) -> Ranks:
        made = library(cut, tokens, weights, two_shot, cells)
        return Ranks(*made, two_shot=two_shot, cells=cells, **options)

    return make


def ask(
    group: Ranks, case: reference.Case, m: int, form: Form, *, deferred: Sequence[Deferred] = (), **options: Any
) -> list[Tensor]:
    """Has every rank make one call of the first m rows, next in its list; of what is `deferred` if that is given."""
    outs = outputs(group.geometry, m)
    for rank, tail in enumerate(group.tails):
        tail(
            routed=deferred[rank] if deferred else case.routed[rank, :m],
            shared=case.shared[rank, :m],
            residual=None if case.residual is None else case.residual[:m],
            up_weight=case.up_weight,
            sharded=False,
            norm_weight=case.norm_weight,
            up_bias=case.up_bias,
            routed_scale=case.routed_scale,
            out=outs[rank],
            form=form,
            **options,
        )
    return outs


def exact(group: Ranks, m: int, seed: int = 0, **kind: Any) -> tuple[reference.Case, Tensor]:
    """A case in which every order of every sum gives the same bits, and these."""
    g = group.geometry
    case = reference.integer_case(g.world_size, m, g.hidden_size, g.latent_size, dtype=BF16, seed=seed, **kind)
    return case, reference.round_once(case.truth(), BF16)


@NEEDS_GXX
@pytest.mark.parametrize(
    ("cut", "overlap", "cells"),
    [
        *((cut, Overlap.NONE, False) for cut in CUTS),
        *((cut, overlap, False) for cut in ("three", "boxes") for overlap in (Overlap.PDL, Overlap.FOREIGN)),
        *((cut, overlap, True) for cut in ("three", "boxes") for overlap in (Overlap.NONE, Overlap.PDL)),
        ("long rows", Overlap.NONE, True),
    ],
)
def test_the_kernels_compute_the_tail(ranks: Callable[..., Ranks], cut: str, overlap: Overlap, cells: bool) -> None:
    """Chains of calls of changing m, in both forms, ranks running ahead of each other: all regions, all clears."""
    group = ranks(cut, cells=cells)
    kept = []
    rows = (9, 1, 5, 16, 2, 1, 8) if cut not in ("sixteen", "long rows") else (3, 9)
    for number, m in enumerate(rows):
        case, expected = exact(group, m, number, bias=True, routed_scale=0.5)
        kept.append((expected, ask(group, case, m, list(Form)[number % 2])))
    assert group.run(seed=1, skew=4, overlap=overlap) == 0
    assert group.completed() == [len(rows)] * group.geometry.world_size
    assert all(torch.equal(out, expected) for expected, outs in kept for out in outs)


@NEEDS_GXX
@pytest.mark.parametrize(
    ("cut", "overlap", "rows"),
    [
        *(("boxes", overlap, (40, 17)) for overlap in Overlap),
        ("ring of sums", Overlap.NONE, (40,)),
        ("odd shares", Overlap.NONE, (17,)),  # 13 rows a group and 3 stripes: barriers once lay at odd words
        pytest.param("boxes", Overlap.PDL, (64, 33, 17, 40), marks=pytest.mark.slow),
        pytest.param("wide boxes", Overlap.PDL, (17,), marks=pytest.mark.slow),
        pytest.param("boxes of six", Overlap.NONE, (17,), marks=pytest.mark.slow),
    ],
)
def test_two_shots_give_the_bits_of_one(
    ranks: Callable[..., Ranks], cut: str, overlap: Overlap, rows: Sequence[int]
) -> None:
    """In both forms, ranks running ahead of each other."""
    two, one = ranks(cut, 64, two_shot=True), ranks(cut, 64, two_shot=False)
    results = []
    for group in (two, one):
        kept = []
        for number, m in enumerate(rows):
            g = group.geometry
            case = reference.random_case(g.world_size, m, g.hidden_size, g.latent_size, dtype=BF16, seed=number)
            kept.append(ask(group, case, m, list(Form)[number % 2]))
        assert group.run(seed=2, skew=4 if group is two else 0, overlap=overlap if group is two else Overlap.NONE) == 0
        assert group.completed() == [len(rows)] * group.geometry.world_size
        results.append([out for outs in kept for out in outs])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@NEEDS_GXX
def test_two_shots_of_both_variants_share_a_workspace(ranks: Callable[..., Ranks]) -> None:
    """Calls of few and of many rows in turn, by different kernels: neither may take the other's z for a flag."""
    group, narrow = ranks("boxes", 64, two_shot=True), ranks("boxes", 32, two_shot=True)
    libraries = {40: group.library, 20: narrow.library}
    for number, m in enumerate((40, 20, 40, 20, 20, 40)):
        case, expected = exact(group, m, number)
        outs = ask(group, case, m, list(Form)[number % 2])
        group.library = libraries[m]
        assert group.run(seed=number, skew=3) == 0
        group.library.land()  # what the other one knows nothing of
        assert all(torch.equal(out, expected) for out in outs), (number, m)


@NEEDS_GXX
def test_what_is_optional(ranks: Callable[..., Ranks]) -> None:
    group = ranks("two")
    for kind in ({"norm": False}, {"residual": False}, {"norm": False, "residual": False, "routed_scale": 2.0}):
        case, expected = exact(group, 7, **kind)
        outs = ask(group, case, 7, Form.SPLIT)
        assert group.run() == 0
        assert all(torch.equal(out, expected) for out in outs)


@NEEDS_GXX
def test_sixty_four_rows(ranks: Callable[..., Ranks]) -> None:
    group = ranks("two", 64)
    case, expected = exact(group, 64)
    kept = [(m, ask(group, case, m, form)) for m in (64, 33) for form in Form]
    assert group.run() == 0
    assert all(torch.equal(out, expected[:m]) for m, outs in kept for out in outs)


@NEEDS_GXX
@pytest.mark.parametrize("cut", BOXES)
def test_many_rows_at_once(ranks: Callable[..., Ranks], cut: str) -> None:
    """Also where the weights come in a ring."""
    group = ranks(cut, 64)
    kept = []
    for number, m in enumerate((17, 35, 1, 32, 64)):
        case, expected = exact(group, m, number, bias=True)
        kept.append((expected, ask(group, case, m, list(Form)[number % 2])))
    assert group.run(seed=2, skew=5) == 0
    assert all(torch.equal(out, expected) for expected, outs in kept for out in outs)


@NEEDS_GXX
@pytest.mark.parametrize("calls", [2**32 - 2, 2**40 + 1])
def test_counters_do_not_wrap(ranks: Callable[..., Ranks], calls: int) -> None:
    group = ranks("three")
    group.fill(calls)
    kept = []
    for number, form in enumerate((*Form, *Form)):
        case, expected = exact(group, 5 - number, number)
        kept.append((expected, ask(group, case, 5 - number, form)))
    assert group.run(seed=3, skew=3) == 0
    assert group.completed() == [calls + 4] * 3
    assert all(torch.equal(out, expected) for expected, outs in kept for out in outs)


@NEEDS_GXX
def test_a_row_s_bits_depend_on_the_row_alone(ranks: Callable[..., Ranks]) -> None:
    """Real numbers, so that any other order would show; and the accuracy that two BF16 terms have."""
    group = ranks("two")
    g = group.geometry
    case = reference.random_case(2, 16, g.hidden_size, g.latent_size, dtype=BF16, seed=5, bias=True, routed_scale=0.7)
    kept = [(m, ask(group, case, m, form)) for m in (16, 1, 9) for form in Form]
    assert group.run() == 0
    first = kept[0][1][0]
    assert all(torch.equal(out, first[:m]) for m, outs in kept for out in outs)
    accuracy = reference.measure(first, case.truth(), case.residual)
    assert accuracy.error <= reference.K0_ERROR_OVER_IDEAL * accuracy.ideal_error
    assert accuracy.misrounded < 5 * reference.K0_PAIR_MISROUNDED  # of 2560 elements only


@NEEDS_GXX
def test_nor_on_how_many_rows_are_multiplied_at_once(ranks: Callable[..., Ranks]) -> None:
    """The variants of sm_90a's path. That the tensor cores agree is for a GPU to show."""
    found = []
    for tokens in (16, 4, 8, 32, 64):
        group = ranks("boxes", tokens)
        g = group.geometry
        case = reference.random_case(2, 16, g.hidden_size, g.latent_size, dtype=BF16, seed=5, bias=True)
        found += [out for m in (min(16, tokens), 3) for out in ask(group, case, m, Form.SPLIT)]
        assert group.run() == 0
    assert all(torch.equal(out, found[0][: len(out)]) for out in found)
    accuracy = reference.measure(found[0], case.truth(), case.residual)
    assert accuracy.error <= reference.K0_ERROR_OVER_IDEAL * accuracy.ideal_error
    assert accuracy.misrounded < 5 * reference.K0_PAIR_MISROUNDED


@NEEDS_GXX
@pytest.mark.parametrize("cut", ["three", "boxes of six"])
def test_special_values(ranks: Callable[..., Ranks], cut: str) -> None:
    group = ranks(cut)
    g = group.geometry
    case = reference.random_case(g.world_size, 12, g.hidden_size, g.latent_size, dtype=BF16, seed=6)
    assert case.residual is not None
    clean = ask(group, case, 12, Form.SPLIT)
    assert group.run() == 0
    case.routed[0, 1, 8:10].view(torch.int16).fill_(-1)  # exactly an empty word
    case.shared[2, 2].view(torch.int16).fill_(-1)
    case.shared[0, 3, 5], case.shared[2, 3, 40] = float("inf"), float("-inf")
    for x in (case.routed[:, 4], case.shared[:, 4], case.residual[4]):
        x.fill_(-0.0)
    case.routed[:, 5], case.shared[:, 5], case.residual[5] = 1e-40, -1e-40, 0.0
    case.routed[2, 6, 3] = float("inf")
    case.routed[:, 7], case.shared[:, 7], case.residual[7] = 0.0, 0.0, 0.0
    for part in (case.routed, case.shared):  # 2^24 + 1 - 2^24 is 0 in rank order and 1 in two others
        part[0, 7], part[1, 7], part[2, 7] = 2.0**24, 1.0, -(2.0**24)
    case.routed[0, 9, 0] = float("nan")
    case.shared[:, 10] = 3e38
    kept = [ask(group, case, 12, form) for form in (*Form, *Form)]
    assert group.run(skew=5) == 0
    model = case.model(Numerics.K0, pair=True)
    for out in (out for outs in kept for out in outs):
        assert torch.equal(out.view(torch.int16), kept[0][0].view(torch.int16))
    out = kept[0][0]
    assert all(torch.equal(out[row], clean[0][row]) for row in (0, 8, 11))
    assert torch.equal(out.isnan(), model.isnan())
    assert torch.equal(out.isinf(), model.isinf())
    assert torch.equal(out[7], torch.zeros_like(out[7]))
    torch.testing.assert_close(out, model, rtol=2**-7, atol=1e-2, equal_nan=True)
    # Empty words are passed on as other NaNs, so none is ever left over.
    assert not (out.view(torch.int32) == -1).any()


@NEEDS_GXX
@pytest.mark.parametrize(("cut", "weights"), [("two", BF16), ("two", torch.float32), ("boxes", BF16)])
def test_deferred_finalize_gives_the_bits_of_a_ready_sum(
    ranks: Callable[..., Ranks], cut: str, weights: torch.dtype
) -> None:
    ready, later = ranks(cut), ranks(cut, 16, weights)
    g = ready.geometry
    for m, k, count in ((5, 16, 20), (3, 37, 9), (9, 3, 0)):
        generator = torch.Generator().manual_seed(m)
        case = reference.random_case(2, m, g.hidden_size, g.latent_size, dtype=BF16, seed=m)
        given, sums = [], []
        for _ in range(2):
            rows = torch.randn(count, g.latent_size + 8, generator=generator).to(BF16)
            index = torch.randint(-1, max(1, count), (m * k,), generator=generator, dtype=torch.int32)
            index[torch.rand(m * k, generator=generator) < 0.3] = -1
            if not count:
                index.fill_(-1)
            factors = torch.rand(m * k, generator=generator).to(weights)
            sums.append(finalize(Deferred(rows, factors, index, m), g.latent_size))
            unnamed = torch.ones(count, dtype=torch.bool)
            unnamed[index[index >= 0].long()] = False
            rows[unnamed] = float("nan")  # never read
            rows[:, g.latent_size :] = float("nan")
            given.append(Deferred(rows, factors, index, m))
        case.routed.copy_(torch.stack(sums))
        expected = ask(ready, case, m, Form.SPLIT)
        assert ready.run() == 0
        for form in Form:
            outs = ask(later, case, m, form, deferred=given)
            assert later.run() == 0
            assert all(torch.equal(out, expected[0]) for out in outs)


def turns(group: Ranks, libraries: Sequence[Any]) -> bool:
    """Whether calls with and without a finalize to make are right when they follow each other in the same mailboxes: a
    rank's own latent goes through its mailbox in the former only."""
    for number, kind in enumerate((1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1)):
        m = (5, 3, 4, 5, 2)[number % 5]
        case, expected = exact(group, m, number)
        group.library = libraries[kind]
        order = torch.arange(m, dtype=torch.int32)
        deferred = [Deferred(rows, torch.ones(m), order, m) for rows in case.routed] if kind else []
        outs = ask(group, case, m, list(Form)[number % 2], deferred=deferred)
        if group.run(seed=number, skew=3) != 0 or not all(torch.equal(out, expected) for out in outs):
            return False
        group.library.land()
    return True


@NEEDS_GXX
@pytest.mark.parametrize("cut", ["three", "boxes"])
def test_calls_with_and_without_a_finalize_in_turn(ranks: Callable[..., Ranks], cut: str) -> None:
    ready, later = ranks(cut), ranks(cut, 16, torch.float32)
    assert turns(ready, [ready.library, later.library])


@NEEDS_GXX
def test_what_a_finalize_leaves_in_its_own_mailbox_is_seen(
    ranks: Callable[..., Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, later = ranks("boxes"), ranks("boxes", 16, torch.float32)
    tail_emulator.mutate(("!(is_latent && used & 1)", "true"), tmp_path)
    monkeypatch.setattr(tail_emulator, "FOLDER", tmp_path)
    wrong = tail_emulator.build(tmp_path / "built", ready.geometry, 16)
    assert not turns(ready, [wrong, later.library])


@NEEDS_GXX
def test_weights_that_were_copied_for_a_call_are_waited_for(ranks: Callable[..., Ranks]) -> None:
    group = ranks("boxes")
    case, _ = exact(group, 2)
    whole = case.up_weight
    askew = torch.empty(whole.numel() + 1, dtype=BF16)[1:].view_as(whole).copy_(whole)
    for weight, fresh in ((whole, False), (askew, True)):
        ask(group, attrs.evolve(case, up_weight=weight), 2, Form.SPLIT)
        flags = [Arguments.from_buffer_copy(step.arguments).flags for step in group.tails[0].steps]
        assert [bool(one & FRESH_WEIGHTS) for one in flags] == [fresh] * 2
        for tail in group.tails:
            tail.steps.clear()


@NEEDS_GXX
@pytest.mark.parametrize("cut", ["three", "boxes of six"])
def test_layouts_and_the_next_norm(ranks: Callable[..., Ranks], cut: str) -> None:
    group = ranks(cut)
    g = group.geometry
    case, expected = exact(group, 5, bias=True)
    assert case.norm_weight is not None
    assert case.up_bias is not None
    assert case.residual is not None
    outs, normed = outputs(g, 5), outputs(g, 5)
    gain = torch.rand(g.hidden_size) + 0.5
    wide_norm, wide_bias = case.norm_weight.float(), case.up_bias.float()  # they have to live until the run
    apart = torch.full((g.world_size, 5, g.latent_size + 24), float("nan"), dtype=BF16)
    apart[:, :, 8 : 8 + g.latent_size] = case.routed
    wide = torch.full((g.world_size, 5, g.hidden_size + 16), float("nan"), dtype=BF16)
    wide[:, :, 8 : 8 + g.hidden_size] = case.shared
    residual = torch.cat((case.residual, case.residual[:, :24]), 1)[:, : g.hidden_size]
    weight = torch.cat((case.up_weight, case.up_weight[:, :8]), 1)[:, : g.latent_size]
    for rank, tail in enumerate(group.tails):
        tail(
            routed=apart[rank, :, 8 : 8 + g.latent_size],
            shared=wide[rank, :, 8 : 8 + g.hidden_size],
            residual=residual,
            up_weight=weight[rank * g.columns : (rank + 1) * g.columns],
            sharded=True,
            norm_weight=wide_norm,
            up_bias=wide_bias,
            next_norm_weight=gain,
            normed=normed[rank],
            out=outs[rank],
        )
    assert group.run() == 0
    x = expected.double()
    truth = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * gain.double()
    for out, norm in zip(outs, normed, strict=True):
        assert torch.equal(out, expected)
        accuracy = reference.measure(norm, truth)
        assert accuracy.error <= 1.005 * accuracy.ideal_error


@NEEDS_GXX
@pytest.mark.parametrize("cut", ["three", "boxes"])
@pytest.mark.parametrize(("form", "phase"), [(Form.WHOLE, "latent"), (Form.SPLIT, "gather")])
def test_a_rank_that_stops_is_named(ranks: Callable[..., Ranks], cut: str, form: Form, phase: str) -> None:
    """Without its last kernel, which is all of the call or its second half."""
    group = ranks(cut, deadline=1e-4 if cut == "three" else 1e-3)  # boxes take their time
    world = group.geometry.world_size
    case, _ = exact(group, 2)
    for _ in range(2):
        ask(group, case, 2, form, layer=5)
    assert group.run(silent=1) == 1
    found = [Expired.read(tail.record) for tail in group.tails]
    assert found[1] is None
    told = [expired for expired in found if expired is not None]
    assert told
    for expired in told:
        assert (expired.operation, expired.layer, expired.call) == ("moe_tail", 5, 1)
        assert (expired.phase, expired.peer) == (phase, 1)
        assert expired.error(world, 1e-4).ranks == (1,)


WRONG = {
    "the region that comes next is cleared": ("(region == 0 ? 2 : region - 1)", "(region == 2 ? 0 : region + 1)"),
    "this call's rows are cleared": ("load_gpu(&a.counters->rows[(call + 1) & 1])", "2 * a.rows"),
    "nothing is cleared": ("i < all; i += CELLS * THREADS)", "i < 0; i += CELLS * THREADS)"),
    "two regions": ("const int region = (int)(call % 3);", "const int region = (int)(call % 2);"),
    "the gather is not emptied": ("store_own(from.of(i), empty(uint2()));", ""),
    "one gather mailbox": ("& 1) * a.gather_bytes", "& 0) * a.gather_bytes"),
    "nobody waits for credits": ("while (acquire_sys(&w.counters->credits[peer]) < w.call) patience", "patience"),
    "credits of the call before": ("credits[peer]) < w.call)", "credits[peer]) + 1 < w.call)"),
    "groups do not wait for their slices": ("if (before % SLICES != SLICES - 1)", "if (false)"),
    "a column too far": ("column = slice * SLICE + 8 * t;", "column = slice * SLICE + 8 * (t ^ 1);"),
    "empty words are sent as they are": ("    v = publishable(v);\n", ""),
}
"""Changes of the source that make it wrong, and that the checks above must see."""

WRONG_BOXES = {
    "a row of weights too far": ("i % PARTS * BOX_ROWS, weights", "i % PARTS * BOX_ROWS + 1, weights"),
    "weights are not waited for": (
        "barriers_wait<PARTS>(weights + LANDED + 8 * (i % RING * PARTS), i / RING & 1);",
        ";",
    ),
    "the round is not looked at": ("(i % RING * PARTS), i / RING & 1);", "(i % RING * PARTS), 0);"),
    "nobody waits for room": ("if (stripe >= RING) barrier_wait", "if (false) barrier_wait"),
    "room before the products": ("product_wait<1>(sum);", ""),
    "z is not swizzled": ("1024 + swizzled(token & 7, fragment & 7)", "1024 + (token & 7) * 128 + (fragment & 7) * 16"),
    "nobody waits for z": ("gain, memory);\n  sync_block();\n", "gain, memory);\n"),
    "squares of one stripe": ("i < STRIPES; i++) sum += squares", "i < 1; i++) sum += squares"),
    "overlapping tiles write garbage": ("row = min(64 * tile, GROUP_ROWS - 64)", "row = 64 * tile"),
}
"""Likewise of sm_90a's path."""

WRONG_TWO_SHOTS = {
    "squares by who does not know of them": ("boxes", "ABLE = K3_TWO_SHOT ? 128 * M_TILES : ", "ABLE = "),
    "nobody waits for the others' sums": ("boxes", "while (acquire(summed_of(a, slice) + i) <= call)", "while (false)"),
    "sums of the call before": ("boxes", "summed_of(a, slice) + i) <= call)", "summed_of(a, slice) + i) < call)"),
    "rows of the next group": (
        "boxes",
        "/ FRAGMENTS * GROUPS + group; };",
        "/ FRAGMENTS * GROUPS + (group + 1) % GROUPS; };",
    ),
    "nobody waits for z": (
        "ring of sums",
        "    barrier_wait(weights + Z_LANDED + 8 * (i % Z_RING), i / Z_RING & 1);\n",
        "",
    ),
    "nobody waits for room for z": ("ring of sums", "if (i >= Z_RING) barrier_wait", "if (false) barrier_wait"),
    "squares of one group's rows": ("boxes", "token = threadIdx.x * GROUPS + group;", "token = threadIdx.x * GROUPS;"),
}
"""Likewise of the sums in two shots, each with the cut that shows it."""

WRONG_CELLS = {
    "cells are not waited for": ("while (cells.missing()) {", "while (false) {"),
    "products are not emptied": ("store_gpu(products + s * C, empty(uint4()));", ""),
    "squares are not emptied": ("store_gpu(squares + s * (C / 4), EMPTY);", ""),
    "squares for one unit": ("/ 4; i += 32) store_gpu(to + i", "/ 4; i += 32) store_gpu(to"),
}
"""Likewise of products that are their own flags."""

WRONG_ORDER = {
    "calls do not wait for credits": (Overlap.FOREIGN, "while (seen < w.call) {", "while (false) {"),
    "calls do not wait for calls": (Overlap.FOREIGN, "  w.deadline_ns *= 3;\n  wait_completed(w);", ""),
    "credits before the calls are done": (Overlap.PDL, "if (peer == 0) wait_completed(w);", ""),
    "credits are noted before they are in": (
        Overlap.FOREIGN,
        "    Patience patience;\n    while (acquire_sys(",
        "    if (peer == (w.rank == 0)) store_release(&w.counters->credited, w.call + 1);\n"
        "    Patience patience;\n    while (acquire_sys(",
    ),
    "a call is done with the first thread of each CTA": (
        Overlap.FOREIGN,
        "complete(const Arguments& a) {\n  sync_block();",
        "complete(const Arguments& a) {",
    ),
    "the next kernel starts before a call has its number": (
        Overlap.PDL,
        "  if (threadIdx.x == 0) {\n    const u64 mine = step(",
        "  launch_dependents();\n  if (threadIdx.x == 0) {\n    const u64 mine = step(",
    ),
    "the finish waits for no kernel": (
        Overlap.PDL,
        "  expect_finished(a, units);\n  wait_for_predecessor();",
        "  expect_finished(a, units);",
    ),
}
"""Likewise of the order between kernels of a rank that overlap, each with the overlap that shows it."""


@NEEDS_GXX
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_seen(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_seen("three", WRONG[wrong], tmp_path, monkeypatch)


@NEEDS_GXX
@pytest.mark.parametrize("wrong", WRONG_CELLS)
def test_wrong_cells_are_seen(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_seen("three", WRONG_CELLS[wrong], tmp_path, monkeypatch, cells=True)


@NEEDS_GXX
def test_right_cells_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = "PHASE_COMPLETION = 1"
    assert not is_seen("three", (same, same), tmp_path, monkeypatch, seeds=3, cells=True)


@NEEDS_GXX
@pytest.mark.parametrize("wrong", WRONG_BOXES)
def test_a_wrong_kernel_for_boxes_is_seen(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_seen("ring of boxes", WRONG_BOXES[wrong], tmp_path, monkeypatch)


@NEEDS_GXX
@pytest.mark.parametrize("wrong", WRONG_TWO_SHOTS)
def test_wrong_two_shots_are_seen(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, *change = WRONG_TWO_SHOTS[wrong]
    assert is_seen(cut, (change[0], change[1]), tmp_path, monkeypatch, two_shot=True)


@NEEDS_GXX
def test_sums_that_are_said_before_they_are_there_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels overlap: there the warps of a block drift apart."""
    change = "  fence_loads();\n  sync_block();\n", "  fence_loads();\n"
    assert is_seen("boxes", change, tmp_path, monkeypatch, overlap=Overlap.PDL, two_shot=True)


@NEEDS_GXX
def test_right_two_shots_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = "PHASE_COMPLETION = 1"
    assert not is_seen("boxes", (same, same), tmp_path, monkeypatch, seeds=3, two_shot=True)


@NEEDS_GXX
@pytest.mark.parametrize("wrong", WRONG_ORDER)
def test_a_wrong_order_is_seen(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlap, *change = WRONG_ORDER[wrong]
    assert is_seen("three", (change[0], change[1]), tmp_path, monkeypatch, overlap=overlap)


@NEEDS_GXX
@pytest.mark.parametrize(
    ("cut", "seeds", "overlap"),
    [
        ("ring of boxes", 2, Overlap.NONE),
        ("boxes", 3, Overlap.PDL),
        *(("three", 6, overlap) for overlap in Overlap),
    ],
)
def test_a_right_kernel_is_not(
    cut: str, seeds: int, overlap: Overlap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = "PHASE_COMPLETION = 1"
    assert not is_seen(cut, (same, same), tmp_path, monkeypatch, seeds, overlap)


@NEEDS_GXX
def test_a_wrong_order_is_seen_on_sm_90a_s_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next kernel starts before a call has its number."""
    place = "  if (threadIdx.x == 0) {\n    mine = step("
    change = place, f"  launch_dependents();\n{place}"
    assert is_seen("boxes", change, tmp_path, monkeypatch, seeds=3, overlap=Overlap.PDL)


def is_seen(
    cut: str,
    change: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seeds: int = 6,
    overlap: Overlap = Overlap.NONE,
    two_shot: bool = False,
    cells: bool = False,
) -> bool:
    """Whether a chain of calls shows that the source was changed."""
    tail_emulator.mutate(change, tmp_path)
    monkeypatch.setattr(tail_emulator, "FOLDER", tmp_path)
    hidden, latent, world, capacity = CUTS[cut]
    g = Geometry.choose(hidden, latent, world, arch="sm_90a", capacity=capacity)
    tokens = 64 if g.box_rows else 16
    assert g.two_shot(tokens, two_shot) == two_shot
    kind = {"two_shot": two_shot, "cells": cells}
    library = tail_emulator.build(tmp_path / "built", g, tokens, ring=RINGS.get(cut, 0), **kind)
    deadline = 2e-2 if g.box_rows else 5e-3  # boxes take their time
    group = Ranks(library, g, tokens, deadline=deadline, **kind)
    rows = (36, 1, 17, 2, 33, 3) if g.box_rows else (12, 1, 9, 2, 12, 3)
    if overlap.value:  # of many rows, so that all threads have work up to a call's end
        rows = (12,) * 8
    for seed in range(seeds):
        group.fill()
        kept = []
        for number, m in enumerate(rows):
            case, expected = exact(group, m, number)
            if m > 9:
                case.routed[0, 9, 8:10].view(torch.int16).fill_(-1)
                expected[9] = float("nan")
            kept.append((expected, ask(group, case, m, list(Form)[2 * number // len(rows)])))
        if group.run(seed=seed, skew=3, overlap=overlap) != 0:
            return True
        if not all(torch.equal(o.nan_to_num(7.0), expected.nan_to_num(7.0)) for expected, outs in kept for o in outs):
            return True
    return False
