"""What is wrong with a layer's weights or a call's tensors, found before any peer is involved."""

from __future__ import annotations

import torch
from torch import Tensor

from k3comm.errors import InputError
from k3comm.session import Session
from k3comm.tiers.interface import Project, TailWeights

MAX_SCALE = 3.0e38
"""Of `routed_scale`: what fp32 holds."""


def check_rows(name: str, x: Tensor, session: Session, width: int, dtype: torch.dtype | None = None) -> None:
    """Refuses, with InputError, what is no dense tensor [m, width] on the device, of `dtype` or the spec's own."""
    dtype = dtype or session.dtype
    if not isinstance(x, Tensor):
        raise InputError(f"{name}: {type(x).__name__} given; accepted is a tensor [m, {width}]")
    if x.dim() != 2 or x.shape[1] != width:
        raise InputError(f"{name}: shape {tuple(x.shape)} given; accepted is [m, {width}]")
    if x.dtype != dtype:
        raise InputError(f"{name}: {x.dtype} given; accepted is {dtype}")
    _check_dense(name, x, session)


def checked_weights(
    session: Session,
    *,
    norm_weight: Tensor | None,
    up_weight: Tensor | None,
    up_bias: Tensor | None,
    routed_scale: float,
    project: Project | None,
    precise: bool,
    sharded: bool | None,
) -> TailWeights:
    """One layer's weights, or InputError that names the argument, what was given and what is accepted."""
    hidden, latent, world_size = session.spec.hidden_size, session.spec.latent_size, session.world_size
    if (up_weight is None) == (project is None):
        given = "neither" if up_weight is None else "both"
        raise InputError(f"up_weight, project: {given} given; accepted is one of the two")
    if project is not None and not callable(project):
        raise InputError(f"project: {project!r} given; accepted is a callable z [m, {latent}] -> [m, {hidden}]")
    if project is not None and precise:
        raise InputError("precise: True given with project; accepted is one of the two, since project takes rounded z")
    for name, flag in (("precise", precise), ("sharded", sharded)):
        if not isinstance(flag, bool) and not (name == "sharded" and flag is None):
            raise InputError(f"{name}: {flag!r} given; accepted are True and False")
    if (
        isinstance(routed_scale, bool)
        or not isinstance(routed_scale, int | float)
        or not abs(routed_scale) <= MAX_SCALE
    ):
        raise InputError(f"routed_scale: {routed_scale!r} given; accepted are numbers that fp32 holds")
    if norm_weight is not None:
        check_vector("norm_weight", norm_weight, latent, session)
    if up_bias is not None:
        check_vector("up_bias", up_bias, hidden, session)
    if up_weight is not None:
        shapes = [(hidden, latent)] + ([(hidden // world_size, latent)] if hidden % world_size == 0 else [])
        if not isinstance(up_weight, Tensor) or tuple(up_weight.shape) not in shapes:
            shape = tuple(up_weight.shape) if isinstance(up_weight, Tensor) else type(up_weight).__name__
            raise InputError(f"up_weight: {shape} given; accepted are {' and '.join(map(str, dict.fromkeys(shapes)))}")
        _check_place("up_weight", up_weight, (session.dtype,), session)
        found = tuple(up_weight.shape) != shapes[0]
        if sharded is not None and sharded != found and world_size > 1:
            raise InputError(f"sharded: {sharded} given with up_weight {tuple(up_weight.shape)}; accepted is {found}")
        sharded = found
    if sharded and hidden % world_size:
        raise InputError(f"sharded: True given; accepted if hidden_size ({hidden}) is a multiple of {world_size} ranks")
    return TailWeights(
        norm_weight=norm_weight,
        up_weight=up_weight,
        up_bias=up_bias,
        routed_scale=float(routed_scale),
        project=project,
        precise=precise,
        sharded=bool(sharded) and world_size > 1,
    )


def check_vector(name: str, x: Tensor, width: int, session: Session) -> None:
    """Refuses, with InputError, what is no dense tensor [width] in the spec's dtype or fp32, on the device."""
    if not isinstance(x, Tensor) or tuple(x.shape) != (width,):
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{name}: {shape} given; accepted is a tensor [{width}]")
    _check_place(name, x, (session.dtype, torch.float32), session)


def _check_place(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], session: Session) -> None:
    if x.dtype not in dtypes:
        raise InputError(f"{name}: {x.dtype} given; accepted are {' and '.join(map(str, dict.fromkeys(dtypes)))}")
    _check_dense(name, x, session)


def _check_dense(name: str, x: Tensor, session: Session) -> None:
    if x.device != session.device:
        raise InputError(f"{name}: on {x.device}; accepted is {session.device}")
    if x.layout is not torch.strided:
        raise InputError(f"{name}: {x.layout} given; accepted is torch.strided")
