"""The helpers of expert layers together, and what they refuse."""

import pytest
import torch

from ops.back_ends import CUDA_BACK_ENDS
from vllm_lite import ops


def test_a_layer_of_experts_is_the_sum_over_its_experts(back_end: str) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens, size, num_experts, k = 21, 40, 6, 3
    x = torch.randn(tokens, size, generator=generator)
    logits = torch.randn(tokens, num_experts, generator=generator)
    matrices = torch.randn(num_experts, size, size, generator=generator)
    weights, ids = torch.empty(tokens, k), torch.empty(tokens, k, dtype=torch.int32)
    ops.route_experts(weights, ids, logits, True)
    order, rows = torch.empty(2, tokens * k, dtype=torch.int32)
    start = torch.empty(num_experts + 1, dtype=torch.int32)
    ops.permute_tokens(ids, order, rows, start)
    gathered = torch.empty(tokens * k, size)
    ops.gather_rows(gathered, x, order, k)
    results = torch.empty_like(gathered)
    for expert in range(num_experts):
        part = slice(int(start[expert]), int(start[expert + 1]))
        results[part] = gathered[part] @ matrices[expert]
    out = torch.empty_like(x)
    ops.combine_experts(out, results, rows, weights)
    share = torch.zeros(tokens, num_experts).scatter(1, ids.long(), weights)
    expected = torch.einsum("te,th,ehd->td", share.double(), x.double(), matrices.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("experts", "k", "message"),
    [(513, 2, "512 experts"), (8, 0, "k must be"), (8, 9, "k must be"), (64, 17, "k must be")],
)
def test_route_experts_refuses_what_it_does_not_support(
    experts: int, k: int, message: str, back_end: str
) -> None:
    ids = torch.empty(2, k, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        ops.route_experts(torch.empty(2, k), ids, torch.zeros(2, experts), True)


@pytest.mark.parametrize("pair", [-1, 6, 2**31 - 1])
def test_gather_rows_follows_no_pair_outside_the_input(pair: int, back_end: str) -> None:
    whole = torch.randn(9, 8)
    out = torch.zeros(2, 8)
    order = torch.tensor([5, pair], dtype=torch.int32)
    if back_end in CUDA_BACK_ENDS:
        ops.gather_rows(out, whole[3:6], order, 2)
        assert torch.equal(out[0], whole[5]) and out[1].eq(0).all()
    else:
        with pytest.raises(RuntimeError, match=rf"order\[1\] is {pair}; input has 3 rows"):
            ops.gather_rows(out, whole[3:6], order, 2)
        assert out.eq(0).all()


@pytest.mark.parametrize("row", [4, 2**31 - 1])
def test_combine_experts_follows_no_row_outside_the_expert_rows(row: int, back_end: str) -> None:
    whole = torch.ones(12, 8)
    out, rows = torch.zeros(1, 8), torch.tensor([[3, row]], dtype=torch.int32)
    if back_end in CUDA_BACK_ENDS:
        ops.combine_experts(out, whole[4:8], rows, torch.full((1, 2), 0.5))
        assert out.eq(0.5).all()
    else:
        with pytest.raises(RuntimeError, match=rf"names row {row}; expert_rows has rows 0 to 3"):
            ops.combine_experts(out, whole[4:8], rows, torch.full((1, 2), 0.5))
        assert out.eq(0).all()
