"""What the MoE tail means: the truth in float64, the plain model of each numerics class, and how far results may stray.

    out = residual + routed_scale * (W_up @ rmsnorm(sum_r routed_r; g, eps)) + b + sum_r shared_r          [m, H]

`moe_tail` is that line in float64, never rounded. `model` is the plainest code that keeps the promises of a class
(docs/tiers.md, numerics classes), rounded to the input dtype as the class says. `AccuracyMeter` compares a result with
the truth and `accept` judges the comparison. `random_case` and `integer_case` make data that is the same on every rank.
Shapes everywhere: W ranks, m tokens, L latent width, H hidden width.

What the classes are worth, measured with this module on a CPU (4096 rows of `random_case`, 512 for the pair; W = 8,
H = 7168, L = 3584; `Accuracy` defines the columns; the biases have a standard error of up to 1e-6):

    |                                        | error   | misrounded | bias    | paired bias |
    |----------------------------------------|---------|------------|---------|-------------|
    | the truth, rounded once                | 2.13e-3 | 0          | -2.6e-6 | 0           |
    | K0, z in fp32                          | 2.13e-3 | 0.0001     | -2.6e-6 | 1e-8        |
    | K0, z as a BF16 pair                   | 2.13e-3 | 0.0019     | -2.3e-6 | 1e-8        |
    | K1                                     | 2.67e-3 | 0.36       | -4.3e-6 | -1.7e-6     |
    | K2 if its sums were rounded only once  | 3.15e-3 | 0.45       | -5.8e-6 | -3.2e-6     |
    | K2, the model below                    | 4.55e-3 | 0.58       | -8.6e-6 | -6.0e-6     |

Three choices, and why:

- *The projection of the models is summed by hand*: exact products, float64 inside a slice of L, slices added in fp32 in
  order. An fp32 `torch.matmul` isn't one: with `torch.set_float32_matmul_precision("medium")`, which serving engines
  set, it multiplies in BF16 on a CPU that can (and in TF32 on a GPU under "high"), and a reference that follows a
  global switch says that a right kernel is wrong.
- *K2 is modelled as a ring*: the partial sums are added in rank order and rounded to the input dtype after every
  addition. A ring rounds at each of its W - 1 hops, and so do its chunks whatever rank they start from; trees and
  recursive halving round as often but smaller sums, and a reduction in a switch or in fp32 rounds once. A real
  all-reduce should therefore not exceed it on data whose ranks are alike, such as `random_case` (gloo at W = 2, 4 and 8
  comes within 0.3 % of it, and within 1.5 % on four rows); where one rank's partials are much larger than the others',
  the order decides, and the model is one order of many.
- *The correctly rounded result is computed, not cast*: torch casts float64 to BF16 through float32, which rounds twice
  and goes wrong next to a tie (`round_once`).
"""

from __future__ import annotations

from k3comm.kernels.reference._accuracy import (
    FLOAT32_ERROR,
    K0_BIAS_ROWS,
    K0_ERROR_OVER_IDEAL,
    K0_MISROUNDED,
    K0_PAIR_MISROUNDED,
    K0_PAIRED_BIAS,
    K1_ERROR,
    K1_MISROUNDED,
    K1_PAIRED_BIAS,
    K2_ERROR_OVER_SEPARATE_REDUCE,
    OVER_MODEL,
    POOL_ROWS,
    Accuracy,
    AccuracyMeter,
    Bound,
    Quantity,
    accept,
    bounds_for,
    measure,
)
from k3comm.kernels.reference._cases import (
    Case,
    integer_case,
    random_case,
)
from k3comm.kernels.reference._truth import (
    model,
    moe_tail,
    rms_norm,
    round_once,
)

__all__ = [
    "FLOAT32_ERROR",
    "K0_BIAS_ROWS",
    "K0_ERROR_OVER_IDEAL",
    "K0_MISROUNDED",
    "K0_PAIRED_BIAS",
    "K0_PAIR_MISROUNDED",
    "K1_ERROR",
    "K1_MISROUNDED",
    "K1_PAIRED_BIAS",
    "K2_ERROR_OVER_SEPARATE_REDUCE",
    "OVER_MODEL",
    "POOL_ROWS",
    "Accuracy",
    "AccuracyMeter",
    "Bound",
    "Case",
    "Quantity",
    "accept",
    "bounds_for",
    "integer_case",
    "measure",
    "model",
    "moe_tail",
    "random_case",
    "rms_norm",
    "round_once",
]
