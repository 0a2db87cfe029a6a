"""The rotary part of config.json: base frequency and position scaling, in either spelling. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from common.errors import ModelLoadError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and how positions beyond the pre-training length are scaled.

    `dynamic` scales only beyond `max_position_embeddings`; Baton never serves past that length (cached
    keys would have to change with the sequence), so within it `dynamic` equals `default`.
    """

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3 and yarn: the pre-training length
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None = derived from factor and the mscales
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


def read_rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` that holds everything."""
    scaling: Mapping[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelLoadError("config.json: rope_parameters per layer type are not supported")
    if scaling.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ModelLoadError(
            f"config.json: partial_rotary_factor {scaling['partial_rotary_factor']} is not supported"
        )
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in _ROPE_TYPES:
        raise ModelLoadError(
            f"config.json: rope type {rope_type!r} is not supported, only {', '.join(_ROPE_TYPES)}"
        )
    top_level_rope = raw.get("rope_parameters") or {}
    theta = scaling.get("rope_theta") or top_level_rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    original = (
        raw.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or max_positions
    )
    factor = scaling.get("factor")
    if factor is None and rope_type == "yarn":
        factor = max_positions / original
    if factor is None and rope_type != "default":
        raise ModelLoadError(f"config.json: rope type {rope_type!r} needs a factor")
    return RopeConfig(
        theta=float(theta),
        type=rope_type,
        factor=float(factor or 1.0),
        original_max_position_embeddings=int(original) if rope_type in ("llama3", "yarn") else 0,
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=scaling.get("attention_factor"),
        mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"),
        truncate=bool(scaling.get("truncate", True)),
    )


def rope_scaling_json(rope: RopeConfig) -> dict[str, Any]:
    """The `rope_scaling` entry that `read_rope` reads back; for types other than default."""
    out: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.type in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.type == "llama3":
        out.update(low_freq_factor=rope.low_freq_factor, high_freq_factor=rope.high_freq_factor)
    if rope.type == "yarn":
        out.update(beta_fast=rope.beta_fast, beta_slow=rope.beta_slow, truncate=rope.truncate)
        optional = {key: getattr(rope, key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        out.update({key: value for key, value in optional.items() if value is not None})
    return out
