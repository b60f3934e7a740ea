"""Cases of what expert layers need around their matrix products."""

from collections.abc import Callable

import torch

from ops.op_table import Result, make_cases, normal, shifted
from vllm_lite import ops


def empty_int(*shape: int) -> torch.Tensor:
    return torch.full(shape, -7, dtype=torch.int32)


# ---- route_experts


def route_reference(
    logits: torch.Tensor, k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights in float64, ids); a stable sort keeps the lowest id first among equals."""
    values, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    weights = values.softmax(-1)[:, :k]
    if renormalize:
        weights = values[:, :k].softmax(-1)
    return weights, ids[:, :k].int()


def route_case(
    tokens: int, experts: int, k: int, renormalize: bool, with_ties: bool = False
) -> Callable[..., Result]:
    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        # A view into wider rows, which begin anywhere.
        wide = normal(generator, dtype, tokens, experts + 3)
        if with_ties:
            wide = wide.round()
            wide[0] = 0
            wide[0, ::2] = -0.0
        logits = wide[:, 1 : experts + 1]
        weights, ids = torch.full((tokens, k), float("nan")), empty_int(tokens, k)
        ops.route_experts(weights, ids, logits, renormalize)
        expected_weights, expected_ids = route_reference(logits, k, renormalize)
        return Result(
            {"weights": weights, "ids": ids}, {"weights": expected_weights, "ids": expected_ids}
        )

    return run


ROUTE_EXPERTS = {
    "eight_of_128": route_case(37, 128, 8, True),
    "two_of_eight": route_case(5, 8, 2, False),
    "one_token": route_case(1, 60, 4, True),
    "no_token": route_case(0, 60, 4, True),
    "all_of_few": route_case(3, 5, 5, False),
    "largest": route_case(6, 512, 16, False),
    "ties": route_case(9, 200, 16, True, with_ties=True),
}


def route_nan(generator: torch.Generator, dtype: torch.dtype) -> Result:
    """Ids stay distinct experts whatever the logits; the weights show that something is wrong."""
    nan, inf = float("nan"), float("inf")
    rows = [[nan, nan, nan, nan], [nan, 1.0, nan, 2.0], [-inf, 3.0, -inf, -inf]]
    logits = torch.tensor(rows).to(dtype)
    weights, ids = torch.zeros(3, 3), empty_int(3, 3)
    ops.route_experts(weights, ids, logits, False)
    return Result(
        {"weights": weights, "ids": ids},
        {
            "weights": torch.tensor([[nan] * 3, [nan] * 3, [1.0, 0.0, 0.0]]).double(),
            "ids": torch.tensor([[0, 1, 2], [3, 1, 0], [1, 0, 2]], dtype=torch.int32),
        },
    )


# ---- permute_tokens


def permute_reference(
    ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flat = ids.reshape(-1).long()
    here = (flat >= 0) & (flat < num_experts)
    experts = torch.where(here, flat, num_experts)
    order = experts.sort(dim=0, stable=True).indices
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order))
    counts = experts.bincount(minlength=num_experts + 1)[:num_experts]
    start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return order.int(), torch.where(here, rows, -1).int(), start.int()


def permute_case(tokens: int, k: int, num_experts: int, lowest: int = 0) -> Callable[..., Result]:
    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        above = num_experts - lowest
        ids = torch.randint(lowest, above, (tokens, k), generator=generator, dtype=torch.int32)
        order, rows = empty_int(tokens * k), empty_int(tokens * k)
        start = empty_int(num_experts + 1)
        ops.permute_tokens(ids, order, rows, start)
        names = ("order", "rows", "expert_start")
        expected = permute_reference(ids, num_experts)
        return Result(
            dict(zip(names, (order, rows, start), strict=True)),
            dict(zip(names, expected, strict=True)),
        )

    return run


PERMUTE_TOKENS = {
    "batch": permute_case(50, 4, 8),
    "one_token": permute_case(1, 2, 8),
    "no_token": permute_case(0, 2, 8),
    "one_expert": permute_case(30, 1, 1),
    "experts_of_other_ranks": permute_case(40, 4, 6, lowest=-3),
    "several_tiles": permute_case(2500, 2, 3),
}

# ---- gather_rows


def gather_case(tokens: int, k: int, size: int, unaligned: bool = False) -> Callable[..., Result]:
    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        tokens_in = normal(generator, dtype, tokens, size)
        if unaligned:
            tokens_in = shifted(tokens_in)
        order = torch.randperm(tokens * k, generator=generator).int()
        out = torch.full((tokens * k, size), float("nan"), dtype=dtype)
        ops.gather_rows(out, tokens_in, order, k)
        return Result({"out": out}, {"out": tokens_in[order.long() // k]}, exact=True)

    return run


GATHER_ROWS = {
    "batch": gather_case(30, 4, 256),
    "one_token": gather_case(1, 2, 2048),
    "no_token": gather_case(0, 2, 64),
    "odd_size": gather_case(7, 3, 37),
    "unaligned": gather_case(7, 3, 64, unaligned=True),
    "long_rows": gather_case(2, 2, 16384),
}

# ---- combine_experts


def combine_case(
    tokens: int, k: int, size: int, absent: bool = False, unaligned: bool = False
) -> Callable[..., Result]:
    def run(generator: torch.Generator, dtype: torch.dtype) -> Result:
        expert_rows = normal(generator, dtype, tokens * k, size)
        if unaligned:
            expert_rows = shifted(expert_rows)
        weights = torch.rand(tokens, k, generator=generator)
        rows = torch.randperm(tokens * k, generator=generator).int().view(tokens, k)
        factors = weights.double()
        if absent:
            expert_rows[rows[:, 1].long()] = float("nan")
            rows[:, 1], factors[:, 1] = -1, 0
        out = torch.full((tokens, size), float("nan"), dtype=dtype)
        ops.combine_experts(out, expert_rows, rows, weights)
        chosen = expert_rows.double()[rows.long().clamp(0)].nan_to_num(0.0)
        return Result({"out": out}, {"out": (chosen * factors[..., None]).sum(1)})

    return run


COMBINE_EXPERTS = {
    "batch": combine_case(30, 4, 256),
    "one_token": combine_case(1, 8, 2048),
    "no_token": combine_case(0, 8, 64),
    "odd_size": combine_case(7, 3, 37),
    "unaligned": combine_case(7, 3, 64, unaligned=True),
    "pairs_without_a_row": combine_case(20, 3, 64, absent=True),
    "one_choice": combine_case(9, 1, 72),
}

CASES = [
    *make_cases("route_experts", ROUTE_EXPERTS | {"nan_and_infinity": route_nan}),
    *make_cases("permute_tokens", PERMUTE_TOKENS, [torch.float32]),
    *make_cases("gather_rows", GATHER_ROWS),
    *make_cases("combine_experts", COMBINE_EXPERTS),
]
