"""Chat templates render as transformers renders them, and no template can hold a server up."""

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from vllm_lite import template_sandbox
from vllm_lite.chat_template import (
    ChatTemplateError,
    load_chat_template,
    render,
    select_template,
)
from vllm_lite.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{%- if messages[0]['role'] == 'system' %}\n    {%- set loop_messages = messages[1:] %}\n"
    "    {{- '<|im_start|>system\\n' + messages[0]['content'] | trim + '<|im_end|>\\n' }}\n"
    "{%- else %}\n    {%- set loop_messages = messages %}\n{%- endif %}\n"
    "{% for message in loop_messages %}\n"
    "    {% if loop.first and documents %}docs{% endif %}\n"
    "    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS = (
    "{{ bos_token }}{% if tools is not none and tools %}{% for tool in tools %}\n"
    "{{ tool | tojson(indent=2) }}{% if not loop.last %}, {% endif %}\n"
    "{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
    "{% generation %}{{ m.content | default('none') }}{% endgeneration %}"
    "{% for call in m.tool_calls or [] %}"
    "{% for k, v in call.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}"
    "{% endfor %}{{ loop.index }}/{{ loop.length }}{{ loop.revindex }}"
    "{% if not loop.first %}{{ loop.previtem.role }}{% endif %}{{ loop.last }}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(count=0) %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (ns.count % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% set ns.count = ns.count + 1 %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
MACRO = (
    "{%- macro show(m, n=1) -%}{{ '*' * n }}{{ m.role | upper }}: {{ m['content'].split('\\n') | "
    "join(' | ') }}{%- endmacro -%}"
    "{% for m in messages | selectattr('role', 'ne', 'system') %}{{ show(m, 2) }}\n{% endfor %}"
    "{{ '%s-%d' % ('x', 3) }}{{ 'a{}'.format(1) }}{{ [1, 2] + [3] }}{{ dict(a=1) | tojson }}"
    "{{ messages[0].content | replace('a', 'bb') | indent(4) }}{{ messages | length }}"
    "{% for row in messages | batch(2) %}{{ row | length }}{% endfor %}{{ 2 ** 10 }}{{ 7 % 4 }}"
    "{{ messages | map(attribute='role') | join(',') }}{% if x is defined %}{{ x }}{% endif %}"
)
TEMPLATES = [CHATML, TOOLS, MISTRAL, MACRO]
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "  <b>Größe</b> & 'quotes' \"日\"\n second line "},
    {"role": "assistant", "content": "fine", "name": None},
    {"role": "user", "content": "a\n\n b"},
]
TOOL_SCHEMA = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'"}}]


def transformers_render(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    dropped = [{k: v for k, v in m.items() if v is not None} for m in messages]
    rendered, _ = render_jinja_template([dropped], chat_template=template, **{**SPECIAL, **kwargs})
    assert isinstance(rendered[0], str)
    return rendered[0]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("generate", [True, False])
def test_renders_as_transformers(template: str, generate: bool) -> None:
    for tools in (None, TOOL_SCHEMA):
        ours = render(
            template, CHAT, tools, generate, special_tokens=SPECIAL, template_kwargs={"x": "1"}
        )
        assert ours == transformers_render(
            template, CHAT, tools=tools, add_generation_prompt=generate, x="1"
        )


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(TEMPLATES[:2] + TEMPLATES[3:]),
    st.lists(st.tuples(st.sampled_from(["user", "system", "x"]), st.text(max_size=20)), min_size=1),
)
def test_renders_any_text_as_transformers(template: str, turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    ours = render(template, messages, special_tokens=SPECIAL)
    assert ours == transformers_render(template, messages, add_generation_prompt=True)


def test_smollm2_renders_as_transformers(smollm2: Tokenizer) -> None:
    assert isinstance(smollm2.chat_template, str)
    assert smollm2.render_chat(CHAT) == transformers_render(
        smollm2.chat_template, CHAT, add_generation_prompt=True
    )


@pytest.mark.parametrize("template", [CHATML, MISTRAL])
@pytest.mark.parametrize("content", ["Once upon a", "ends with space ", "", " x\n"])
def test_last_message_is_continued_as_in_transformers(template: str, content: str) -> None:
    messages = [*CHAT[:1], {"role": "assistant", "content": content}]
    ours = render(
        template,
        messages,
        add_generation_prompt=False,
        continue_final_message=True,
        special_tokens=SPECIAL,
    )
    assert ours == transformers_render(template, messages, continue_final_message=True)
    assert ours.endswith(content)


def test_continuing_has_its_conditions() -> None:
    with pytest.raises(ChatTemplateError, match="add_generation_prompt=false"):
        render(CHATML, CHAT, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="no content to continue"):
        render(CHATML, [{"role": "user"}], None, False, True)
    with pytest.raises(ChatTemplateError, match="does not print the last message"):
        render("x", CHAT, None, False, True)


def test_template_says_no() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render(MISTRAL, [CHAT[0], CHAT[0]], special_tokens=SPECIAL)


def test_tool_call_arguments_are_parsed() -> None:
    def calls(arguments: object) -> list[dict[str, Any]]:
        function = {"name": "f", "arguments": arguments}
        tool_calls = [{"type": "function", "function": function}]
        return [{"role": "assistant", "content": None, "tool_calls": tool_calls}]

    as_object = render(TOOLS, calls({"q": "<é>", "n": 1}), special_tokens=SPECIAL)
    assert 'q="<é>";n=1;' in as_object
    assert render(TOOLS, calls('{"q": "<é>", "n": 1}'), special_tokens=SPECIAL) == as_object
    with pytest.raises(ChatTemplateError, match=r"tool_calls\[0\].function.arguments"):
        render(TOOLS, calls("{"), special_tokens=SPECIAL)


def test_reasoning_is_found_under_each_name() -> None:
    template = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert render(template, [{"role": "assistant", name: "r"}]) == "r|r"


PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must not be empty"),
        ("hi", "must be a list"),
        ([3], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role must be a string"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be a string or a list"),
        ([{"role": "user", "content": [PART, {"type": "image_url"}]}], r"content\[1\].*image_url"),
        ([{"role": "user", "content": ["a"]}], r"content\[0\] has type 'a'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text"),
        ([{"role": "user", "tool_calls": ["x"]}], r"tool_calls\[0\]"),
        ([{"role": "user", "content": object()}], r"messages\[0\]\.content.*object"),
        ([{"role": "user", 3: "x"}], r"messages\[0\] must have strings as keys"),
    ],
)
def test_malformed_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render("{{ messages[0].content }}", messages)


def test_parts_are_joined_with_a_newline() -> None:
    parts = [PART, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    assert parts[0] == PART  # the caller's messages stay as they are


@pytest.mark.parametrize(
    "name", ["messages", "tools", "bos_token", "raise_exception", "range", "chat_template"]
)
def test_reserved_names_cannot_be_overridden(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"not be named {name}"):
        render(CHATML, [CHAT[0]], special_tokens=SPECIAL, template_kwargs={name: "x"})


def test_reserved_names_through_the_tokenizer(smollm2: Tokenizer) -> None:
    for name in ("messages", "tools", "add_generation_prompt", "special_tokens", "template"):
        with pytest.raises(ChatTemplateError, match=name):
            smollm2.encode_chat(CHAT, template_kwargs={name: []})
    assert smollm2.encode_chat(CHAT, template_kwargs={"enable_thinking": False})


def doubled(step: str) -> str:
    """Does ``step`` to n.s 99 times."""
    start = "{% set n = namespace(s='xx') %}"
    return start + "{% for i in range(99) %}" + step + "{% endfor %}{{ n.s }}"


BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) if a %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "range": "{{ range(10**9) | list }}",
    "text": "{{ 'x' * 10**9 }}",
    "text on the right": "{{ 10**9 * 'x' }}",
    "list": "{{ [0] * 10**9 }}",
    "number": "{{ 9 ** 999 ** 9 }}",
    "doubling": "{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}",
    "doubling by ~": "{% set n = namespace(s='xx') %}{% for i in range(99) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "squaring": "{% set n = namespace(s=99) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}"
    "{% endfor %}",
    "center": "{{ 'x' | center(10**9) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "indent": "{{ 'x\\nx' | indent(10**9) }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "nested format": "{{ '{:>{}}'.format(1, 10**9) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "join": "{{ range(99999) | join('x' * 10**6) }}",
    "join method": "{{ ('x' * 10**6).join(['a'] * 10**6) }}",
    "replace": "{{ ('x' * 10**6) | replace('x', 'y' * 10**6) }}",
    "replace method": "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "sum": "{{ ([[1] * 10**6] * 99) | sum(start=[]) }}",
    "tojson": "{{ {'a': 1} | tojson(indent=10**9) }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 10**6 }}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "doubling by a block": doubled("{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}"),
    "doubling by a macro": "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}"
    + doubled("{% set n.s = f(n.s) %}"),
    "doubling by a filter block": doubled(
        "{% set n.s %}{% filter upper %}{{ n.s }}{{ n.s }}{% endfilter %}{% endset %}"
    ),
    "lists of lists": doubled("{% set n.s = [n.s, n.s] %}"),
    "tuples of tuples": doubled("{% set n.s = (n.s, n.s) %}"),
    "objects of objects": doubled("{% set n.s = {'a': n.s, 'b': n.s} %}"),
    "objects by a call": doubled("{% set n.s = dict(a=n.s, b=n.s) %}"),
    "lists by a filter": doubled("{% set n.s = [0, 0] | map('default', n.s, true) | list %}"),
    "lists by multiplication": doubled("{% set n.s = [n.s] * 9 %}"),
    "keys": "{{ dict.fromkeys(range(99999), 'x' * 10**6) }}",
    "arguments": "{% macro f() %}{% set n.s = varargs %}{% endmacro %}"
    "{% set n = namespace(s='xx') %}{% for i in range(99) %}{{ f(n.s, n.s) }}{% endfor %}",
    "bytes": "{{ 'x'.encode() * 10**10 }}",
    "bytes of a number": "{{ (1).to_bytes(10**10, 'big') }}",
    "strip": "{{ ('a' * 10**7).strip('b' * 10**7) }}",
    "trim": "{{ ('a' * 10**7) | trim('b' * 10**7) }}",
    "escape": "{{ ('<' * 10**7) | escape }}",
    "urlencode": "{{ ('<' * 10**7) | urlencode }}",
}


# What stops them; a slip in a template above would be refused with other words.
LIMITS = (
    r"ran longer|more than|Range too big|exponent is over|width that|numbers only|recursion"
    r"|not available"
)


@pytest.mark.case("SEC-06")
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_stopped(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    start = time.thread_time()
    with pytest.raises(ChatTemplateError, match=LIMITS):
        render(BOMBS[bomb], CHAT)
    assert time.thread_time() - start < 3


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ lipsum(10) }}",
    ],
)
@pytest.mark.case("SEC-06")
def test_sandbox_keeps_the_interpreter_out_of_reach(template: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"is unsafe|'lipsum' is undefined"):
        render(template, CHAT)


def test_templates_with_errors_are_named(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match=r"not valid Jinja \(line 2\)"):
        render("\n{% for %}", CHAT)
    with pytest.raises(ChatTemplateError, match="is undefined"):
        render("{{ nothing.at.all }}", CHAT)
    with pytest.raises(FileNotFoundError, match=r"no\.jinja does not exist"):
        load_chat_template(tmp_path / "no.jinja")
    (tmp_path / "bad.jinja").write_text("{% if %}")
    with pytest.raises(ChatTemplateError, match="not valid Jinja"):
        load_chat_template(tmp_path / "bad.jinja")
    (tmp_path / "good.jinja").write_text("é{{ bos_token }}", encoding="utf-8")
    assert load_chat_template(tmp_path / "good.jinja") == "é{{ bos_token }}"


def test_selecting_a_template() -> None:
    named = {"default": "d", "tool_use": "t", "rag": "r"}
    assert select_template("own", None, True) == "own"
    assert select_template("own", "given", False) == "given"
    assert select_template(named, None, False) == "d"
    assert select_template(named, None, True) == "t"
    assert select_template(named, "rag", True) == "r"
    assert select_template({"rag": "r", "default": "d"}, None, True) == "d"
    with pytest.raises(ChatTemplateError, match="name one of rag"):
        select_template({"rag": "r"}, None, False)
    with pytest.raises(ChatTemplateError, match="--chat-template"):
        select_template(None, None, False)
