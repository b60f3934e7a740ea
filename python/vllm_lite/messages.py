"""What travels between an engine's front end and the engine core, as msgpack arrays."""

import msgspec

MAX_CONSTRAINT_BYTES = 1 << 19  # of an encoded TokenConstraint


class TokenConstraint(msgspec.Struct, array_like=True):
    """What masks a sequence's tokens are made from. It travels as it is, from the front end through
    the engine core and its plans to the worker.
    """

    grammar: str  # llguidance's; empty: none
    bad_words: list[list[int]]  # token sequences that may not be completed
    late_ids: list[int]  # those that end the sequence, masked before min_tokens
    min_tokens: int
    ignored_ids: list[int]  # masked while a grammar allows any others


class AddRequest(msgspec.Struct, array_like=True, tag="add"):
    """One request; the fields are ``EngineCore.submit``'s arguments
    (csrc/bindings/engine_bindings.cpp).
    """

    key: int
    prompt: bytes  # int32 token ids, native byte order
    n: int
    priority: int
    max_tokens: int
    min_tokens: int
    salt: bytes
    temperature: float
    top_p: float
    min_p: float
    top_k: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    num_logprobs: int
    seed: int
    bias_ids: list[int]
    bias_values: list[float]
    allowed_ids: list[int]
    stop_ids: list[int]
    eos_ids: list[int]
    stops: list[str]
    include_stop: bool
    skip_special_tokens: bool
    constraint: bytes  # a TokenConstraint, or none
    num_prompt_logprobs: int = -1
    prompt_logprobs_start: int = 0
    pooling: str = ""  # or LAST, MEAN
    beam_width: int = 0  # none
    length_penalty: float = 1.0
    early_stopping: str = "no"  # or yes, never


class AbortRequests(msgspec.Struct, array_like=True, tag="abort"):
    keys: list[int]


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """A client's first message. The engine core's answer, empty news, shows that all is open."""

    client_id: int


ToEngineCore = AddRequest | AbortRequests | Hello


class TokenLogprobs(msgspec.Struct, array_like=True):
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class SequenceOutput(msgspec.Struct, array_like=True):
    """What is new of one sequence (csrc/engine/output_writer.h)."""

    key: int
    sample_index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None
    num_cached_tokens: int
    message: str | None
    prompt_logprobs: list[TokenLogprobs] | None = None
    vector: bytes | None = None  # float32, native byte order


class CoreStats(msgspec.Struct, array_like=True):
    """The engine core's state and totals since its start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class EngineOutputs(msgspec.Struct, array_like=True):
    outputs: list[SequenceOutput]
    stats: CoreStats


encode = msgspec.msgpack.Encoder().encode
decode_to_engine_core = msgspec.msgpack.Decoder(ToEngineCore).decode
decode_constraint = msgspec.msgpack.Decoder(TokenConstraint).decode
decode_outputs = msgspec.msgpack.Decoder(EngineOutputs).decode
