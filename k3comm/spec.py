"""What the model is: the shapes of the layer that k3comm finishes, and how the engine lays it out over ranks."""

from __future__ import annotations

from typing import Any

import attrs

from k3comm.errors import InputError
from k3comm.tiers.select import UNLIMITED

MIN_EPS, MAX_EPS = 1e-37, 1e37
"""Of `rms_eps`: fp32, in which the norm is taken, has no normal numbers beyond."""
DTYPES = ("bfloat16", "float32")
"""Element types that the tail serves; float32 by the library tiers only."""


def whole_number(low: int, high: int = UNLIMITED) -> Any:
    """A validator: an int (no bool) from `low` to `high`."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise InputError(
                f"{type(instance).__name__}.{attribute.name}: {value!r} given; "
                f"accepted are whole numbers from {low} to {high}"
            )

    return check


def _number(value: Any) -> Any:
    """An int as the float it is, so that ranks which write 1 and 1.0 have the same."""
    return float(value) if type(value) is int and abs(value) < 2**53 else value


def _eps(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if type(value) is not float or not MIN_EPS <= value <= MAX_EPS:
        raise InputError(f"LatentMoESpec.rms_eps: {value!r} given; accepted are numbers from {MIN_EPS} to {MAX_EPS}")


def _boolean(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if type(value) is not bool:
        raise InputError(f"{type(instance).__name__}.{attribute.name}: {value!r} given; accepted are True and False")


def _dtype(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in DTYPES:
        raise InputError(f"LatentMoESpec.dtype: {value!r} given; accepted are {', '.join(DTYPES)}")


def _dtype_name(value: Any) -> Any:
    """The name of a torch.dtype, without needing torch: str(torch.bfloat16) is "torch.bfloat16"."""
    return str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value


@attrs.frozen(kw_only=True)
class LatentMoESpec:
    """The latent MoE layer.

    Attributes:
        hidden_size: H, the width of the residual stream and of the shared experts' output.
        latent_size: L, the width of the routed experts' output.
        top_k: experts a token.
        rms_eps: epsilon of every RMSNorm here.
        max_tokens: the largest m that buffers are sized for. Tiers that need no buffers take more.
        dtype: "bfloat16" or "float32", or torch's own, of partial sums, residual, W_up and result.

    Raises:
        InputError: a value out of range; names the value and the range.
    """

    hidden_size: int = attrs.field(validator=whole_number(1))
    latent_size: int = attrs.field(validator=whole_number(1))
    top_k: int = attrs.field(validator=whole_number(1))
    rms_eps: float = attrs.field(default=1e-5, converter=_number, validator=_eps)
    max_tokens: int = attrs.field(default=8192, validator=whole_number(1))
    dtype: str = attrs.field(default="bfloat16", converter=_dtype_name, validator=_dtype)

    @classmethod
    def kimi_k3(cls, *, max_tokens: int = 8192, dtype: str = "bfloat16") -> LatentMoESpec:
        """Kimi-K3: H 7168, L 3584, 16 experts a token, eps 1e-5 (its public config.json)."""
        return cls(hidden_size=7168, latent_size=3584, top_k=16, rms_eps=1e-5, max_tokens=max_tokens, dtype=dtype)


@attrs.frozen(kw_only=True)
class ParallelLayout:
    """How the engine spreads the layer over ranks.

    The tail's group is the one over which the partial sums are added up. Expert parallelism changes nothing: a rank
    without a token's experts contributes zeros.

    Attributes:
        tp, ep: ranks of tensor and of expert parallelism.
        attention_dp, attention_cp: ranks of data and of context parallelism in the attention.
        uniform_tokens: the engine promises that ranks *plan* with equal m (it pads). Without the promise, and with
            attention_dp or attention_cp above 1, only SEPARATE_REDUCE is used, so that no choice hangs on m. The rows
            of one call must be equal on all ranks in any tier: partial sums of different rows can't be added up.
    """

    tp: int = attrs.field(default=1, validator=whole_number(1))
    ep: int = attrs.field(default=1, validator=whole_number(1))
    attention_dp: int = attrs.field(default=1, validator=whole_number(1))
    attention_cp: int = attrs.field(default=1, validator=whole_number(1))
    uniform_tokens: bool = attrs.field(default=True, validator=_boolean)

    @property
    def equal_tokens(self) -> bool:
        """Whether m is known to be equal on all ranks."""
        return self.uniform_tokens or (self.attention_dp == 1 and self.attention_cp == 1)
