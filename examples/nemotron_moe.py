"""A real layer finished by k3comm: transformers' `NemotronHMoE`, sharded over ranks, in every tier that they agree on.

The block is a latent mixture of experts without an inner norm. A router (float32, sigmoid, top-k, renormalised, scaled)
picks experts; `fc1_latent_proj` takes the token down to the latent width, where the experts work; the weighted sum of
their outputs goes up again through `fc2_latent_proj`; shared experts add their part in the hidden width.

Two ways to shard it leave every rank with partial sums whose sum over the ranks is the block's:

- `tensor`: each rank has 1/W of every expert's intermediate width: rows of `up_proj`, columns of `down_proj`. The
  activation between them works element by element, so only the down projection's sum is cut into parts.
- `expert`: rank r has the experts e with e % W == r, whole. Tokens of other ranks' experts contribute nothing here.

The shared experts are cut by intermediate width in both; the router and `fc1_latent_proj` are on every rank. What is
left is k3comm's: `up_weight` is `fc2_latent_proj.weight`, `norm_weight` is None, and the output is that of
`residual + block(hidden)`. transformers only builds the layer and runs the whole block that the result is compared
with: once in float64, the truth, and once in the same dtype, the yardstick.

    python examples/nemotron_moe.py                                    # starts 4 ranks on the CPU by itself
    python examples/nemotron_moe.py --ranks 2 --dtype float32 --experts expert
    torchrun --nproc-per-node 4 examples/nemotron_moe.py
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import k3comm
import k3comm.testing

try:
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts, NemotronHMLP, NemotronHMoE
except ImportError as missing:
    raise SystemExit(f"this example builds its layer with transformers: pip install transformers ({missing})") from None

Split = Literal["tensor", "expert"]
LAYOUTS = ("whole", "rows")

TOKENS = (1, 3, 33, 256)
"""One row, fewer rows than 4 ranks, a number that no rank count divides, and enough for a prefill."""


def small_config(**changes: Any) -> NemotronHConfig:
    """A block of the real form with small sizes that 2, 3, 4, 6 and 8 ranks divide; `changes` are fields of its own."""
    sizes: dict[str, Any] = {
        "hidden_size": 384,
        "moe_latent_size": 96,
        "n_routed_experts": 24,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 96,
        "routed_scaling_factor": 2.5,
        "experts_implementation": "eager",
    }
    return NemotronHConfig(**(sizes | changes))


def random_block(config: NemotronHConfig, dtype: torch.dtype, seed: int = 0) -> NemotronHMoE:
    """The unsharded block with random weights, the same on every rank.

    The router keeps float32 weights in every dtype, as transformers loads them.
    """
    block = NemotronHMoE(config)
    generator = torch.Generator().manual_seed(seed)
    for weight in [*block.parameters(), block.gate.e_score_correction_bias]:
        deviation = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.1
        weight.data.normal_(0.0, deviation, generator=generator)
    gate = copy.deepcopy(block.gate)
    block = block.to(dtype)
    block.gate = gate
    return block.requires_grad_(False).eval()


def float64_block(block: NemotronHMoE) -> NemotronHMoE:
    """The same weights in float64: the truth.

    The router decides in float32 there too, so no near tie is decided differently. The experts sum in the dtype of
    the router's weights; the hook widens those, so that the sum is float64.
    """
    double = copy.deepcopy(block).double()
    double.gate.register_forward_hook(lambda gate, inputs, routed: (routed[0], routed[1].double(), routed[2]))
    return double


class ShardedBlock(nn.Module):
    """What one rank holds of the block, and the partial sums that it makes."""

    def __init__(self, block: NemotronHMoE, rank: int, world_size: int, split: Split = "tensor") -> None:
        super().__init__()
        whole = block.shared_experts
        cut = block.experts.intermediate_dim if split == "tensor" else block.experts.num_experts
        if cut % world_size or whole.intermediate_size % world_size:
            raise ValueError(f"{world_size} ranks don't divide {cut} ({split}) and {whole.intermediate_size} (shared)")
        self.rank, self.world_size, self.split = rank, world_size, split
        self.gate = block.gate
        self.down_to_latent = block.fc1_latent_proj
        config = copy.deepcopy(block.config)
        up: Tensor = block.experts.up_proj
        down: Tensor = block.experts.down_proj
        if split == "tensor":
            config.moe_intermediate_size //= world_size
            up, down = up.chunk(world_size, dim=1)[rank], down.chunk(world_size, dim=2)[rank]
        else:
            config.n_routed_experts //= world_size
            up, down = up[rank::world_size], down[rank::world_size]
        self.experts = NemotronHExperts(config).to(up.dtype)  # type: ignore[no-untyped-call]
        self.experts.load_state_dict({"up_proj": up, "down_proj": down})

        width = whole.intermediate_size // world_size
        self.shared_experts = NemotronHMLP(config, width).to(up.dtype)  # type: ignore[no-untyped-call]
        part = {
            "up_proj.weight": whole.up_proj.weight.chunk(world_size, dim=0)[rank],
            "down_proj.weight": whole.down_proj.weight.chunk(world_size, dim=1)[rank],
        }
        if config.mlp_bias:
            part["up_proj.bias"] = whole.up_proj.bias.chunk(world_size)[rank]
            # A bias behind a sum over ranks is added by one of them.
            part["down_proj.bias"] = whole.down_proj.bias if rank == 0 else torch.zeros_like(whole.down_proj.bias)
        self.shared_experts.load_state_dict(part)
        self.requires_grad_(False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of the routed sum [m, L] and of the shared experts' output [m, H]."""
        _, weights, chosen = self.gate(hidden)
        if self.split == "expert":
            mine = chosen % self.world_size == self.rank
            weights, chosen = weights.masked_fill(~mine, 0.0), torch.where(mine, chosen // self.world_size, 0)
        return self.experts(self.down_to_latent(hidden), chosen, weights), self.shared_experts(hidden)


def spec_of(config: NemotronHConfig, dtype_name: str, max_tokens: int) -> k3comm.LatentMoESpec:
    """What k3comm needs to know about the model."""
    return k3comm.LatentMoESpec(
        hidden_size=config.hidden_size,
        latent_size=config.moe_latent_size or 0,  # 0 is refused: the block has no latent width then
        top_k=config.num_experts_per_tok,
        rms_eps=config.layer_norm_epsilon,
        max_tokens=max_tokens,
        dtype=dtype_name,
    )


def up_weight_of(block: NemotronHMoE, rank: int, world_size: int, layout: str) -> Tensor:
    """The up-projection as the tail takes it: `whole` on every rank, or this rank's `rows`."""
    weight: Tensor = block.fc2_latent_proj.weight
    return weight if layout == "whole" else weight.chunk(world_size)[rank]


def relative_error(
    outputs: Mapping[int, Tensor], truths: Mapping[int, Tensor], tokens: Iterable[int] | None = None
) -> float:
    """Rms of the difference over rms of the truth, over the batches of `tokens` (all of `outputs`) together."""
    chosen = list(outputs if tokens is None else tokens)
    difference = sum(float((outputs[m].double() - truths[m]).square().sum()) for m in chosen)
    return math.sqrt(difference / sum(float(truths[m].square().sum()) for m in chosen))


class Line(NamedTuple):
    """One tier with one layout of the up-projection. Both errors are None if it took none of the token counts."""

    tier: str
    layout: str
    tokens: list[int]
    sharded: float | None
    unsharded: float | None
    refusal: str


def bound_of(dtype_name: str, unsharded: float, world_size: int) -> float:
    """The error that a sharded layer may have, given the unsharded block's in the same dtype.

    In float32 only the order of sums differs, which is worth a few percent. In bfloat16 the partial sums are rounded
    once more than in one block, and a library's all-reduce rounds again at every rank that it adds; the finish, on the
    other hand, rounds once where the block rounds three times. Measured, that comes to 0.99 to 1.00 times the block's
    error for the tiers that sum in float32, and to 1.02, 1.06, 1.09, 1.19 for the all-reduces on 2, 3, 4, 8 ranks.
    """
    return unsharded * (2.0 if dtype_name == "float32" else 1.0 + 0.03 * world_size)


def compare(dtype_name: str, split: Split) -> list[Line]:
    """Finish the block in every tier and compare. Runs on every rank of the default group."""
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, dtype_name)
    config = small_config()
    block = random_block(config, dtype)
    sharded = ShardedBlock(block, rank, world_size, split)

    generator = torch.Generator().manual_seed(1)
    batches = {m: torch.randn(m, config.hidden_size, generator=generator).to(dtype) for m in TOKENS}
    float64 = float64_block(block)
    truths = {m: float64(hidden.double()) for m, hidden in batches.items()}
    unsharded = {m: block(hidden) for m, hidden in batches.items()}

    lines = []
    with k3comm.Communicator.negotiate(spec_of(config, dtype_name, max(TOKENS)), dist.group.WORLD) as comm:
        for index, layout in enumerate(LAYOUTS):
            up_weight = up_weight_of(block, rank, world_size, layout)
            tail = comm.moe_tail(layer_index=index, norm_weight=None, up_weight=up_weight)
            for tier in comm.agreement.capacities:
                outputs, refusal = {}, ""
                for m, hidden in batches.items():
                    try:
                        plan = tail.plan(m, tier=tier)
                    except k3comm.TierUnavailableError as reason:  # the same on every rank, before any of them talks
                        refusal = str(reason)
                        continue
                    routed, shared = sharded(hidden)
                    outputs[m] = tail(routed, shared, None, plan=plan)
                ours = relative_error(outputs, truths) if outputs else None
                yardstick = relative_error(unsharded, truths, outputs) if outputs else None
                lines.append(Line(tier.name, layout, list(outputs), ours, yardstick, refusal))
    return lines


def show(lines: list[Line], dtype_name: str, split: Split, world_size: int) -> bool:
    """Print the table. True if every line is within its bound."""
    print(f"NemotronHMoE in {dtype_name} on {world_size} ranks, experts split by {split}.")
    print("Relative rms error to the unsharded block in float64, over all token counts together:\n")
    print(f"{'tier':<18} {'up-projection':<14} {'tokens':<14} {'k3comm':>9} {'one block':>10} {'bound':>9}  ok")
    fine = True
    for line in lines:
        start = f"{line.tier:<18} {line.layout:<14}"
        if line.sharded is None or line.unsharded is None:
            print(start, "not used:", line.refusal.removeprefix(f"{line.tier}: "))
            continue
        bound = bound_of(dtype_name, line.unsharded, world_size)
        fine = fine and line.sharded <= bound
        tokens = ", ".join(map(str, line.tokens))
        verdict = "yes" if line.sharded <= bound else "NO"
        print(start, f"{tokens:<14} {line.sharded:>9.2e} {line.unsharded:>10.2e} {bound:>9.2e}  {verdict}")
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description="transformers' NemotronHMoE, sharded and finished by k3comm")
    parser.add_argument(
        "--ranks", type=int, default=4, choices=(2, 3, 4, 6, 8), help="ranks to start (without torchrun)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--experts", default="tensor", choices=("tensor", "expert"), help="how the experts are split")
    options = parser.parse_args()

    if not dist.is_torchelastic_launched():
        values = k3comm.testing.run_ranks(compare, options.ranks, options.dtype, options.experts, deadline=300.0)
        return 0 if show(values[0], options.dtype, options.experts, options.ranks) else 1

    dist.init_process_group("gloo")
    lines, rank, world_size = compare(options.dtype, options.experts), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    return 0 if rank != 0 or show(lines, options.dtype, options.experts, world_size) else 1


if __name__ == "__main__":
    sys.exit(main())
