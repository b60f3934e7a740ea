"""A Linear's gated activation where it is not one packed weight."""

import torch

from vllm_lite.layers.linear import Linear
from vllm_lite.layers.memory import WeightMemory
from vllm_lite.layers.packed_weight import PackedRows


def test_gate_and_up_of_two_formats() -> None:
    formats = {"gate.weight": "bfloat16", "up.weight": "float32"}
    memory = WeightMemory(torch.float32, torch.device("cpu"), formats.__getitem__)
    linear = Linear([("gate", 32), ("up", 32)], 64, True, memory)
    generator = torch.Generator().manual_seed(1)
    values = {}
    for slot in linear.slots():
        if isinstance(slot.target, PackedRows):
            dtype = getattr(torch, formats[slot.name])
            values[slot.name] = torch.randn(32, 64, generator=generator).to(dtype)
            slot.target.pack(values[slot.name])
        else:
            values[slot.name] = torch.randn(32, generator=generator)
            slot.target.copy_(values[slot.name])
    x = torch.randn(5, 64, generator=generator)
    gate, up = (x @ values[f"{n}.weight"].float().T + values[f"{n}.bias"] for n in ("gate", "up"))

    out = torch.empty(5, 32)
    linear.silu_mul(out, x, torch.empty(5, 64))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up, atol=1e-4, rtol=1e-4)
