"""What the model is, how it is laid out, what will be asked for: every value that is not accepted, and its refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3comm.errors import InputError
from k3comm.facts import Facts, Reason, Unknown, Verdict
from k3comm.operations import (
    OUTPUTS,
    SERVED,
    AttentionReduceOp,
    MoETailOp,
    Operation,
    RouteExchangeOp,
    TailArguments,
    TopKPackOp,
)
from k3comm.spec import DTYPES, LatentMoESpec, ParallelLayout
from k3comm.tiers import UNLIMITED

NOT_WHOLE: list[Any] = [-1, -UNLIMITED, True, False, 1.0, 16.5, math.nan, math.inf, "16", "", None, [16], 1j]
"""Values that no whole number field takes, whatever its range."""


def refusal(make: Callable[..., object], **given: Any) -> str:
    with pytest.raises(InputError) as error:
        make(**given)
    return str(error.value)


def valid(make: type, **changes: Any) -> dict[str, Any]:
    """Arguments that `make` accepts, less what is changed."""
    given = {
        LatentMoESpec: {"hidden_size": 7168, "latent_size": 3584, "top_k": 16},
        ParallelLayout: {},
        AttentionReduceOp: {"hidden": 7168},
        RouteExchangeOp: {"experts": 896, "top_k": 16, "latent": 3584},
        TopKPackOp: {"max_rows": 16, "k": 16},
    }[make]
    return given | changes


# Whole numbers

COUNTS = [
    *((LatentMoESpec, name, 1, UNLIMITED) for name in ("hidden_size", "latent_size", "top_k", "max_tokens")),
    *((ParallelLayout, name, 1, UNLIMITED) for name in ("tp", "ep", "attention_dp", "attention_cp")),
    *((AttentionReduceOp, name, 1, UNLIMITED) for name in ("hidden", "max_rows")),
    (AttentionReduceOp, "mix_blocks", 0, UNLIMITED),
    *((RouteExchangeOp, name, 1, UNLIMITED) for name in ("experts", "top_k", "latent")),
    (RouteExchangeOp, "max_rows", 1, 20),
    *((TopKPackOp, name, 1, UNLIMITED) for name in ("max_rows", "k")),
]
COUNTED = pytest.mark.parametrize(
    ("make", "name", "low", "high"), [pytest.param(*row, id=f"{row[0].__name__}.{row[1]}") for row in COUNTS]
)


def test_every_count_is_listed() -> None:
    listed = {(make, name) for make, name, _, _ in COUNTS}
    declared = {
        (make, field.name)
        for make in (LatentMoESpec, ParallelLayout, MoETailOp, AttentionReduceOp, RouteExchangeOp, TopKPackOp)
        for field in attrs.fields(make)
        if field.type in ("int", int)
    }
    assert listed == declared


@COUNTED
def test_count_in_range(make: type, name: str, low: int, high: int) -> None:
    for value in (low, low + 1, high):
        assert getattr(make(**valid(make, **{name: value})), name) == value


@COUNTED
def test_count_out_of_range(make: type, name: str, low: int, high: int) -> None:
    for value in [low - 1, high + 1, 2**63, 10**400, *NOT_WHOLE]:
        assert refusal(make, **valid(make, **{name: value})) == (
            f"{make.__name__}.{name}: {value!r} given; accepted are whole numbers from {low} to {high}"
        )


# LatentMoESpec


def test_kimi_k3() -> None:
    spec = LatentMoESpec.kimi_k3()
    assert spec == LatentMoESpec(
        hidden_size=7168, latent_size=3584, top_k=16, rms_eps=1e-5, max_tokens=8192, dtype="bfloat16"
    )
    assert LatentMoESpec.kimi_k3(max_tokens=64, dtype="float32") == attrs.evolve(spec, max_tokens=64, dtype="float32")
    assert refusal(LatentMoESpec.kimi_k3, max_tokens=0).startswith("LatentMoESpec.max_tokens: 0 given")
    assert refusal(LatentMoESpec.kimi_k3, dtype="fp16").startswith("LatentMoESpec.dtype: 'fp16' given")


def test_what_a_spec_may_leave_out() -> None:
    spec = LatentMoESpec(**valid(LatentMoESpec))
    assert (spec.rms_eps, spec.max_tokens, spec.dtype) == (1e-5, 8192, "bfloat16")


@pytest.mark.parametrize("name", ["hidden_size", "latent_size", "top_k"])
def test_what_a_spec_must_be_given(name: str) -> None:
    given = valid(LatentMoESpec)
    del given[name]
    with pytest.raises(TypeError, match=name):
        LatentMoESpec(**given)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-37, 1, 1.5, 1e37])
def test_eps(eps: float) -> None:
    assert LatentMoESpec(**valid(LatentMoESpec, rms_eps=eps)).rms_eps == eps


@pytest.mark.parametrize(
    "eps",
    [
        0,
        0.0,
        -0.0,
        -1e-5,
        math.nan,
        math.inf,
        -math.inf,
        True,
        False,
        "1e-5",
        None,
        10**400,
        1e-5j,
        [1e-5],
        5e-324,
        1.7976931348623157e308,
    ],
    ids=repr,
)
def test_bad_eps(eps: Any) -> None:
    shown = float(eps) if type(eps) is int and eps == 0 else eps
    expected = f"LatentMoESpec.rms_eps: {shown!r} given; accepted are numbers from 1e-37 to 1e+37"
    assert refusal(LatentMoESpec, **valid(LatentMoESpec, rms_eps=eps)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype(dtype: str) -> None:
    assert LatentMoESpec(**valid(LatentMoESpec, dtype=dtype)).dtype == dtype


def test_dtypes() -> None:
    assert DTYPES == ("bfloat16", "float32")


@pytest.mark.parametrize(
    "dtype", ["float16", "float64", "bf16", "BFLOAT16", "torch.bfloat16", " bfloat16", "", None, True, 16, ["bfloat16"]]
)
def test_bad_dtype(dtype: Any) -> None:
    expected = f"LatentMoESpec.dtype: {dtype!r} given; accepted are bfloat16, float32"
    assert refusal(LatentMoESpec, **valid(LatentMoESpec, dtype=dtype)) == expected


@given(st.integers(1, UNLIMITED), st.integers(1, UNLIMITED))
def test_any_widths(hidden: int, latent: int) -> None:
    """No relation between the widths is asked for here; what a tier needs is the tier's own verdict."""
    spec = LatentMoESpec(hidden_size=hidden, latent_size=latent, top_k=1)
    assert (spec.hidden_size, spec.latent_size) == (hidden, latent)


def test_a_spec_is_a_value() -> None:
    spec = LatentMoESpec.kimi_k3()
    assert hash(spec) == hash(LatentMoESpec.kimi_k3())
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        spec.max_tokens = 1  # type: ignore[misc]
    with pytest.raises(InputError):
        attrs.evolve(spec, max_tokens=0)
    with pytest.raises(TypeError, match="positional"):
        LatentMoESpec(7168, 3584, 16)  # type: ignore[call-arg]


# ParallelLayout


def test_layout_defaults() -> None:
    layout = ParallelLayout()
    assert attrs.asdict(layout) == {"tp": 1, "ep": 1, "attention_dp": 1, "attention_cp": 1, "uniform_tokens": True}
    assert layout.equal_tokens


@pytest.mark.parametrize(
    ("attention_dp", "attention_cp", "uniform_tokens", "equal"),
    [
        (1, 1, True, True),
        (1, 1, False, True),
        (2, 1, True, True),
        (2, 1, False, False),
        (1, 2, True, True),
        (1, 2, False, False),
        (2, 2, True, True),
        (2, 2, False, False),
    ],
)
@pytest.mark.parametrize("ep", [1, 8])
def test_equal_tokens(attention_dp: int, attention_cp: int, uniform_tokens: bool, equal: bool, ep: int) -> None:
    """Expert parallelism changes nothing."""
    layout = ParallelLayout(
        tp=8, ep=ep, attention_dp=attention_dp, attention_cp=attention_cp, uniform_tokens=uniform_tokens
    )
    assert layout.equal_tokens is equal


@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_bad_uniform_tokens(value: Any) -> None:
    expected = f"ParallelLayout.uniform_tokens: {value!r} given; accepted are True and False"
    assert refusal(ParallelLayout, uniform_tokens=value) == expected


# Operations


def test_operation_defaults() -> None:
    assert attrs.asdict(AttentionReduceOp(hidden=7168)) == {"hidden": 7168, "max_rows": 16, "mix_blocks": 8}
    assert RouteExchangeOp(experts=896, top_k=16, latent=3584).max_rows == 20
    assert MoETailOp() == MoETailOp()


def test_operations_are_told_apart() -> None:
    kinds: tuple[type, ...] = (AttentionReduceOp, RouteExchangeOp, TopKPackOp)
    operations = [MoETailOp(), *(make(**valid(make)) for make in kinds)]
    assert all(isinstance(operation, Operation) for operation in operations)
    assert len(set(operations)) == len(operations) == len({repr(operation) for operation in operations})


def test_served_operations() -> None:
    assert MoETailOp in SERVED
    assert all(isinstance(kind, type) and issubclass(kind, Operation) for kind in SERVED)


@pytest.mark.parametrize("make", [MoETailOp, AttentionReduceOp, RouteExchangeOp, TopKPackOp])
def test_operations_take_names_only(make: type) -> None:
    with pytest.raises(TypeError, match="positional"):
        make(1)


@pytest.mark.parametrize("output", OUTPUTS)
def test_output(output: str) -> None:
    assert TailArguments(output=output).output == output


@pytest.mark.parametrize("output", ["row", "FULL", "", None, True, 0, ["rows"]])
def test_bad_output(output: Any) -> None:
    assert refusal(TailArguments, output=output) == f"output: {output!r} given; accepted are 'full', 'rows'"


def test_tail_arguments_are_part_of_a_key() -> None:
    changes: list[dict[str, Any]] = [
        {"sharded": True},
        {"projected": True},
        {"precise": True},
        {"output": "rows"},
        {"next_norm": True},
    ]
    assert {name for change in changes for name in change} == {field.name for field in attrs.fields(TailArguments)}
    assert len({TailArguments(**change) for change in [{}, *changes]}) == len(changes) + 1


# Facts and verdicts


def test_an_unknown_is_never_a_yes() -> None:
    unknown = Unknown("no driver")
    assert not unknown
    assert str(unknown) == "unknown: no driver"
    facts = Facts(host="here", device="cuda")
    assert not facts.device_name
    assert not facts.free_memory
    assert not facts.driver


@pytest.mark.parametrize(
    ("device", "capability", "family"),
    [
        ("cpu", None, "host"),
        ("cuda", (9, 0), "sm90"),
        ("cuda", (10, 3), "sm103"),
        ("cuda", (12, 0), "sm120"),
        ("cuda", Unknown("no driver"), "unknown"),
        ("cuda", None, "unknown"),
    ],
)
def test_family(device: str, capability: Any, family: str) -> None:
    assert Facts(host="here", device=device, compute_capability=capability).family == family


def test_facts_are_a_value() -> None:
    versions = {"torch": "2.11", "numpy": "2"}
    facts = Facts(host="here", device="cpu", versions=versions)
    assert facts == Facts(host="here", device="cpu", versions=dict(reversed(versions.items())))
    assert hash(facts) == hash(attrs.evolve(facts))
    assert list(facts.versions) == ["numpy", "torch"]
    versions["torch"] = "0"
    assert facts.versions["torch"] == "2.11"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        facts.host = "there"  # type: ignore[misc]


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_text(reason: Reason) -> None:
    text = reason.text(2)
    assert text
    assert "{" not in text


def test_reasons_are_told_apart() -> None:
    assert len({reason.text(2) for reason in Reason}) == len(Reason)


def test_verdicts() -> None:
    assert Verdict.yes()
    assert Verdict.yes().capacity == UNLIMITED
    assert str(Verdict.yes(16)) == "up to 16 rows"
    refused = Verdict.no(Reason.HIDDEN_MULTIPLE, 8)
    assert not refused
    assert refused.capacity == 0
    assert str(refused) == "hidden_size is not a multiple of 8"


def test_torchs_own_dtypes_are_understood() -> None:
    import torch

    assert LatentMoESpec(hidden_size=8, latent_size=8, top_k=1, dtype=torch.float32).dtype == "float32"  # type: ignore[arg-type]
    with pytest.raises(InputError, match="dtype: 'float16' given; accepted are bfloat16, float32"):
        LatentMoESpec(hidden_size=8, latent_size=8, top_k=1, dtype=torch.float16)  # type: ignore[arg-type]
