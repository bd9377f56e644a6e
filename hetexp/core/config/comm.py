"""How ranks exchange gradients (config group `comm`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PositiveFloat

from hetexp.core.cost.step import Wire
from hetexp.core.section import Section


def variables(raw: Any) -> Any:
    """Return environment variables as texts: numbers as they are written, `true` and `false` as 1 and 0."""
    if not isinstance(raw, dict):
        return {} if raw is None else raw
    numbers = {name: value for name, value in raw.items() if isinstance(value, (int, float))}
    return raw | {n: str(int(value) if isinstance(value, bool) else value) for n, value in numbers.items()}


class CommConfig(Section):
    """How ranks exchange gradients."""

    backend: Literal["auto", "native", "shm", "gloo"] = "auto"
    """Library that carries the exchange. `native` is the vendor's own library (NCCL), `shm` is memory that
    the ranks of a host share, `gloo` uses TCP. `auto` takes the one that fits the devices."""
    wire: Wire = "float32"
    """Type that gradients travel in. `bfloat16` and `int8` compress them, with error feedback; `float32`
    sends them as they are."""
    boundary_wire: Wire = "float32"
    """Type that activations travel in between pipeline stages, and their gradients. There is no error
    feedback; `float32` sends them as they are."""
    env: Annotated[dict[str, str] | None, BeforeValidator(lambda env: env and variables(env))] = None
    """Environment variables of every rank: `comm.env={NCCL_P2P_DISABLE: 1}`."""
    timeout_seconds: PositiveFloat = 300.0
    """Longest wait in a collective."""
    self_test_seconds: PositiveFloat = 20.0
    """Longest time for the exchange to connect and to sum known values, before training."""
