"""A step that takes as much memory as any: what measured_kv_memory measures."""

import numpy as np

from vllm_lite.sampling_params import MAX_LOGIT_BIAS_ENTRIES, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from vllm_lite.worker.step_plan import HEADER_WORDS, NEW_ROW, PLAN_MAGIC


def largest_plan(
    max_num_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int
) -> bytes:
    """A plan of as many tokens as a step may have, spread over as many new sequences, all KV in
    block 0.

    Every sequence is sampled from, with cuts, penalties and the most logprobs, and all other tokens
    have as many. The first has the longest history and lists of ids that a request may have. Not
    all of them: their upload would be larger than any that happens, and a step that finds no memory
    for one fails alone.
    """
    num_seqs = min(max_num_seqs, max_num_tokens)
    num_tokens = min(max_num_tokens, num_seqs * max_model_len)
    query_start = np.arange(num_seqs + 1) * num_tokens // num_seqs
    seq_lens = np.diff(query_start)
    positions = np.arange(num_tokens) - np.repeat(query_start[:-1], seq_lens)
    rows = np.arange(num_seqs)
    num_blocks = -(-seq_lens // block_size)
    table_updates = np.zeros((num_blocks.sum(), 3))  # row, index, block
    table_updates[:, 0] = np.repeat(rows, num_blocks)
    table_updates[:, 1] = np.concatenate([np.arange(count) for count in num_blocks])

    new_rows = np.zeros(num_seqs, dtype=NEW_ROW)
    new_rows["row"] = rows
    new_rows["temperature"] = 1.0
    new_rows["top_p"] = 0.9
    new_rows["repetition_penalty"] = 1.1
    new_rows["num_logprobs"] = num_logprobs = min(MAX_LOGPROBS, vocab_size)
    new_rows["num_history"] = 1
    first = new_rows[:1]
    first["num_bias"] = num_bias = min(MAX_LOGIT_BIAS_ENTRIES, vocab_size)
    first["num_allowed"] = vocab_size
    first["num_stop"] = num_stop = min(MAX_STOP_TOKEN_IDS, vocab_size)
    first["num_history"] = max_model_len
    ids = np.arange(vocab_size)
    bias_values = np.zeros(num_bias)
    histories = np.zeros(max_model_len + num_seqs - 1)
    row_lists = np.concatenate([ids[:num_bias], bias_values, ids, ids[:num_stop], histories])

    slots = positions % block_size
    parts = [slots.astype(np.int64).tobytes()]
    parts += [
        section.astype(np.int32).tobytes()
        for section in (
            np.zeros(num_tokens),  # token ids
            positions,
            query_start,
            seq_lens,
            rows,
            query_start[1:] - 1,  # of the tokens that are sampled from
            table_updates,
        )
    ]
    indices = np.setdiff1d(np.arange(num_tokens), query_start[1:] - 1)
    scored = np.stack([indices, 0 * indices, np.full_like(indices, num_logprobs)], axis=1)
    body = b"".join(
        [
            *parts,
            new_rows.tobytes(),
            row_lists.astype(np.int32).tobytes(),
            scored.astype(np.int32).tobytes(),
        ]
    )
    longest = seq_lens.max()
    header = [
        PLAN_MAGIC, HEADER_WORDS + len(body) // 4, 0, 0, num_tokens, num_seqs, num_seqs,
        len(table_updates), 0, 0, num_seqs, len(row_lists), longest, longest, num_logprobs, 0,
        len(indices), num_logprobs, 0, 0, 0, 0,
    ]  # fmt: skip
    return np.array(header, dtype=np.int32).tobytes() + body
