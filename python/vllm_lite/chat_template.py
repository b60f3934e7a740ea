"""Renders chat templates (Jinja, as transformers sets it up) into prompt text.

A template is code from the model's author. It runs in Jinja's immutable sandbox, which this module
narrows further so that no template can hold a server up: see ``template_sandbox``.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from vllm_lite.template_sandbox import TemplateSandbox

# Arguments of this module that a template also reads; a request must not set them by another way.
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "special_tokens",
        "template",
    }
)
# Of objects and lists in messages, tools and template arguments. Far below what the interpreter's
# stack bears, far above what a schema needs.
MAX_NESTING = 100
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(ValueError):
    """The conversation cannot be rendered; the message is fit for the user who sent it."""


def load_chat_template(path: str | Path) -> str:
    """Reads a template file. Raises FileNotFoundError, and ChatTemplateError for a syntax error."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"chat template file {file.absolute()} does not exist")
    template = file.read_text(encoding="utf-8")
    _compile(template)
    return template


def select_template(
    templates: str | Mapping[str, str] | None, wanted: str | None, with_tools: bool
) -> str:
    """Picks the template: ``wanted`` is a name or a template itself, None means the model's own.

    Of named templates, "tool_use" serves conversations with tools, "default" the rest.
    """
    if isinstance(templates, Mapping):
        names = [wanted] if wanted is not None else ["tool_use"] * with_tools + ["default"]
        for name in names:
            if name in templates:
                return templates[name]
        if wanted is None:
            raise ChatTemplateError(
                "the model has several chat templates and none is the default; name one of "
                f"{', '.join(sorted(templates))}"
            )
    template = wanted if wanted is not None else templates
    if template is None:
        raise ChatTemplateError(
            "this model has no chat template; start the server with --chat-template FILE, "
            "or send a plain prompt (completions) instead of messages"
        )
    assert isinstance(template, str)
    return template


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    *,
    special_tokens: Mapping[str, str] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Renders a conversation to prompt text.

    ``messages``: OpenAI's message objects. Content given as a list of text parts is joined with a
    newline; keys whose value is None are left out; a tool call's arguments given as JSON text are
    parsed, since templates print them themselves. ``special_tokens``: bos_token, eos_token, ... as
    text. ``continue_final_message`` leaves the last message open and needs
    ``add_generation_prompt=False``. ``template_kwargs``: further variables of the template, such as
    enable_thinking.

    Raises ChatTemplateError for malformed messages, a template that is wrong or says so itself
    (raise_exception), one that exceeds the limits, and reserved names in ``template_kwargs``.
    """
    special_tokens = special_tokens or {}
    kwargs = template_kwargs or {}
    if not isinstance(kwargs, Mapping):
        raise ChatTemplateError(
            f"chat template arguments must be a dictionary, got {type(kwargs).__name__}"
        )
    compiled = _compile(template)
    reserved = _RESERVED | set(special_tokens) | set(compiled.environment.globals)
    if clash := sorted(set(kwargs) & reserved):
        raise ChatTemplateError(f"chat template arguments must not be named {', '.join(clash)}")
    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError(
            "continue_final_message needs add_generation_prompt=false: the prompt either goes on "
            "with the last message or begins a new one"
        )
    for name, value in kwargs.items():
        check_nesting(value, name)
    chat = _normalize(messages)
    last_content = _tag_last_message(chat) if continue_final_message else ""
    if tools is not None:
        if not isinstance(tools, (list, tuple)) or not all(
            isinstance(tool, Mapping) for tool in tools
        ):
            raise ChatTemplateError("tools must be a list of objects")
        check_nesting(tools, "tools")
        tools = _plain(list(tools), "tools")
    variables = {"documents": None} | {name: _plain(value, name) for name, value in kwargs.items()}
    variables |= dict(special_tokens)
    variables |= {
        "messages": chat,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
    }
    environment = compiled.environment
    assert isinstance(environment, TemplateSandbox)
    try:
        text = environment.render_limited(compiled, variables)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"chat template: {error.message}") from error
    except Exception as error:  # anything a template can run into, such as a missing key
        raise ChatTemplateError(f"chat template: {type(error).__name__}: {error}") from error
    return _cut_at_tag(text, last_content) if continue_final_message else text


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    try:
        return TemplateSandbox().from_string(template)
    except jinja2.TemplateError as error:
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ChatTemplateError(
            f"chat template is not valid Jinja{line}: {error.message}"
        ) from error
    except RecursionError as error:
        raise ChatTemplateError("chat template is nested too deeply") from error


def _normalize(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ChatTemplateError("messages must be a list of message objects")
    if not messages:
        raise ChatTemplateError("messages must not be empty")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(
            f"{where} must be an object with role and content, got {message!r:.80}"
        )
    check_nesting(message, where)
    plain: dict[str, Any] = {k: v for k, v in _plain(message, where).items() if v is not None}
    if not isinstance(plain.get("role"), str):
        raise ChatTemplateError(f"{where}.role must be a string, got {plain.get('role')!r:.80}")
    if "content" in plain:
        plain["content"] = _content_text(plain["content"], f"{where}.content")
    calls = plain.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ChatTemplateError(f"{where}.tool_calls must be a list, got {calls!r:.80}")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ChatTemplateError(f"{where}.tool_calls[{i}] must be an object with a function")
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError) as error:
                raise ChatTemplateError(
                    f"{where}.tool_calls[{i}].function.arguments is not valid JSON: {error}"
                ) from error
            check_nesting(function["arguments"], f"{where}.tool_calls[{i}].function.arguments")
    # Templates read a message's reasoning under one name or the other.
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _content_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatTemplateError(f"{where} must be a string or a list of parts, got {content!r:.80}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise ChatTemplateError(
                f"{where}[{i}] has type {kind!r:.80}; only parts of type 'text' are supported"
            )
        if not isinstance(part.get("text"), str):
            raise ChatTemplateError(f"{where}[{i}].text must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def check_nesting(value: Any, where: str, levels: int = MAX_NESTING) -> None:
    """Raises ChatTemplateError where objects and lists lie in each other too deeply."""
    if not isinstance(value, (Mapping, list, tuple)):
        return
    if levels == 0:
        raise ChatTemplateError(f"{where} is nested more than {MAX_NESTING} levels deep")
    for item in value.values() if isinstance(value, Mapping) else value:
        check_nesting(item, where, levels - 1)


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON's types alone: a template meets no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ChatTemplateError(f"{where} must have strings as keys")
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise ChatTemplateError(f"{where} must be made of JSON types, got {type(value).__name__}")


def _tag_last_message(chat: list[dict[str, Any]]) -> str:
    """Marks the end of the last message's content, so that the rendered text can be cut there."""
    content = chat[-1].get("content")
    if not isinstance(content, str):
        raise ChatTemplateError(
            "continue_final_message: the last message has no content to continue"
        )
    chat[-1]["content"] = content + _CONTINUE_TAG
    return content


def _cut_at_tag(text: str, content: str) -> str:
    tag = _CONTINUE_TAG.strip()
    end = text.rfind(tag)
    if end < 0 or content.strip() not in text:
        raise ChatTemplateError(
            "continue_final_message: the chat template does not print the last message as it is"
        )
    if text.startswith(_CONTINUE_TAG, end):
        return text[:end]
    return text[
        :end
    ].rstrip()  # the template strips contents, so it would have stripped this one too
