"""Torch operators, for compiled models: registered once, with fakes, and choosing inside.

A plan made in Python from a symbolic m would freeze the first choice into the compiled code. So the choice is made when
the operator runs, from the m that it gets and the step its communicator is in. The communicator travels as its name, a
string that is the same at every start; weights travel as tensors; results are new and alias nothing.

`MoETail` takes this way by itself while a model is compiled, and skips the dispatcher otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k3comm.errors import InputError
from k3comm.moe_tail import MoETail
from k3comm.session import open_session

_WEIGHTS = "Tensor? norm_weight, Tensor up_weight, Tensor? up_bias"
_WHO = "str output, int layer, str communicator"
SCHEMAS = {
    "moe_tail": f"(Tensor routed, Tensor shared, Tensor? residual, {_WEIGHTS}, {_WHO}) -> Tensor",
    "moe_tail_norm": (
        f"(Tensor routed, Tensor shared, Tensor? residual, {_WEIGHTS}, Tensor next_norm_weight, {_WHO})"
        " -> (Tensor, Tensor)"
    ),
    "moe_tail_deferred": (
        "(Tensor rows, Tensor expert_weights, Tensor permuted_index, Tensor shared, Tensor? residual, "
        f"{_WEIGHTS}, {_WHO}) -> Tensor"
    ),
}
"""The operators, `torch.ops.k3comm.<name>`. Shapes and dtypes are those of `MoETail`'s calls; `layer` is the handle's
index, `output` "full" or "rows". The deferred one takes m from `shared`."""

LIBRARY = torch.library.Library("k3comm", "DEF")


def _implementation(names: list[str]) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        given = dict(zip(names, values, strict=True))
        session, layer = open_session(given.pop("communicator")), given.pop("layer")
        tail = session.handles.get(layer)
        if not isinstance(tail, MoETail):
            raise InputError(f"layer: {layer} given; accepted are those of {session.name}: {sorted(session.handles)}")
        return tail.run_operator(**given)

    return run


def _fake(names: list[str], results: int) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        given = dict(zip(names, values, strict=True))
        shared: Tensor = given["shared"]
        rows = shared.shape[0]
        if given["output"] != "full":
            world_size = open_session(given["communicator"]).world_size
            rows = (rows + world_size - 1) // world_size
        outs = tuple(shared.new_empty(rows, shared.shape[1]) for _ in range(results))
        return outs if results > 1 else outs[0]

    return run


for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema)
    _parsed = getattr(torch.ops.k3comm, _name).default._schema
    _names = [argument.name for argument in _parsed.arguments]
    LIBRARY.impl(_name, _implementation(_names), "CompositeExplicitAutograd")
    torch.library.register_fake(f"k3comm::{_name}", _fake(_names, len(_parsed.returns)), lib=LIBRARY)
