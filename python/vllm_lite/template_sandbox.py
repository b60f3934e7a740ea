"""Jinja's immutable sandbox with bounds on time and size.

Jinja's own sandbox keeps a template from reaching the interpreter, not from running or growing
without end. Here every loop iteration, call and operator of a template goes through ``_tick``,
which stops a render after ``MAX_SECONDS`` of its thread's processor time, and the operators,
methods and filters that multiply text are measured before they run. Lists and objects that a
template makes are measured as they would be printed: a list may hold another many times over. What
takes more than linear time within one call, or has no use in a prompt, is not available. No call
works on more than ``MAX_CHARS``, so that the last one, too, ends within seconds.
"""

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SECONDS = 5.0
MAX_CHARS = 16 * 1024 * 1024  # of the output and of any value on the way
MAX_ITEMS = 1024 * 1024  # of a list or an object, with all that is in it
MAX_PADDING = 1024  # widths and indents, and sets of characters to strip
_MAX_EXPONENT = 64
_MAX_INT_BITS = 1024

_PADDING_METHODS = frozenset(
    {"center", "expandtabs", "ljust", "lstrip", "rjust", "rstrip", "strip", "trim", "zfill"}
)
_PADDING_FILTERS = frozenset({"batch", "center", "indent", "slice", "tojson"})

_deadline: ContextVar[float] = ContextVar("_deadline", default=float("inf"))


class TemplateLimitError(jinja2.TemplateError):
    """The template ran too long or made something too large."""


class _CodeGenerator(CodeGenerator):
    """Sends ``~`` through the environment, which cannot intercept it as it can other operators."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenate((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._measured(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._measured(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._measured(super().visit_Dict, node, frame)

    def _measured(
        self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame
    ) -> None:
        self.write("environment.measured(")
        visit(node, frame)
        self.write(")")


class _Namespace(Namespace):
    """Not printed with what is in it, which can grow unseen."""

    def __repr__(self) -> str:
        return "<namespace>"


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; the text stays as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=line)]


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """One template's environment: transformers' settings, filters and globals."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _to_json
        for name in ("pprint", "urlize", "wordwrap", "xmlattr"):
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = _guarded_filter(name, function)

    def render_limited(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Raises TemplateLimitError when the limits are reached."""
        token = _deadline.set(time.thread_time() + MAX_SECONDS)
        try:
            pieces, length = [], 0
            for piece in template.generate(dict(variables)):
                length += len(piece)
                _check_size(length)
                pieces.append(piece)
            return "".join(pieces)
        finally:
            _deadline.reset(token)

    # What generated code and jinja2 call.

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            meter = nodes.EnvironmentAttribute("metered")
            loop.iter = nodes.Call(meter, [loop.iter], [], None, None, lineno=loop.lineno)
        tree.set_environment(self)
        return tree

    def metered(self, items: Iterable[Any]) -> Iterable[Any]:
        if isinstance(items, jinja2.Undefined):
            return items  # its own iteration decides what happens
        return _Metered(items)

    def concatenate(self, operands: tuple[Any, ...]) -> str:
        _tick()
        texts = [str(operand) for operand in operands]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def concat(self, texts: Iterable[str]) -> str:
        """Of what macros and blocks print."""
        _tick()
        pieces = list(texts)
        _check_size(sum(map(len, pieces)))
        return "".join(pieces)

    def measured(self, value: Any) -> Any:
        _tick()
        _check_weight(value)
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _tick()
        _check_operands(operator, left, right)
        return self.measured(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _tick()
        # jinja2 wraps str.format, so the text is one step further away.
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(owner, str):
            _check_text_call(getattr(obj, "__name__", ""), owner, args, kwargs)
        elif isinstance(owner, (int, float)):
            raise TemplateLimitError("methods of numbers are not available")
        for value in (*args, *kwargs.values()):
            _check_weight(value)
        return self.measured(super().call(context, obj, *args, **kwargs))


class _Metered:
    """An iterable that ticks; it has the length of what it wraps, for ``loop.length``."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _tick()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # TypeError is the right answer


def _tick() -> None:
    if time.thread_time() > _deadline.get():
        raise TemplateLimitError(f"it ran longer than {MAX_SECONDS:g} seconds")


def _check_size(chars: int) -> None:
    if chars > MAX_CHARS:
        raise TemplateLimitError(f"it makes a text of more than {MAX_CHARS} characters")


def _check_weight(value: Any) -> None:
    """Bounds what a list or an object is when it is printed, with all that it holds."""
    if isinstance(value, str):
        _check_size(len(value))
        return
    items = chars = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            chars += len(item)
        elif isinstance(item, Collection):
            items += len(item)
            if items > MAX_ITEMS:
                raise TemplateLimitError(f"it makes a list of more than {MAX_ITEMS} items")
            if not isinstance(item, range):
                waiting.extend(item.values() if isinstance(item, Mapping) else item)
    _check_size(chars)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    sized = (str, list, tuple)
    if operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(value, sized) and isinstance(times, int):
                _check_sequence(value, len(value) * times)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "+" and isinstance(left, sized) and isinstance(right, sized):
        _check_sequence(left, len(left) + len(right))
    elif operator == "**" and isinstance(right, (int, float)):
        if not abs(right) <= _MAX_EXPONENT:
            raise TemplateLimitError(f"an exponent is over {_MAX_EXPONENT}")
        if isinstance(left, int):
            _check_bits(left.bit_length() * int(abs(right)))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)


def _check_sequence(value: Any, length: int) -> None:
    if isinstance(value, str):
        _check_size(length)
    elif length > MAX_ITEMS:
        raise TemplateLimitError(f"it makes a list of more than {MAX_ITEMS} items")


def _check_bits(bits: int) -> None:
    if bits > _MAX_INT_BITS:
        raise TemplateLimitError(f"it makes a number of more than {_MAX_INT_BITS} bits")


def _check_format(pattern: str) -> None:
    # Widths of four digits or more, or taken from the arguments.
    if re.search(r"\d{4}|%[^a-zA-Z%]*\*|\{[^{}]*\{", pattern):
        raise TemplateLimitError("it formats with a width that is not a number below 1000")


def _check_text_call(
    name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """``name`` is a method of str, or a filter with ``text`` as its input."""
    values = [*args, *kwargs.values()]
    if name in ("format", "format_map"):
        _check_format(text)
    elif name == "replace" and len(values) >= 2 and all(isinstance(v, str) for v in values[:2]):
        found = text.count(values[0])
        _check_size(len(text) + found * max(0, len(values[1]) - len(values[0])))
    elif name == "join" and values and isinstance(values[0], (list, tuple, str)):
        parts = values[0]
        _check_size(len(text) * len(parts) + sum(len(p) for p in parts if isinstance(p, str)))
    elif name in _PADDING_METHODS:
        _check_padding(values)
    elif name in ("encode", "translate"):
        raise TemplateLimitError(f"str.{name} is not available")


def _check_padding(values: Iterable[Any]) -> None:
    for value in values:
        size = len(value) if isinstance(value, str) else value
        if isinstance(size, int) and size > MAX_PADDING:
            raise TemplateLimitError(f"it pads or indents by more than {MAX_PADDING}")


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    takes_state = getattr(function, "jinja_pass_arg", None) is not None

    def guarded(*args: Any, **kwargs: Any) -> Any:
        _tick()
        value, *rest = args[1:] if takes_state else args
        if name == "join":
            value = list(value)
            separator = rest[0] if rest else kwargs.get("d", "")
            _check_text_call("join", str(separator), (value,), {})
            args = (*args[:1], value, *rest) if takes_state else (value, *rest)
        elif name == "sum":
            if isinstance([*rest, kwargs.get("start")][-1], (str, list, tuple)):
                raise TemplateLimitError("the filter sum adds numbers only")
        elif name in ("replace", "format", "trim"):
            _check_text_call(name, str(value), tuple(rest), kwargs)
        elif name in _PADDING_FILTERS:
            _check_padding([*rest, *kwargs.values()])
        result = function(*args, **kwargs)
        if isinstance(result, (str, list, tuple, Mapping)):
            _check_weight(result)
        return result

    for attribute in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, attribute):
            setattr(guarded, attribute, getattr(function, attribute))
    return guarded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes <, > and & for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    _check_format(pattern)
    return datetime.now().strftime(pattern)
