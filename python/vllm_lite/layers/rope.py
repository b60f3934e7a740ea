"""Rotary position embedding: the table of cosines and sines that the rope ops read."""

import math

import torch

from vllm_lite.rope_config import RopeConfig


def cos_sin_table(
    rope: RopeConfig, max_model_len: int, divisors: torch.Tensor | None = None
) -> torch.Tensor:
    """Float32 ``[max_model_len, rotary_size]``: the cosines of a position, then its sines.

    ``divisors``: float32 ``[rotary_size / 2]``, divides the frequencies; GGUF files carry llama3's
    scaling so.
    """
    frequencies = inverse_frequencies(rope, max_model_len)
    if divisors is not None:
        if rope.kind not in ("default", "linear"):
            raise ValueError(f"rope kind {rope.kind} together with frequency divisors")
        frequencies = frequencies / divisors
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1) * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, max_model_len: int) -> torch.Tensor:
    """Radians per position of each pair, float32 ``[rotary_size / 2]``.

    Dynamic scaling raises the base with the length of the text. A base that moves while a sequence
    grows would not fit the keys that are cached already, and would make an answer depend on what
    the cache holds. So it is fixed when the model is loaded: by ``max_model_len``, and plain where
    that is not above the original length.
    """
    theta = rope.theta
    if rope.kind == "dynamic" and max_model_len > rope.original_max_position:
        stretch = rope.factor * max_model_len / rope.original_max_position - (rope.factor - 1)
        theta *= stretch ** (rope.rotary_size / (rope.rotary_size - 2))
    exponents = torch.arange(0, rope.rotary_size, 2, dtype=torch.float32) / rope.rotary_size
    frequencies = 1.0 / theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's rule: long waves are scaled, short ones kept, those between blended."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # within the original length
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Yarn (arXiv 2309.00071) section 3.2: a ramp over pairs, from kept to divided."""

    def dimension(turns: float) -> float:
        """The pair that makes ``turns`` turns within the original length."""
        length = rope.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_size * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_size - 1)
    width = high - low or 0.001  # a step, where both ends fall on one dimension
    pairs = torch.arange(rope.rotary_size // 2, dtype=torch.float32)
    divided = ((pairs - low) / width).clamp(0, 1)
    return frequencies / rope.factor * divided + frequencies * (1 - divided)
