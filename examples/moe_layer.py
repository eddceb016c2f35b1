"""The smallest complete tensor-parallel latent-MoE layer, in plain torch, with its tail finished by k3comm.

A layer in the manner of Kimi-K3: a sigmoid router with top-k and renormalised weights, a down-projection to the latent
width, gated experts there, a shared expert in the hidden width, RMSNorm of the routed sum, an up-projection, and the
residual. Every rank holds 1/W of each expert's intermediate width and so makes partial sums; k3comm sums, norms,
projects and adds, and applies the RMSNorm that the next layer begins with. What an engine needs is four calls:
`Communicator.negotiate` once, `moe_tail` once a layer, `step` once a forward, and the tail itself in each layer.

    python examples/moe_layer.py                   # starts 2 ranks on the CPU and compares with float64
    python examples/moe_layer.py --device cuda     # on GPUs, one a rank, or all ranks on one

On GPUs a decode forward is called as engines capture it into a CUDA graph (`graph=True`), which is when the fused tail
is chosen; the tail of a captured graph is compared with the eager one too.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

import k3comm
import k3comm.testing

HIDDEN, LATENT, EXPERTS, TOP_K, INNER, EPS = 256, 128, 16, 4, 64, 1e-5
FORWARDS = (("decode", 1), ("decode", 7), ("prefill", 33), ("prefill", 512))


def random_weights(dtype: torch.dtype) -> dict[str, Tensor]:
    """One layer's weights before sharding; a real engine loads them and keeps only its slices."""
    shapes = {
        "router": (EXPERTS, HIDDEN),
        "to_latent": (LATENT, HIDDEN),
        "gate": (EXPERTS, INNER, LATENT),
        "up": (EXPERTS, INNER, LATENT),
        "down": (EXPERTS, LATENT, INNER),
        "shared_gate": (INNER, HIDDEN),
        "shared_up": (INNER, HIDDEN),
        "shared_down": (HIDDEN, INNER),
        "to_hidden": (HIDDEN, LATENT),
    }
    draw = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=draw) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    for name, width in (("latent_norm", LATENT), ("next_norm", HIDDEN)):
        weights[name] = 1 + 0.1 * torch.randn(width, generator=draw)
    return {name: weight.to(dtype) for name, weight in weights.items()}


def shard(weights: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """This rank's weights: a slice of the intermediate width of every expert and of the shared one, the rest whole."""
    axes = {"gate": 1, "up": 1, "down": 2, "shared_gate": 0, "shared_up": 0, "shared_down": 1}
    return weights | {name: weights[name].chunk(world_size, dim=axis)[rank] for name, axis in axes.items()}


def partial_sums(weights: dict[str, Tensor], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The routed [m, L] and shared [m, H] sums over the intermediate columns in `weights`: all of them, or a slice."""
    scores = linear(hidden.float(), weights["router"].float()).sigmoid()
    share, chosen = scores.topk(TOP_K, dim=-1)
    share = share / share.sum(dim=-1, keepdim=True)

    latent = linear(hidden, weights["to_latent"])
    routed = torch.zeros_like(latent, dtype=torch.promote_types(latent.dtype, torch.float32))
    for expert in range(EXPERTS):
        tokens, slots = torch.where(chosen == expert)
        x = latent[tokens]
        inner = silu(linear(x, weights["gate"][expert])) * linear(x, weights["up"][expert])
        routed.index_add_(0, tokens, linear(inner, weights["down"][expert]) * share[tokens, slots, None].to(routed))

    inner = silu(linear(hidden, weights["shared_gate"])) * linear(hidden, weights["shared_up"])
    return routed.to(hidden.dtype), linear(inner, weights["shared_down"])


class LatentMoELayer(nn.Module):
    """One rank's part of the layer: its experts make partial sums, the tail makes the layer's output of them."""

    def __init__(self, weights: dict[str, Tensor], comm: k3comm.Communicator, layer_index: int) -> None:
        super().__init__()
        self.weights = weights
        self.tail = comm.moe_tail(
            layer_index=layer_index, norm_weight=weights["latent_norm"], up_weight=weights["to_hidden"]
        )

    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The new residual stream, and its RMSNorm for the next layer; both the same on every rank."""
        routed, shared = partial_sums(self.weights, hidden)
        out, normed = self.tail(routed, shared, residual, next_norm_weight=self.weights["next_norm"])
        return out, normed


def float64_layer(weights: dict[str, Tensor], hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The same layer on one process in float64. The router stays float32, so that near ties are decided alike."""
    weights = {name: weight.double() for name, weight in weights.items()}
    routed, shared = partial_sums(weights, hidden.double())
    normed = rms_norm(routed, (LATENT,), weights["latent_norm"], EPS)
    out = residual.double() + linear(normed, weights["to_hidden"]) + shared
    return out, rms_norm(out, (HIDDEN,), weights["next_norm"], EPS)


def own_device(kind: str) -> torch.device:
    """This rank's: GPUs are given out in turn, and used by several ranks where there are too few."""
    if kind == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus < dist.get_world_size():
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # or torch's shared memory refuses
    device = torch.device("cuda", dist.get_rank() % gpus)
    torch.cuda.set_device(device)
    return device


def replayed(layer: LatentMoELayer, hidden: Tensor, residual: Tensor, comm: k3comm.Communicator) -> tuple[Tensor, ...]:
    """What a CUDA graph of the tail alone gives: the experts of this plain layer look at their routing on the host."""
    routed, shared = partial_sums(layer.weights, hidden)
    graph = torch.cuda.CUDAGraph()
    with comm.step(graph=True, decode=True), torch.cuda.graph(graph):
        made = layer.tail(routed, shared, residual, next_norm_weight=layer.weights["next_norm"])
    graph.replay()
    return tuple(made)


def serve(dtype_name: str, kind: str) -> list[tuple[str, int, str, float, float]]:
    """Runs on every rank: make the layer, do a few forwards, and compare each with float64."""
    dtype, draw, device = getattr(torch, dtype_name), torch.Generator().manual_seed(1), own_device(kind)
    weights = {name: weight.to(device) for name, weight in random_weights(dtype).items()}
    spec = k3comm.LatentMoESpec(
        hidden_size=HIDDEN, latent_size=LATENT, top_k=TOP_K, rms_eps=EPS, max_tokens=512, dtype=dtype_name
    )
    shared = device.type == "cuda" and torch.cuda.device_count() < dist.get_world_size()
    settings = k3comm.Settings(allow_shared_device=shared)
    lines = []
    with k3comm.Communicator.negotiate(spec, dist.group.WORLD, settings=settings, device=device) as comm:
        layer = LatentMoELayer(shard(weights, dist.get_rank(), dist.get_world_size()), comm, layer_index=0)
        for phase, m in FORWARDS:
            residual = torch.randn(m, HIDDEN, generator=draw).to(dtype).to(device)
            hidden = rms_norm(residual, (HIDDEN,), eps=EPS)
            decode = phase == "decode"
            graph = decode and device.type == "cuda"
            with comm.step(graph=graph, decode=decode):
                made = layer(hidden, residual)
            chosen = layer.tail.plan(m, graph=graph, decode=decode, next_norm=True).tier
            if chosen is k3comm.Tier.TAIL_FUSION and graph:
                again = replayed(layer, hidden, residual, comm)
                assert all(torch.equal(one, other) for one, other in zip(again, made, strict=True))
            truths = float64_layer(weights, hidden, residual)
            error, next_error = (float((x.double() - t).norm() / t.norm()) for x, t in zip(made, truths, strict=True))
            lines.append((phase, m, chosen.name, error, next_error))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="a tensor-parallel latent-MoE layer finished by k3comm")
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        choices=(2, 4, 8),
        help=f"processes that share the experts' {INNER} inner columns: 2, 4 or 8 (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("float32", "bfloat16"),
        help="of weights and activations (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where the layer runs (default: %(default)s)"
    )
    options = parser.parse_args()
    if "RANK" in os.environ:
        parser.error(
            f"started as rank {os.environ['RANK']}, by torchrun it seems; it starts its ranks itself (--ranks)"
        )
    # In bfloat16 the layer rounds half a dozen times, 1.7e-3 (rms) each: 4e-3 is what to expect.
    bound = 5e-6 if options.dtype == "float32" else 6e-3

    backend = "gloo"
    if options.device == "cuda":
        backend = f"cpu:gloo,cuda:{'nccl' if torch.cuda.device_count() >= options.ranks else 'gloo'}"
    run = k3comm.testing.run_ranks(serve, options.ranks, options.dtype, options.device, backend=backend, deadline=180)
    lines = run[0]
    where = f"{options.ranks} ranks, {options.device}, {options.dtype}"
    print(f"{where}; relative rms error to float64, at most {bound:.0e}\n")
    print(f"{'phase':<8} {'tokens':>6}  {'tier':<18} {'output':>9} {'next norm':>10}  ok")
    for phase, m, tier, error, next_error in lines:
        verdict = "yes" if max(error, next_error) <= bound else "NO"
        print(f"{phase:<8} {m:>6}  {tier:<18} {error:>9.2e} {next_error:>10.2e}  {verdict}")
    return 0 if all(max(line[3:]) <= bound for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
