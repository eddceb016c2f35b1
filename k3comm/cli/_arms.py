"""What the bench compares: every agreed tier, and what else one would write with the libraries that are there.

An arm says what it is named after and how often one call engages it, and counts that while it runs: a tier by the
plug-in whose `run` was entered, a rival by the collectives that it calls. The bench holds the two against each other.

Rivals round to the layer's dtype after every operation, as engines do. None makes an NVLink multicast object: torch's
symmetric memory would, where the device has multicast and TORCH_SYMM_MEM_DISABLE_MULTICAST is not set, so the rivals
over it are left out there. What NCCL does is the user's environment's (NCCL_NVLS_ENABLE).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from k3comm.communicator import Communicator
from k3comm.kernels import reference
from k3comm.tiers import UNLIMITED, Numerics, Tier, plugins
from k3comm.tiers.interface import TailCall, TailTier

CHECKED_ROWS = 64
"""Rows of a result that are held against float64: all of a small call, else so many, evenly spread, both ends among
them. The whole result enters the comparison between ranks."""
WRONG_OVER_IDEAL, WRONG_FLOAT32 = 10.0, 1e-4
"""The error from which a result is wrong and not inaccurate: in BF16 over that of x rounded once, in float32 itself. At
K3 widths the ideal is 2.1e-3 and the least accurate scheme in use 5.4e-3 (docs/tiers.md, numerics classes); one missing
partial of 16 makes 0.2. TF32 operands in float32 make 2.9e-4."""
ONE_SHOT_ROWS = 2048
"""Rows up to which the one-shot rival is run: every rank reads all of every rank's buffer."""
FLASHINFER = "0.6.12"
"""The one version whose workspace is known to allocate through torch's symmetric memory, so that it makes no multicast
object of its own."""
FLASHINFER_ROWS = 64
"""Rows that the flashinfer workspace is made for: its one-shot kernels are for decode."""


@attrs.frozen(kw_only=True, eq=False)
class Inputs:
    """One call's tensors on this rank: routed [m, L], shared [m, H], residual [m, H]."""

    routed: Tensor
    shared: Tensor
    residual: Tensor

    @property
    def rows(self) -> int:
        """m."""
        return self.routed.shape[0]


@attrs.define(kw_only=True, eq=False)
class Arm:
    """One way to finish the layer.

    Attributes:
        name: a tier's own, or the rival's.
        tier, numerics: None for a rival.
        engages: what one call engages, and how often.
        run: (inputs, residual, layer) -> [m, H].
        most_rows: the rows that it can take.
        kernels: parts of names of which one must be in a census of a GPU; none known if empty.
        shared_bytes: of the memory that this rank shares for it; None if it can't be told.
    """

    name: str
    tier: Tier | None = None
    numerics: Numerics | None = None
    engages: Mapping[str, int]
    run: Callable[[Inputs, Tensor, int], Tensor]
    most_rows: int = UNLIMITED
    kernels: tuple[str, ...] = ()
    shared_bytes: int | None = 0

    def engagement(self, counted: Mapping[str, int]) -> tuple[int, dict[str, int]]:
        """How many whole calls the counts make, and what was engaged beside them."""
        calls = min(counted.get(what, 0) // each for what, each in self.engages.items())
        beside = {what: n - calls * self.engages.get(what, 0) for what, n in counted.items()}
        return calls, {what: n for what, n in beside.items() if n}


@attrs.frozen(eq=False)
class Layers:
    """The layers' weights and the calls' data: the same whichever rank draws them, from generators of the device."""

    comm: Communicator
    count: int
    seed: int
    norm_weight: Tensor = attrs.field(init=False)
    up_weights: tuple[Tensor, ...] = attrs.field(init=False)

    @norm_weight.default
    def _norm_weight(self) -> Tensor:
        return self._normal("norm", self.comm.spec.latent_size, sigma=0.1, mean=1.0)

    @up_weights.default
    def _up_weights(self) -> tuple[Tensor, ...]:
        shape = self.comm.spec.hidden_size, self.comm.spec.latent_size
        return tuple(self._normal(f"up {layer}", *shape, sigma=0.02) for layer in range(self.count))

    def inputs(self, rows: int, rank: int | None = None) -> Inputs:
        """What `rank` (by default this one) has of a call of `rows` rows; the residual is everybody's."""
        rank = self.comm.rank if rank is None else rank
        hidden, latent = self.comm.spec.hidden_size, self.comm.spec.latent_size
        return Inputs(
            routed=self._normal(f"routed {rows} {rank}", rows, latent, sigma=0.1),
            shared=self._normal(f"shared {rows} {rank}", rows, hidden, sigma=0.1),
            residual=self._normal(f"residual {rows}", rows, hidden, sigma=1.0),
        )

    def truth(self, rows: int) -> Truth:
        """The first layer's result in float64, of the rows that are checked."""
        spread = torch.linspace(0, rows - 1, min(rows, CHECKED_ROWS), dtype=torch.float64)
        which = spread.round().long().to(self.comm.device)
        every = [self.inputs(rows, rank) for rank in range(self.comm.world_size)]
        residual = every[0].residual[which]
        values = reference.moe_tail(
            torch.stack([one.routed[which] for one in every]),
            torch.stack([one.shared[which] for one in every]),
            self.up_weights[0],
            residual=residual,
            norm_weight=self.norm_weight,
            eps=self.comm.spec.rms_eps,
        )
        return Truth(which=which, values=values, residual=residual)

    def _normal(self, name: str, *shape: int, sigma: float, mean: float = 0.0) -> Tensor:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator(self.comm.device).manual_seed(int.from_bytes(digest[:4], "little"))
        values = torch.randn(shape, generator=generator, device=self.comm.device)
        return (values.mul_(sigma) + mean).to(self.comm.dtype)


@attrs.frozen(kw_only=True, eq=False)
class Truth:
    """Some rows in float64."""

    which: Tensor
    values: Tensor
    residual: Tensor

    def judge(self, out: Tensor) -> tuple[float, bool]:
        """rms(out - x) / rms(x - residual) of the checked rows, and whether that is right and every row is finite."""
        found = reference.measure(out[self.which], self.values, self.residual)
        limit = WRONG_FLOAT32 if out.dtype == torch.float32 else WRONG_OVER_IDEAL * found.ideal_error
        return found.error, found.error < limit and bool(out.isfinite().all())


def digest(out: Tensor) -> int:
    """A number of 62 bits that stands for a tensor's bits."""
    content = out.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 2


def tier_arms(comm: Communicator, layers: Layers, *, graph: bool, engaged: Counter[str]) -> list[Arm]:
    """An arm for each agreed tier, best first; from now on every run of a tier is counted in `engaged`."""
    handles = [
        comm.moe_tail(layer_index=layer, norm_weight=layers.norm_weight, up_weight=weight)
        for layer, weight in enumerate(layers.up_weights)
    ]
    arms, memory = [], comm.memory()
    for tier, most in comm.agreement.capacities.items():
        _count_runs(comm._tier(tier), engaged)

        def run(inputs: Inputs, residual: Tensor, layer: int, tier: Tier = tier) -> Tensor:
            plan = handles[layer].plan(inputs.rows, graph=graph, tier=tier)
            out: Tensor = handles[layer](inputs.routed, inputs.shared, residual, plan=plan)
            return out

        plugin = plugins()[tier]
        library = plugin.transports == {"library"}
        arms.append(
            Arm(
                name=tier.name,
                tier=tier,
                numerics=plugin.numerics,
                engages={tier.name: 1},
                run=run,
                most_rows=most,
                kernels=("nccl", "lane_one_shot") if library else (),
                shared_bytes=sum(nbytes for owner, nbytes in memory.items() if owner.startswith(f"{tier.name}: ")),
            )
        )
    return arms


def _count_runs(plugin: TailTier, engaged: Counter[str]) -> None:
    entered = plugin.run

    def run(call: TailCall) -> Tensor:
        engaged[plugin.name.name] += 1
        return entered(call)

    # On this object alone: the class, and other communicators, stay as they are.
    vars(plugin)["run"] = run


@attrs.frozen(eq=False)
class Rivals:
    """What else can be had with the libraries that are there. `left_out` says what can't, and why.

    Attributes:
        agree: whether all ranks can, of what this one can: arms talk, so none is built by one rank alone.
        most_rows: the largest call.
    """

    comm: Communicator
    group: dist.ProcessGroup
    layers: Layers
    engaged: Counter[str]
    agree: Callable[[bool], bool]
    most_rows: int
    left_out: dict[str, str] = attrs.field(factory=dict)

    def arms(self) -> list[Arm]:
        """The arms that all ranks can run. Collective."""
        library = ("nccl",) if self.comm.device.type == "cuda" else ()
        arms = [
            Arm(name="separate", engages={"all_reduce": 2}, run=self._separate, kernels=library),
            Arm(name="joined", engages={"all_reduce": 1}, run=self._joined, kernels=library),
        ]
        if self.comm.spec.hidden_size % self.comm.world_size:
            self.left_out["folded"] = f"hidden_size is not a multiple of {self.comm.world_size}"
        else:
            arms.append(Arm(name="folded", engages={"all_reduce": 2}, run=self._folded, kernels=library))
        why = self._no_symmetric_memory()
        if not self.agree(not why):
            self.left_out["one-shot joined"] = why or "a peer can't"
        else:
            arms.append(self._one_shot())
        arms += self._flashinfer(why)
        return arms

    # Each as an engine would write it. `residual` first, so that the chain of roundings is the usual one.

    def _all_reduce(self, x: Tensor) -> None:
        self.engaged["all_reduce"] += 1
        dist.all_reduce(x, group=self.group)

    def _separate(self, inputs: Inputs, residual: Tensor, layer: int) -> Tensor:
        latent, shared = inputs.routed.clone(), inputs.shared.clone()
        self._all_reduce(latent)
        self._all_reduce(shared)
        return residual + shared + self._project(latent, layer)

    def _joined(self, inputs: Inputs, residual: Tensor, layer: int) -> Tensor:
        lane = torch.cat((inputs.routed, inputs.shared), dim=1)
        self._all_reduce(lane)
        return self._finish_lane(lane, residual, layer)

    def _folded(self, inputs: Inputs, residual: Tensor, layer: int) -> Tensor:
        latent, partial = inputs.routed.clone(), inputs.shared.clone()
        self._all_reduce(latent)
        self._fold(self._norm(latent), partial, residual, layer)
        self._all_reduce(partial)
        return partial

    def _one_shot(self) -> Arm:
        import torch.distributed._symmetric_memory as symmetric

        name, width = self.group.group_name, self.comm.spec.latent_size + self.comm.spec.hidden_size
        most = min(self.most_rows, ONE_SHOT_ROWS)
        block = symmetric.empty((most * width,), dtype=self.comm.dtype, device=self.comm.device)
        symmetric.rendezvous(block, name)

        def run(inputs: Inputs, residual: Tensor, layer: int) -> Tensor:
            lane = block[: inputs.rows * width].view(inputs.rows, width)
            torch.cat((inputs.routed, inputs.shared), dim=1, out=lane)
            self.engaged["one_shot_all_reduce"] += 1
            reduced = torch.ops.symm_mem.one_shot_all_reduce(lane, "sum", name)
            return self._finish_lane(reduced, residual, layer)

        return Arm(
            name="one-shot joined",
            engages={"one_shot_all_reduce": 1},
            run=run,
            most_rows=most,
            kernels=("one_shot",),
            shared_bytes=block.numel() * block.element_size(),
        )

    def _flashinfer(self, why: str) -> list[Arm]:
        """Latent all-reduce and norm in one one-shot kernel, the shared one on a side stream or folded; for decode."""
        names = ("flashinfer overlapped", "flashinfer folded")
        try:
            version = metadata.version("flashinfer-python")
        except metadata.PackageNotFoundError:
            version = ""
        if not why and version != FLASHINFER:
            why = f"flashinfer-python {version or 'is not installed'}; served is {FLASHINFER}"
        if not why and self.comm.dtype != torch.bfloat16:
            why = "it is run in bfloat16 only"
        if not self.agree(not why):
            self.left_out.update(dict.fromkeys(names, why or "a peer can't"))
            return []
        from flashinfer.comm.allreduce import (
            AllReduceFusionPattern,
            allreduce_fusion,
            create_allreduce_fusion_workspace,
        )

        spec, place = self.comm.spec, (self.comm.world_size, self.comm.rank, FLASHINFER_ROWS)
        spaces = {
            width: create_allreduce_fusion_workspace("trtllm", *place, width, self.comm.dtype, group=self.group)
            for width in (spec.latent_size, spec.hidden_size)
        }
        side = torch.cuda.Stream()

        def reduce(x: Tensor, pattern: Any, **more: Any) -> Any:
            self.engaged["flashinfer allreduce_fusion"] += 1
            return allreduce_fusion(x, spaces[x.shape[1]], pattern, use_oneshot=True, fp32_acc=True, **more)

        def normed(inputs: Inputs) -> Tensor:
            z, zero = torch.empty_like(inputs.routed), torch.zeros_like(inputs.routed)
            reduce(
                inputs.routed,
                AllReduceFusionPattern.kARResidualRMSNorm,
                residual_in=zero,
                residual_out=torch.empty_like(z),
                norm_out=z,
                rms_gamma=self.layers.norm_weight,
                rms_eps=spec.rms_eps,
            )
            return z

        def summed(x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            reduce(x, AllReduceFusionPattern.kAllReduce, output=out)
            return out

        def overlapped(inputs: Inputs, residual: Tensor, layer: int) -> Tensor:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                shared = summed(inputs.shared)
            y = linear(normed(inputs), self.layers.up_weights[layer])
            main.wait_stream(side)
            return residual + shared + y

        def folded(inputs: Inputs, residual: Tensor, layer: int) -> Tensor:
            partial = inputs.shared.clone()
            self._fold(normed(inputs), partial, residual, layer)
            return summed(partial)

        engages = {"flashinfer allreduce_fusion": 2}
        arms = [
            Arm(
                name=names[0],
                engages=engages,
                run=overlapped,
                most_rows=FLASHINFER_ROWS,
                kernels=("allreduce",),
                shared_bytes=None,
            )
        ]
        if spec.hidden_size % self.comm.world_size == 0:
            arms.append(attrs.evolve(arms[0], name=names[1], run=folded))
        return arms

    def _norm(self, latent: Tensor) -> Tensor:
        return rms_norm(latent, latent.shape[-1:], self.layers.norm_weight, self.comm.spec.rms_eps)

    def _project(self, latent: Tensor, layer: int) -> Tensor:
        return linear(self._norm(latent), self.layers.up_weights[layer])

    def _finish_lane(self, lane: Tensor, residual: Tensor, layer: int) -> Tensor:
        latent = self.comm.spec.latent_size
        return residual + lane[:, latent:] + self._project(lane[:, :latent], layer)

    def _fold(self, z: Tensor, partial: Tensor, residual: Tensor, layer: int) -> None:
        """Adds this rank's columns of the projection and of the residual into its partial sum, which is all-reduced."""
        width = partial.shape[1] // self.comm.world_size
        own = slice(self.comm.rank * width, (self.comm.rank + 1) * width)
        partial[:, own] += residual[:, own]
        partial[:, own].addmm_(z, self.layers.up_weights[layer][own].t())

    def _no_symmetric_memory(self) -> str:
        """Why torch's symmetric memory can't be used here without a multicast object; "" if it can."""
        if self.comm.device.type != "cuda":
            return "needs GPUs"
        if self.comm.report.decision.shared_devices:
            return "ranks share a GPU"
        try:
            from torch._C._autograd import DeviceType
            from torch._C._distributed_c10d import _SymmetricMemory

            multicast = _SymmetricMemory.has_multicast_support(DeviceType.CUDA, self.comm.device.index or 0)
        except Exception as error:  # an alpha interface: what it can't say counts as a no
            return f"torch's symmetric memory can't be asked: {type(error).__name__}: {error}"
        if multicast:
            return "torch would make a multicast object; set TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
        return ""
