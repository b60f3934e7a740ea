"""What embedding does with ids that lead nowhere."""

import pytest
import torch

from vllm_lite import ops

WRONG = [5, -2, -1, -(2**31), 2**31 - 1]  # row 0 of last_tokens holds -1: that row failed


@pytest.mark.parametrize("token", WRONG)
@pytest.mark.parametrize("with_last_tokens", [True, False])
def test_cpu_refuses_an_id_outside_the_table(token: int, with_last_tokens: bool, isa: str) -> None:
    ids = torch.tensor([1, token], dtype=torch.int32)
    last_tokens = torch.tensor([-1], dtype=torch.int32) if with_last_tokens else None
    with pytest.raises(RuntimeError, match=r"embedding: .*token_ids\[1\]"):
        ops.embedding(torch.empty(2, 3), torch.ones(5, 3), ids, last_tokens)


@pytest.mark.parametrize("with_last_tokens", [True, False])
@pytest.mark.parametrize("size", [3, 64])
def test_cuda_gives_zeros_for_an_id_outside_the_table(
    size: int, with_last_tokens: bool, cuda_back_end: str
) -> None:
    ids = torch.tensor([1, *WRONG], dtype=torch.int32)
    last_tokens = torch.tensor([-1], dtype=torch.int32) if with_last_tokens else None
    out = torch.full((6, size), 7.0)
    ops.embedding(out, torch.ones(5, size), ids, last_tokens)
    assert out.sum(-1).tolist() == [size, 0, 0, 0, 0, 0]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match="embedding: out must be"):
        ops.embedding(torch.empty(2, 3), torch.ones(5, 4), torch.zeros(2, dtype=torch.int32))


def test_no_tokens_is_no_work(back_end: str) -> None:
    ops.embedding(torch.empty(0, 4), torch.ones(5, 4), torch.empty(0, dtype=torch.int32))
