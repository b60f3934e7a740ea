"""A snapshot of what an engine is doing."""

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """The first four are the present state; the rest are totals since the engine started."""

    num_running: int = 0  # sequences that hold a row
    num_waiting: int = 0  # sequences in the queue, preempted ones included
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix index
    prefix_hits: int = 0  # of those, the tokens found
    num_preemptions: int = 0
    num_drafts: int = 0  # steps of sequences in which draft tokens were verified
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
