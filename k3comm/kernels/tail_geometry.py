"""How the fused decode tail is cut into CTAs on a GPU.

The grid of the exchange is groups x slices, the same for every m: a CTA owns one slice of the L latent
columns and one group of this rank's H/W output columns. It needs its own slice of the latent mailbox only, so every CTA
does its share of the exchange and, but for two shots, nothing is handed over; the slices' partial products meet in the
finish. All CTAs are resident at once, one an SM, since they wait for other ranks. No order of additions depends on m,
so a row's bits don't either; they do depend on the geometry, which follows from the shape, the architecture and the SMs
alone.

A slice is at most MAX_SLICE columns: a tensor core truncates its sums, and a long chain of them has a bias (0.7e-6 of
the product after 32 steps by a model without guard bits, where K0 allows 2e-6); slices are added by rounding additions.

Two paths of the projection. The general one runs everywhere: weights through registers, mma.sync. On sm_90a, where a
cut into equal slices (multiples of 64 columns) and equal groups (multiples of 16 rows, 64 to 256) fits the shared
memory (K3 at W = 2, 4, 8 and 16: yes), a warp of its own streams the CTA's block of W_up by TMA into shared memory,
from the kernel's start on and so under the call before, and wgmma multiplies from there. Where two CTAs fit an SM (K3
to 8 rows at W = 4, more from W = 8 on) call n + 1 loads under all of call n. Where z of 32 or 64 rows leaves no room
for all of the weights they come in a ring. Many rows of many ranks are summed once, in two shots, and not by each group
of output columns anew (`Geometry.two_shot`). A column of wgmma's result depends on that column of z alone, so all
variants give the same bits. Only a few boxes are in flight before this CTA's first rows are in, or in two shots all
sums.
"""

from __future__ import annotations

from typing import Final

import attrs

from k3comm.errors import InputError
from k3comm.kernels.compile import SHARED_LIMITS

MAX_ROWS: Final = 64
"""Rows of a call at most: what the mailboxes and the workspace hold."""

MAX_WORLD: Final = 16
"""Ranks at most: length of the address lists in `Arguments`."""

MAX_CELLS: Final = 256
"""CTAs of the exchange at most, and the one for the credits: a cell of the counters each."""

THREADS: Final = 512
FINISH_THREADS: Final = 128
"""A block of the exchange, and of the finish."""

FINISH_BLOCKS: Final = 4
"""Blocks of the finish an SM at most: with 128 registers a thread they fit beside each other."""

TILE: Final = 16
"""Output columns that a warp multiplies at once."""

STEP: Final = 32
"""Latent columns that a thread's 16-byte loads cover at once; a slice is a multiple."""

MAX_SLICE: Final = 512
"""Latent columns of a slice at most; the module's docstring says why."""

STATIC_SHARED: Final = 1024
"""Bytes of shared memory that are left to the compiler, and to the driver (1 KiB a block)."""

SM_SHARED: Final = 228 << 10
"""Bytes of shared memory of an SM of compute capability 9.0 (CUDA programming guide, technical specifications)."""

TOKENS: Final = (8, 16, 32, 64)
"""Variants of the general path, by the rows that they hold."""

BOX_TOKENS: Final = (4, 8, 16, 32, 64)
"""Variants of sm_90a's path."""

BOX_RESIDENT: Final = 16
"""Rows up to which all weights of a CTA have to fit in shared memory beside z. With more they may come in a ring."""

TWO_SHOT_ROWS: Final = 128
"""Rows that a variant holds times ranks, what a CTA polls, from which each row is summed once, in two shots: at W = 2
33 rows and more, from W = 4 on 17, by the tables in docs/performance.md."""

TURNS: Final = 4
"""Fragments that a thread sums at most in two shots: with many more, which takes few groups, registers spill."""

Z_RING: Final = 4
"""Stripes of z on their way or in use in two shots: 0.3 us better at 64 rows of W = 2 than three, which would leave
room for one stripe of weights more, and better than five or two."""

STRIPE: Final = 64
"""Latent columns of a box of weights: 128 bytes, the span of the swizzle."""

GROUP_ROWS: Final = (64, 256)
"""Output columns of a group on sm_90a's path: from one tile of wgmma's 64 to one for each of four warpgroups."""

BOX_ROWS: Final = 64
"""Of a box at most. Boxes of 7 KB and more read as fast as larger ones, and a window of a few of them is finer."""

WINDOW: Final = 3
"""Boxes in flight before a CTA's first rows are in: by the table of windows in docs/performance.md, with a link
emulated at world size 2. One less where the weights of two CTAs fit an SM: 0.1 to 0.3 us better at world size 4."""

WIDER_ROWS: Final = 2
"""Rows up to which one box more is better, or no worse, by the same table and on two H200s."""

TWO_WINDOW_ROWS: Final = range(9, 17)
TWO_WINDOWS: Final = 2, 4
"""Rows with which fewer boxes are better while the call before is still finishing, and more from then on: by 0.15 to
0.3 us at 16 on two H200s. With up to 8 rows that was 0.4 to 1.1 worse, at 32 0.2."""

TWO_SHOT_WINDOWS: Final = 8, 8
"""In two shots, where an SM holds the weights of one CTA and few are there early: 0.3 to 0.7 us better at 48 and 64
rows on two H200s than 3. Where it holds those of two, WINDOW - 1 was better in loopback."""

PLAIN_WINDOW: Final = 6
"""Boxes in flight where a call starts behind the end of the one before (no programmatic launch): up to 0.4 us better to
16 rows on two H200s than WINDOW, within 0.1 at one and two rows. From there on a seed."""

CELL_ROWS: Final = 16
"""Rows up to which the slices' products can be their own flags in the one-kernel form, and are not counted then. A
seed: with more rows, what empties them may cost more than the count."""

POLL_ROWS: Final = 8
"""Rows by which the cost of polling counts in the choice of a cut."""

SLICE_COST: Final = 1024
"""What one more slice costs the finish, in bytes of weights that a CTA reads in the same time. A seed for tuning."""

BOX_SLICE_COST: Final = 1536
"""Likewise on sm_90a's path."""


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _pitch(slice_width: int) -> int:
    """Bytes of a row of z in shared memory, as in the kernel: an odd multiple of 64."""
    return (slice_width // STEP | 1) * 64


def _shared_bytes(slice_width: int, tokens: int) -> int:
    """Dynamic shared memory of the exchange: two terms of z, and the squares of each fragment."""
    return tokens * (2 * _pitch(slice_width) + 4 * (slice_width // 8))


def _box_rows(group_rows: int) -> int:
    """Rows of a box: the largest multiple of 8 up to BOX_ROWS that divides a group."""
    return next(rows for rows in range(BOX_ROWS, 0, -8) if group_rows % rows == 0)


def _box_shared_bytes(
    group_rows: int, slice_width: int, tokens: int, ring: int, z_ring: int | None = None, summed: int | None = None
) -> int:
    """Dynamic shared memory of the exchange on sm_90a's path: `ring` stripes of weights, z, squares, a barrier a box
    and a stripe of the ring, two words of 8. In two shots `z_ring` stripes of z, two barriers each, and squares of
    `summed` rows."""
    stripes = slice_width // STRIPE
    barriers = ring * (group_rows // _box_rows(group_rows)) + ring + 2 * (z_ring or 0)
    z = 4 * tokens * STRIPE * (stripes if z_ring is None else z_ring)
    squares = _up(4 * (tokens if summed is None else summed) * stripes, 8)
    return 2 * group_rows * ring * STRIPE + z + squares + 8 * barriers + 16


@attrs.frozen(kw_only=True)
class Geometry:
    """How a tail is cut into CTAs. Made by `choose`, for one architecture.

    Attributes:
        hidden_size, latent_size, world_size: H, L, W.
        arch: the architecture.
        slice_width, slices: latent columns of a slice, a multiple of STEP; their number.
        group_tiles, groups: tiles of TILE output columns of a group; their number.
        box_rows: rows of a box of weights on sm_90a's path; 0 is the general path.
    """

    hidden_size: int
    latent_size: int
    world_size: int
    arch: str
    slice_width: int
    slices: int
    group_tiles: int
    groups: int
    box_rows: int = 0

    @property
    def columns(self) -> int:
        """H/W, the output columns that each rank owns."""
        return self.hidden_size // self.world_size

    @property
    def blocks(self) -> int:
        """CTAs of the exchange: a slice and a group each. The one-kernel form has one more, for the credits."""
        return self.slices * self.groups

    @property
    def partial_bytes(self) -> int:
        """Of the partial products: fp32 [MAX_ROWS, slices, H/W]. In memory of this rank's own, one a lane."""
        return 4 * MAX_ROWS * self.slices * self.columns

    @property
    def square_bytes(self) -> int:
        """Of the slices' squares: fp32 [groups, MAX_ROWS, slices]. Likewise."""
        return 4 * self.groups * MAX_ROWS * self.slices

    @property
    def threads(self) -> int:
        """Of a block of the exchange that take part in all of it: a warpgroup a tile of 64 rows, no fewer than 256."""
        return 256 if self.box_rows and self.group_tiles * TILE <= 128 else THREADS

    def block(self, tokens: int, two_shot: bool | None = None) -> int:
        """Threads of a block of the exchange for so many rows at once, with the warps that load."""
        return self.threads + 32 * ((1 + self.two_shot(tokens, two_shot)) if self.box_rows else 0)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Variants of the exchange, by the rows that they hold at once."""
        return BOX_TOKENS if self.box_rows else TOKENS

    def tokens_for(self, rows: int) -> int:
        """The variant for so many rows.

        Raises:
            InputError: more rows than MAX_ROWS, or none.
        """
        if type(rows) is not int or not 1 <= rows <= MAX_ROWS:
            raise InputError(f"rows: {rows!r} given; accepted are 1 to {MAX_ROWS}")
        return next((tokens for tokens in self.tokens if rows <= tokens), self.tokens[-1])

    def two_shot(self, tokens: int, asked: bool | None = None) -> bool:
        """Whether a variant of so many rows sums each of them once, in two shots (tail_two_shot.cuh).

        Args:
            asked: what a benchmark wants, where it can be had; None is what ships.
        """
        few = self._share(tokens) * self.slice_width // 8 <= TURNS * self.threads
        can = self.box_rows > 0 and tokens > BOX_RESIDENT and self.groups > 1 and few
        return can and (tokens * self.world_size >= TWO_SHOT_ROWS if asked is None else asked)

    def _share(self, tokens: int) -> int:
        """Rows that a group sums in two shots."""
        return -(-tokens // self.groups)

    def shared_bytes(self, tokens: int, two_shot: bool | None = None) -> int:
        """Dynamic shared memory a CTA of the exchange, for so many rows at once."""
        if self.box_rows:
            return self._box_bytes(tokens, self.ring(tokens, two_shot), two_shot)
        return _shared_bytes(self.slice_width, tokens)

    def ring(self, tokens: int, two_shot: bool | None = None) -> int:
        """Stripes of weights that are in shared memory at once on sm_90a's path, of those of a slice."""
        room = SHARED_LIMITS[self.arch] - STATIC_SHARED
        fits = [n for n in range(1, self.stripes + 1) if self._box_bytes(tokens, n, two_shot) <= room]
        return fits[-1]

    @property
    def stripes(self) -> int:
        """Of a slice, on sm_90a's path."""
        return self.slice_width // STRIPE

    @property
    def z_ring(self) -> int:
        """Stripes of z that are in shared memory at once in two shots."""
        return min(Z_RING, self.stripes)

    def two_shot_bytes(self, two_shot: bool | None = None) -> int:
        """Of what two shots need behind the squares, if any variant sums in them: a word a CTA, and of MAX_ROWS rows
        squares and z in two terms."""
        if not any(self.two_shot(tokens, two_shot) for tokens in self.tokens):
            return 0
        return _up(8 * self.blocks, 128) + 4 * MAX_ROWS * self.slices * (1 + self.slice_width)

    @property
    def cell_bytes(self) -> int:
        """Of products that are their own flags: fp32 [CELL_ROWS, slices, H/W], and of squares, one for four of them."""
        return 4 * CELL_ROWS * self.slices * (self.columns + self.columns // 4)

    @property
    def cells_at(self) -> int:
        """Where these are in a workspace, in bytes: behind what two shots need, whether that is there or not."""
        return self.workspace_bytes(True)

    def workspace_bytes(self, two_shot: bool | None = None, *, cells: bool = False) -> int:
        """Of partial products, squares, what two shots need, and cells, one behind the other. One a lane.

        Args:
            two_shot: as `two_shot` takes it.
            cells: whether there are any.
        """
        if cells:
            return self.cells_at + self.cell_bytes
        return self.partial_bytes + self.square_bytes + self.two_shot_bytes(two_shot)

    def _box_bytes(self, tokens: int, ring: int, two_shot: bool | None, z_ring: int | None = None) -> int:
        twice = self.two_shot(tokens, two_shot)
        z_ring, summed = (z_ring or self.z_ring, self._share(tokens)) if twice else (None, None)
        return _box_shared_bytes(self.group_tiles * TILE, self.slice_width, tokens, ring, z_ring, summed)

    def windows(self, rows: int, two_shot: bool | None = None, *, pdl: bool = True) -> tuple[int, int]:
        """Boxes of weights in flight before, and after, the kernel in front of a call is over; up to the first rows, or
        in two shots to the sums.

        Of no meaning on the general path.

        Args:
            rows: of the call. two_shot: as `two_shot` takes it.
            pdl: whether calls start under the one before.
        """
        if 2 * 2 * self.group_tiles * TILE * self.slice_width <= SM_SHARED:  # the weights of two CTAs
            return WINDOW - 1, WINDOW - 1
        if self.two_shot(self.tokens_for(rows), two_shot):
            return TWO_SHOT_WINDOWS
        if not pdl:
            return PLAIN_WINDOW, PLAIN_WINDOW
        if rows <= WIDER_ROWS:
            return WINDOW + 1, WINDOW + 1
        return TWO_WINDOWS if rows in TWO_WINDOW_ROWS else (WINDOW, WINDOW)

    def finish_blocks(self, rows: int, capacity: int) -> int:
        """CTAs of the finish: a thread for four columns of a row, as far as the grid is resident at once, and one for
        the credits."""
        return min(-(-rows * self.columns // (4 * FINISH_THREADS)), FINISH_BLOCKS * capacity - 1) + 1

    @classmethod
    def choose(
        cls, hidden_size: int, latent_size: int, world_size: int, *, arch: str, capacity: int, general: bool = False
    ) -> Geometry:
        """The cut with the fewest bytes of weights a CTA, counting a slice as SLICE_COST bytes more.

        On sm_90a one for its own path if there is any (the module's docstring); there the mailbox that a CTA polls
        counts too, and a slice as BOX_SLICE_COST.

        Args:
            hidden_size, latent_size, world_size: H, L, W.
            arch: of `compile.ARCHITECTURES`.
            capacity: CTAs that are resident at once for this rank: SMs, or a share of them where ranks share a GPU. One
                is for the credits.
            general: the general path in any case.

        Raises:
            InputError: a shape that does not fall into fragments of 16 bytes, or that the capacity can't hold.
        """
        if arch not in SHARED_LIMITS:
            raise InputError(f"arch: {arch!r} given; accepted are {', '.join(SHARED_LIMITS)}")
        if type(world_size) is not int or not 2 <= world_size <= MAX_WORLD:
            raise InputError(f"world_size: {world_size!r} given; accepted are 2 to {MAX_WORLD}")
        for name, size, multiple in (("hidden_size", hidden_size, 8 * world_size), ("latent_size", latent_size, 8)):
            if type(size) is not int or size < 1 or size % multiple:
                raise InputError(f"{name}: {size!r} given; accepted are multiples of {multiple}")
        if type(capacity) is not int or capacity < 2:
            raise InputError(f"capacity: {capacity!r} given; accepted are whole numbers from 2")
        cells = min(capacity, MAX_CELLS) - 1
        if arch == "sm_90a" and not general:
            boxed = _box_cut(hidden_size // world_size, latent_size, world_size, arch, cells)
            if boxed is not None:
                group_rows, slices = boxed
                return cls(
                    hidden_size=hidden_size,
                    latent_size=latent_size,
                    world_size=world_size,
                    arch=arch,
                    slice_width=latent_size // slices,
                    slices=slices,
                    group_tiles=group_rows // TILE,
                    groups=hidden_size // world_size // group_rows,
                    box_rows=_box_rows(group_rows),
                )
        widest = _widest_slice(arch)
        tiles = -(-hidden_size // world_size // TILE)
        best: tuple[int, int, int, int] | None = None
        for slices in range(-(-latent_size // widest), min(cells, -(-latent_size // STEP)) + 1):
            width = _up(-(-latent_size // slices), STEP)
            if -(-latent_size // width) != slices:
                continue
            group_tiles = -(-tiles // (cells // slices))
            cost = 2 * TILE * group_tiles * width + SLICE_COST * slices
            if best is None or cost < best[0]:
                best = cost, slices, width, group_tiles
        if best is None:
            raise InputError(
                f"latent_size: {latent_size} given; accepted are up to {widest * cells} with {capacity} resident blocks"
            )
        _, slices, width, group_tiles = best
        return cls(
            hidden_size=hidden_size,
            latent_size=latent_size,
            world_size=world_size,
            arch=arch,
            slice_width=width,
            slices=slices,
            group_tiles=group_tiles,
            groups=-(-tiles // group_tiles),
        )


def _box_cut(columns: int, latent_size: int, world_size: int, arch: str, cells: int) -> tuple[int, int] | None:
    """Rows of a group and number of slices on sm_90a's path; None if no cut into equal ones fits."""
    cuts = []
    for group_rows in range(GROUP_ROWS[0], GROUP_ROWS[1] + 1, TILE):
        for slices in range(1, cells + 1):
            width = latent_size // slices
            if columns % group_rows or latent_size % (slices * STRIPE) or width > MAX_SLICE:
                continue
            room = SHARED_LIMITS[arch] - STATIC_SHARED
            fits = _box_shared_bytes(group_rows, width, BOX_RESIDENT, width // STRIPE) <= room
            if fits and slices * (columns // group_rows) <= cells:
                polled = 2 * POLL_ROWS * world_size * width
                cuts.append((2 * group_rows * width + polled + BOX_SLICE_COST * slices, group_rows, slices))
    return min(cuts)[1:] if cuts else None


def _widest_slice(arch: str) -> int:
    """The widest slice whose MAX_ROWS rows of z fit in shared memory."""
    room = SHARED_LIMITS[arch] - STATIC_SHARED
    return max(width for width in range(STEP, MAX_SLICE + 1, STEP) if _shared_bytes(width, TOKENS[-1]) <= room)
