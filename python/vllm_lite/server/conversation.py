"""From a conversation to the prompt's token ids, through the chat template."""

from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_lite.server.body import check_nesting
from vllm_lite.server.errors import bad_request, show
from vllm_lite.server.protocol import (
    ChatRequest,
    ContentPart,
    FunctionCall,
    Message,
    Tool,
    ToolCall,
)
from vllm_lite.server.sampling import refuse_unsupported, truncated
from vllm_lite.server.state import ServerState
from vllm_lite.server.tools import check_tools

# What the server itself hands to the template; chat_template_kwargs may not take their place.
_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "special_tokens",
        "template",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)

# Types of parts that are text, with the field that holds it.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}


def prompt_ids(state: ServerState, request: ChatRequest) -> list[int]:
    """The token ids of the conversation, through the model's chat template."""
    refuse_unsupported(request)
    return encode_conversation(state, request, check_tools(request))


def encode_conversation(
    state: ServerState, request: ChatRequest, tools: Sequence[Tool]
) -> list[int]:
    """As ``prompt_ids``, with the tools that ``check_tools`` has given."""
    if request.chat_template is not None and not state.options.trust_request_chat_template:
        raise bad_request(
            "chat_template: this server takes none from requests; it would with"
            " --trust-request-chat-template",
            "chat_template",
            "unsupported_parameter",
        )
    kwargs = dict(request.chat_template_kwargs or {})
    reserved = _RESERVED_KWARGS & kwargs.keys()
    if reserved:
        raise bad_request(
            f"chat_template_kwargs: {', '.join(sorted(reserved))} cannot be set there",
            "chat_template_kwargs",
        )
    check_nesting(kwargs, "chat_template_kwargs")
    if request.documents is not None:
        check_nesting(request.documents, "documents")
        kwargs["documents"] = request.documents
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":  # as templates of models that may think call it
            kwargs.setdefault("enable_thinking", False)
    go_on = bool(request.continue_final_message)
    if go_on and request.add_generation_prompt:
        raise bad_request(
            "continue_final_message: cannot be true together with add_generation_prompt",
            "continue_final_message",
        )
    prompt = (
        request.add_generation_prompt if request.add_generation_prompt is not None else not go_on
    )
    try:
        token_ids = state.engine.tokenizer.encode_chat(
            [_for_template(message, index) for index, message in enumerate(request.messages)],
            tools=[msgspec.to_builtins(tool) for tool in tools] or None,
            add_generation_prompt=prompt,
            continue_final_message=go_on,
            add_special_tokens=bool(request.add_special_tokens),
            chat_template=request.chat_template,
            template_kwargs=kwargs,
        )
    except ValueError as error:  # the template refuses this conversation, or there is no template
        raise bad_request(f"messages: {error}", "messages") from error
    if not token_ids:
        raise bad_request("messages: the chat template makes an empty prompt of them", "messages")
    return truncated(request, token_ids, state.engine.config.max_model_len)


def echoed_text(request: ChatRequest) -> str:
    """What answers begin with."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant":
        return ""
    return _text(last, f"messages[{len(request.messages) - 1}]")


def _for_template(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it.

    One text (parts are joined by newlines), and the arguments of calls as objects.
    """
    where = f"messages[{index}]"
    out: dict[str, Any] = {"role": message.role, "content": _text(message, where)}
    for name in ("name", "reasoning_content", "reasoning", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            out[name] = value
    if message.tool_calls:
        out["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{position}]")
            for position, call in enumerate(message.tool_calls)
        ]
    return out


def _text(message: Message, where: str) -> str:
    if message.content is not None:
        return text_of(message.content, f"{where}.content")
    if message.role != "assistant":
        raise bad_request(f"{where}.content: missing; only the assistant's may be left out", where)
    return message.refusal or ""


def text_of(content: str | list[ContentPart], where: str) -> str:
    """One text of a content's parts, which are joined by newlines."""
    if isinstance(content, str):
        return content
    texts = []
    for position, part in enumerate(content):
        param = f"{where}[{position}]"
        if part.type not in _TEXT_PARTS:
            raise bad_request(
                f"{param}.type: {show(part.type)} is not supported; only 'text' parts are",
                f"{param}.type",
                "unsupported_parameter",
            )
        name = _TEXT_PARTS[part.type]
        text: str | None = getattr(part, name)
        if text is None:
            raise bad_request(f"{param}.{name}: missing", f"{param}.{name}")
        texts.append(text)
    return "\n".join(texts)


def arguments_of(function: FunctionCall, param: str) -> dict[str, Any]:
    arguments = function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(f"{param}: not a JSON object: {error}", param) from error
    check_nesting([[[[arguments]]]], param)  # as it lies in its message
    return arguments


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments = arguments_of(call.function, f"{where}.function.arguments")
    out: dict[str, Any] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
    if call.id is not None:
        out["id"] = call.id
    return out
