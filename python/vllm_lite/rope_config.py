"""How positions turn queries and keys: the rotary embedding of a model. Needs no torch."""

import math
from dataclasses import dataclass
from typing import Any

from vllm_lite.loader.fields import Fields

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """``layers/rope.py`` has the formulas. What a kind does not use keeps its neutral default."""

    theta: float
    rotary_size: int  # leading elements of a head that turn
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    original_max_position: int = 0  # length of pretraining; unused by default and linear
    attention_factor: float = 1.0  # multiplies cosines and sines (yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions as the ends of the ramp


def read_rope(config: Fields, head_size: int, max_position: int) -> tuple[RopeConfig, int]:
    """Reads ``rope_scaling`` or ``rope_parameters``; returns it and the model's length limit.

    The limit: linear and dynamic take ``max_position_embeddings`` as the length of pretraining and
    multiply it by the factor. Yarn gives ``original_max_position_embeddings * factor``
    (``max_position_embeddings`` is the original where that is not given), so that a file whose
    ``max_position_embeddings`` is already scaled is not scaled twice. Default and llama3 keep
    ``max_position_embeddings``.
    """
    scaling = _parameters(config)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ROPE_KINDS:
        raise scaling.error(
            "rope_type" if "rope_type" in scaling.values else "type",
            f"supported: {', '.join(ROPE_KINDS)}",
        )
    for fields in (config, scaling):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.error("partial_rotary_factor", "only 1 is supported here")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10_000.0))
    if theta <= 1:
        raise ValueError(f"{config.path}: rope_theta is {theta}; it must be above 1")
    common: dict[str, Any] = {"theta": theta, "rotary_size": head_size, "kind": kind}
    if kind == "default":
        return RopeConfig(**common), max_position
    if kind == "llama3":
        low = scaling.number("low_freq_factor")
        if scaling.number("high_freq_factor") <= low:
            raise scaling.error("high_freq_factor", f"it must be above low_freq_factor ({low})")
        llama3 = RopeConfig(
            **common,
            factor=scaling.number("factor"),
            original_max_position=_original(config, scaling, max_position),
            low_freq_factor=low,
            high_freq_factor=scaling.number("high_freq_factor"),
        )
        return llama3, max_position
    if kind == "yarn":
        original = _original(config, scaling, max_position)
        factor = scaling.number("factor", max_position / original)
        yarn = RopeConfig(
            **common,
            factor=factor,
            original_max_position=original,
            attention_factor=_yarn_attention_factor(scaling, factor),
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            truncate=scaling.boolean("truncate", True),
        )
        return yarn, round(original * factor)
    factor = scaling.number("factor")
    original = max_position if kind == "dynamic" else 0
    rope = RopeConfig(**common, factor=factor, original_max_position=original)
    return rope, round(max_position * factor)


def _parameters(config: Fields) -> Fields:
    """The one set of parameters, whichever of the two spellings the file uses."""
    scaling = config.section("rope_scaling")
    name = "rope_scaling" if scaling.values else "rope_parameters"
    scaling = config.section(name)
    # Files of models with several kinds of layers nest one set per kind.
    nested = [key for key, value in scaling.values.items() if isinstance(value, dict)]
    if not nested:
        return scaling
    first = scaling.section(nested[0])
    if any(scaling.values[key] != first.values for key in nested[1:]):
        raise config.error(name, "one set of parameters for all layers is supported")
    return first


def _original(config: Fields, scaling: Fields, max_position: int) -> int:
    # A value beside the scaling comes before one inside it, as in transformers.
    inside = scaling.integer("original_max_position_embeddings", max_position)
    return config.integer("original_max_position_embeddings", inside)


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    """Yarn (arXiv 2309.00071) section 3.4, with the two mscale fields of later models."""

    def strength(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return strength(scaling.number("mscale")) / strength(scaling.number("mscale_all_dim"))
    return strength(1.0)
