"""Calls of tools and reasoning in a conversation: what a request asks for, and how its answer is
read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_lite.output_formats import REASONING_FORMATS
from vllm_lite.output_parser import OutputParser, make_output_parser
from vllm_lite.sampling_params import SamplingParams, StructuredOutputsParams
from vllm_lite.server.body import check_nesting
from vllm_lite.server.errors import bad_request, show
from vllm_lite.server.protocol import ChatRequest, Tool, ToolChoice, Usage
from vllm_lite.server.state import ServerState

# What the template may print behind an open mark of reasoning, and the mark itself.
_LAST_TOKENS = 32
# Values, not schemas: what looks like a reference there is none.
_DATA_KEYS = frozenset({"const", "default", "enum", "examples"})
# What says that an object may have, or must have, other properties than those it declares.
_OPENING = frozenset(
    {"additionalProperties", "minProperties", "patternProperties", "unevaluatedProperties"}
)
_NAMED_SCHEMAS = frozenset({"$defs", "definitions", "properties", "patternProperties"})


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """``make_output_parser``'s arguments for each choice of a request."""

    tools: str | None = None
    reasoning: str | None = None
    starts_in_reasoning: bool = False
    required: bool = False
    named: str | None = None
    parallel: bool = True

    @property
    def plain(self) -> bool:
        """All text is content."""
        return not (self.tools or self.reasoning or self.required or self.named)

    def parser(self) -> OutputParser:
        return make_output_parser(
            self.tools,
            self.reasoning,
            starts_in_reasoning=self.starts_in_reasoning,
            required=self.required,
            named=self.named,
            parallel=self.parallel,
        )


def check_tools(request: ChatRequest) -> list[Tool]:
    """The tools that the model is shown. Raises ``ApiError`` for tools or a choice that are wrong.

    Of ``allowed_tools`` these are the allowed ones.
    """
    tools: dict[str, Tool] = {}
    for index, tool in enumerate(request.tools or ()):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise bad_request(
                f"{where}.type: {show(tool.type)} is not supported; use 'function'",
                f"{where}.type",
                "unsupported_parameter",
            )
        name = tool.function.name
        if name in tools:
            raise bad_request(
                f"{where}.function.name: there is another {show(name)}", f"{where}.function.name"
            )
        tools[name] = tool
        _check_parameters(tool.function.parameters, f"{where}.function.parameters")
    choice = request.tool_choice
    if not isinstance(choice, ToolChoice):
        if choice == "required" and not tools:
            raise bad_request("tool_choice: 'required' needs tools", "tool_choice")
        return list(tools.values())
    part = choice.function if choice.type == "function" else choice.allowed_tools
    if part is None:
        param = f"tool_choice.{choice.type}"
        raise bad_request(f"{param}: missing", param)
    names = _names(choice)
    for name in names:
        if name not in tools:
            raise bad_request(f"tool_choice: tools has no function {show(name)}", "tool_choice")
    if choice.type == "function":
        return list(tools.values())
    if not names:
        raise bad_request("tool_choice.allowed_tools.tools: empty", "tool_choice")
    return [tools[name] for name in dict.fromkeys(names)]


def _names(choice: ToolChoice) -> list[str]:
    if choice.type == "function":
        return [choice.function.name] if choice.function else []
    return (
        [tool.function.name for tool in choice.allowed_tools.tools] if choice.allowed_tools else []
    )


def _check_parameters(parameters: dict[str, Any] | None, where: str) -> None:
    check_nesting([[[parameters]]], where)  # as it lies in the list of tools
    kind = (parameters or {}).get("type", "object")
    if kind != "object":
        raise bad_request(f"{where}.type: must be 'object', got {show(kind)}", where)


def plan_output(
    state: ServerState,
    request: ChatRequest,
    tools: Sequence[Tool],
    token_ids: Sequence[int],
    params: SamplingParams,
) -> tuple[OutputPlan, SamplingParams]:
    """How the output is to be read, and what the engine must be told so that it can be.

    ``tools``: from ``check_tools``. ``token_ids``: of the prompt.
    """
    parallel = request.parallel_tool_calls is not False
    choice = request.tool_choice
    mode = choice
    if isinstance(choice, ToolChoice):
        mode = choice.allowed_tools.mode if choice.allowed_tools else "required"
    if mode == "required":
        named = None
        if isinstance(choice, ToolChoice) and choice.function:
            named = choice.function.name
        schema = (
            _calls_schema(tools, parallel)
            if named is None
            else _parameters(next(tool for tool in tools if tool.function.name == named))
        )
        plan = OutputPlan(state.tool_format, required=True, named=named, parallel=parallel)
        return plan, _constrained(params, schema)
    tool_format = None
    if tools and mode != "none":
        tool_format = state.tool_format
        if tool_format is None:
            raise bad_request(
                f"{'tools' if choice is None else 'tool_choice'}: this server does not know how the"
                " model writes calls; start it with --tool-call-parser, or set tool_choice to"
                " 'none', 'required' or a function",
                "tools" if choice is None else "tool_choice",
                "unsupported_parameter",
            )
    # A grammar constrains the output from its first token on: it has no place for reasoning.
    reasoning = state.reasoning_format if params.structured_outputs is None else None
    plan = OutputPlan(
        tool_format,
        reasoning,
        reasoning is not None and _thinks(state, request, reasoning, token_ids),
        parallel=parallel,
    )
    if state.hidden_marks & {tool_format, reasoning}:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    return plan, params


def count_reasoning(state: ServerState, text: str, usage: Usage) -> int:
    """Tokens of reasoning: the engine does not know which they were, so its text is counted."""
    ids = state.engine.tokenizer.encode(text, add_special_tokens=False)
    return min(len(ids), usage.completion_tokens)


def _thinks(
    state: ServerState, request: ChatRequest, reasoning: str, token_ids: Sequence[int]
) -> bool:
    """Whether the output begins within reasoning."""
    form = REASONING_FORMATS[reasoning]
    if request.continue_final_message:
        last = request.messages[-1].content or ""
        begun = last if isinstance(last, str) else "\n".join(part.text or "" for part in last)
        return begun.rfind(form.open) > begun.rfind(form.close)
    # Marks elsewhere in the prompt are of other turns, or a user's words.
    tail = state.engine.tokenizer.decode(token_ids[-_LAST_TOKENS:], skip_special_tokens=False)
    tail = tail.rstrip()
    return tail.endswith(form.open) or (form.always and not tail.endswith(form.close))


def _constrained(params: SamplingParams, schema: dict[str, Any]) -> SamplingParams:
    if params.use_beam_search:
        raise bad_request(
            "tool_choice: a call cannot be demanded together with use_beam_search", "tool_choice"
        )
    if params.structured_outputs is not None:
        raise bad_request(
            "tool_choice: the output cannot be a call and at the same time what response_format,"
            " structured_outputs or guided_* ask for",
            "tool_choice",
        )
    try:
        structured = StructuredOutputsParams(json=schema)
    except ValueError as error:
        message = str(error).replace("structured_outputs.json", "tools: parameters", 1)
        raise bad_request(message, "tools") from error
    return msgspec.structs.replace(params, structured_outputs=structured)


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object in every case.

    Objects are closed, as vLLM's are by default: a function has no use for arguments that it does
    not declare, and models may write more and more of them. Some clients leave
    ``additionalProperties`` out of what they send to vLLM for that reason.
    """
    if tool.function.parameters is None:
        return {"type": "object", "additionalProperties": False}
    schema = {"type": "object", **tool.function.parameters}
    combined = False

    def close(part: dict[str, Any]) -> dict[str, Any]:
        nonlocal combined
        combined |= _is_combined(part)
        return _closed(part)

    closed: dict[str, Any] = _rewritten(schema, close)
    return schema if combined else closed


def _is_combined(schema: dict[str, Any]) -> bool:
    """Whether closing a part may take away what another part asks for."""
    if not schema.keys().isdisjoint(("allOf", "dependentSchemas", "if", "not")):
        return True
    return not schema.keys().isdisjoint(("properties", "required")) and not (
        schema.keys().isdisjoint(("$ref", "anyOf", "oneOf"))
    )


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    declared, required = schema.get("properties"), schema.get("required", [])
    if _OPENING & schema.keys() or not (isinstance(declared, dict) and isinstance(required, list)):
        return schema
    if not all(isinstance(name, str) and name in declared for name in required):
        return schema
    return schema | {"additionalProperties": False}


def _calls_schema(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """Of the list that ``make_output_parser`` reads with ``required``."""
    calls = []
    definitions = {}
    for index, tool in enumerate(tools):
        parameters = _parameters(tool)
        for name in ("$id", "$schema"):  # they belong at a root
            parameters.pop(name, None)
        definitions[str(index)] = _moved(parameters, f"#/$defs/{index}")
        properties = {
            "name": {"const": tool.function.name},
            "parameters": {"$ref": f"#/$defs/{index}"},
        }
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return schema | {"$defs": definitions}


def _moved(schema: dict[str, Any], root: str) -> Any:
    """A schema whose references to its own root lead to ``root``."""

    def move(part: dict[str, Any]) -> dict[str, Any]:
        to = part.get("$ref")
        if isinstance(to, str) and to.startswith("#"):
            return part | {"$ref": root + to[1:]}
        return part

    return _rewritten(schema, move)


def _rewritten(
    schema: Any, rewrite: Callable[[dict[str, Any]], dict[str, Any]], *, named: bool = False
) -> Any:
    """A copy with each schema in it rewritten, inner ones first.

    ``named``: the keys are names of schemas, not keywords.
    """
    if isinstance(schema, list):
        return [_rewritten(item, rewrite) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        key: value
        if key in _DATA_KEYS and not named
        else _rewritten(value, rewrite, named=key in _NAMED_SCHEMAS and not named)
        for key, value in schema.items()
    }
    return out if named else rewrite(out)
