"""The engine core's C++ module, for type checkers (csrc/bindings/{engine,text}_bindings.cpp).

``tests/python/test_core_stub.py`` holds it to what the module exports.
"""

import builtins
from collections.abc import Sequence
from typing import ClassVar, Literal, final

from _typeshed import ReadableBuffer

class Error(ValueError):
    """The caller asked for something that cannot be done; the message is for the user."""

class InternalError(RuntimeError):
    """An invariant of the engine core does not hold."""

@final
class TextDecoding:
    __members__: ClassVar[dict[str, TextDecoding]]
    BYTE_LEVEL: ClassVar[TextDecoding]
    BYTE_FALLBACK: ClassVar[TextDecoding]
    def __init__(self, value: int) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __int__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

@final
class TokenKind:
    __members__: ClassVar[dict[str, TokenKind]]
    NORMAL: ClassVar[TokenKind]
    SPECIAL: ClassVar[TokenKind]  # hidden by skip_special_tokens
    BYTE: ClassVar[TokenKind]  # a byte-fallback token: exactly one byte
    def __init__(self, value: int) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __int__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class TokenTable:
    """Token id -> bytes, and how those bytes become text."""

    def __init__(
        self,
        bytes: builtins.bytes,  # all tokens back to back
        offsets: Sequence[int],  # [tokens + 1]
        kinds: builtins.bytes,  # [tokens], TokenKind values
        decoding: TextDecoding,
    ) -> None: ...
    def __len__(self) -> int: ...
    def bytes(self, id: int) -> builtins.bytes: ...
    def kind(self, id: int) -> TokenKind: ...
    @property
    def decoding(self) -> TextDecoding: ...

def make_token_table(
    bytes: builtins.bytes,  # all tokens back to back
    offsets: builtins.bytes,  # uint32 [tokens + 1]
    kinds: builtins.bytes,  # uint8 [tokens], TokenKind values
    decoding: Literal["byte_level", "byte_fallback"],
) -> TokenTable: ...

class Detokenizer:
    """Tokens to text, one token at a time, for one sequence."""

    def __init__(self, table: TokenTable, skip_special_tokens: bool) -> None: ...
    def append(self, tokens: Sequence[int]) -> str: ...
    def preview_tail(self) -> str: ...
    def finish(self) -> str: ...

class StopAutomaton:
    """Stop strings, built once for all sequences of a request."""

    def __init__(self, stops: Sequence[str]) -> None: ...
    @property
    def stops(self) -> list[str]: ...

class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces."""

    def __init__(self, automaton: StopAutomaton, include_stop_in_output: bool = False) -> None: ...
    def append(self, text: str) -> tuple[int, str]: ...
    def would_match(self, text: str) -> int: ...
    def finish(self) -> str: ...

class ShmRing:
    """One-way ring of messages between two processes: one writer, one reader."""

    def __init__(self, fd: int) -> None: ...
    @staticmethod
    def create(num_slots: int, max_message_bytes: int) -> int: ...
    @property
    def max_message_bytes(self) -> int: ...
    def push(self, message: ReadableBuffer, timeout_ms: int) -> bool:
        """False if no slot came free in time. Raises EOFError if the ring is closed."""
    def peek(self, timeout_ms: int) -> memoryview | None:
        """The next message, until release(); None if none came. Raises EOFError at the end."""
    def release(self) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...

class EngineStats:
    """The engine core's state after its last step, and totals since its start."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_used_blocks(self) -> int: ...
    @property
    def kv_total_blocks(self) -> int: ...
    @property
    def prefix_queries(self) -> int: ...  # tokens
    @property
    def prefix_hits(self) -> int: ...  # tokens
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...  # steps of sequences in which drafts were verified
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_accepted_tokens(self) -> int: ...

class EngineCore:
    """Requests in, plans and outputs out (csrc/engine/engine_core.h).

    ``submit``, ``abort``, the outputs, ``stats`` and ``stop`` may be called from any thread; the
    rest belongs to one.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_waiting: int,
        max_chunk_tokens: int,  # 0: only the budget limits a chunk
        policy: Literal["fcfs", "priority"],
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        sliding_window: int,  # 0: none
        num_clients: int,
        async_scheduling: bool,
        num_speculative_tokens: int,  # 0: none
        prompt_lookup_min: int,
        prompt_lookup_max: int,
        max_num_logits: int,  # of a step, drafts included; 0: no limit
        tokens: TokenTable,
    ) -> None: ...
    def submit(
        self,
        *,
        key: int,  # the client above bit 48, its counter below
        prompt: bytes,  # int32 token ids, native byte order
        n: int,
        priority: int,
        max_tokens: int,
        min_tokens: int,
        salt: bytes,  # 16 bytes or none
        temperature: float,
        top_p: float,
        min_p: float,
        top_k: int,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        num_logprobs: int,  # -1: none
        seed: int,  # 64 bits; sample i gets seed + i
        bias_ids: Sequence[int],
        bias_values: Sequence[float],
        allowed_ids: Sequence[int],
        stop_ids: Sequence[int],
        eos_ids: Sequence[int],  # those of stop_ids that are no stop_reason
        stops: Sequence[str],
        include_stop: bool,
        skip_special_tokens: bool,
        constraint: bytes,  # a TokenConstraint of messages.py, or none
        num_prompt_logprobs: int,  # -1: none
        prompt_logprobs_start: int,
        pooling: Literal["", "LAST", "MEAN"],
        beam_width: int,  # 0: no beam search
        length_penalty: float,
        early_stopping: str,  # "no", "yes", "never"
    ) -> None: ...
    def abort(self, key: int) -> None: ...
    def begin_step(self) -> memoryview | None:
        """The plan, good until the next begin_step; finish_step or fail_step must follow. None:
        nothing to do before the result of the step in flight.
        """
    def finish_step(self, result: bytes) -> None:
        """The result of the oldest plan. Raises InternalError if it is none; that step failed."""
    def fail_step(self, message: str) -> None: ...
    def has_work(self) -> bool: ...
    def take_outputs(self, client: int) -> bytes | None: ...
    def wait_outputs(self) -> list[tuple[int, bytes]]:
        """Blocks until there is news; empty once stopped."""
    def run(self, plan_fd: int, result_fd: int, step_timeout_ms: int) -> None: ...
    def stop(self) -> None: ...
    def stats(self) -> EngineStats: ...
    def check_invariants(self) -> None: ...

def trim_heap() -> None:
    """Gives free heap memory back to the system, for after a start that took much for a while."""

def exit_when_hung_up(fd: int, exit_code: int, directory: str = "") -> None:
    """Ends this process when the peer of the connected socket is gone; removes ``directory``."""
