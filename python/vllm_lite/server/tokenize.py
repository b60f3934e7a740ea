"""``/tokenize`` and ``/detokenize``, in vLLM's shapes.

``/tokenize`` takes the bodies of the two generation endpoints, and gives the ids that these would
generate from.
"""

import msgspec

from vllm_lite.server.body import decode
from vllm_lite.server.conversation import prompt_ids
from vllm_lite.server.errors import bad_request
from vllm_lite.server.protocol import ChatRequest, NonNegative
from vllm_lite.server.sampling import check_token_ids, served_name
from vllm_lite.server.state import ServerState


class TokenizeTextRequest(msgspec.Struct, kw_only=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None  # null: true
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest, kw_only=True):
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[NonNegative]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    prompt: str


class _Kind(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"null")


_kind_decoder = msgspec.json.Decoder(_Kind)
_text_decoder = msgspec.json.Decoder(TokenizeTextRequest)
_chat_decoder = msgspec.json.Decoder(TokenizeChatRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def tokenize(state: ServerState, body: bytes) -> TokenizeResponse:
    """Runs in a thread. Raises ``ApiError``."""
    engine = state.engine
    request: TokenizeTextRequest | TokenizeChatRequest
    if bytes(decode(_kind_decoder, body).messages) == b"null":
        request = decode(_text_decoder, body)
        served_name(engine, request.model)
        special = request.add_special_tokens is not False
        try:
            ids = engine.tokenizer.encode(request.prompt, add_special_tokens=special)
        except ValueError as error:  # too long to be worth tokenising
            raise bad_request(f"prompt: {error}", "prompt") from error
    else:
        request = decode(_chat_decoder, body)
        served_name(engine, request.model)
        ids = prompt_ids(state, request)
    texts = state.token_texts
    return TokenizeResponse(
        count=len(ids),
        max_model_len=engine.config.max_model_len,
        tokens=ids,
        token_strs=[texts(token_id)[0] for token_id in ids] if request.return_token_strs else None,
    )


def detokenize(state: ServerState, body: bytes) -> DetokenizeResponse:
    """The text with its special tokens, so that it can be tokenised again. Runs in a thread."""
    request = decode(_detokenize_decoder, body)
    served_name(state.engine, request.model)
    check_token_ids(request.tokens, state.engine.model_config.vocab_size, "tokens")
    text = state.engine.tokenizer.decode(request.tokens, skip_special_tokens=False)
    return DetokenizeResponse(prompt=text)
