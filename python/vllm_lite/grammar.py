"""From what a request asks of its output to llguidance's grammars, checked before a request runs.

The grammar is compiled against a vocabulary of the 256 bytes and asked for its first mask: what it
refuses here, no request carries further. The worker compiles it against the model's own
(``worker/token_masks.py``). llguidance is imported when the first grammar comes.
"""

import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from functools import cache, wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_BYTES = 1 << 16
MAX_COMPILED_BYTES = 1 << 18  # as it travels, with more characters escaped
# llguidance recurses into these, on a thread's stack: 64 KiB of text could otherwise end it.
MAX_SCHEMA_DEPTH = 2048  # of the schema and of each of its definitions, added up
STACK_BYTES = 64 << 20  # a level has been seen to take 5 KiB; only what is used takes memory
MAX_RULES = 1024
MAX_CHOICES = 4096
# The automaton of a multiple has as many states as this number (of several: as their product).
MAX_MULTIPLE = 10_000
# Whether an intersection of regexes is empty takes time that doubles with each of them.
MAX_INTERSECTED = 10
MAX_PATTERN_PROPERTIES = 64  # of one object; each is intersected with each other
MAX_PASSES = 64  # until it is known which of a schema's definitions have outputs that end
# Between the parts of JSON. Without a bound a model may write white space for ever.
WHITE_SPACE = r"[ \n\r\t]{1,64}"

_NO_TEXT_FITS = "no text can fulfil it"
_DRAFTS_WITH_ID = ("draft-03", "draft-04")  # where it is called so, without $

P = ParamSpec("P")
_stack_size_lock = threading.Lock()


@contextmanager
def large_stacks() -> Iterator[None]:
    """Threads that are started inside have room for llguidance's recursion."""
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


def _on_large_stack(
    compile: Callable[Concatenate[str, P], str],
) -> Callable[Concatenate[str, P], str]:
    @wraps(compile)
    def wrapper(name: str, /, *args: P.args, **kwargs: P.kwargs) -> str:
        with ThreadPoolExecutor(1, thread_name_prefix="vllm-lite-grammar") as pool:
            with large_stacks():
                future = pool.submit(compile, name, *args, **kwargs)
            return future.result()

    return wrapper


@_on_large_stack
def json_grammar(name: str, schema: object) -> str:
    """The grammar of a JSON schema: an object, or the text of one. ``ValueError`` begins with
    ``name``, as that of all functions here does.
    """
    return _checked(name, _schema_grammar(name, schema))


@_on_large_stack
def regex_grammar(name: str, pattern: object) -> str:
    """The whole output matches; syntax and meaning are those of Rust's regex crate."""
    text = _text(name, pattern)
    _check_size(name, text)
    return _checked(name, _matcher().grammar_from_regex(text))


@_on_large_stack
def choice_grammar(name: str, choices: object) -> str:
    """The output is one of the texts."""
    if not isinstance(choices, (list, tuple)) or not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"{name} must be a list of 1 to {MAX_CHOICES} strings")
    for index, choice in enumerate(choices):
        if not _text(f"{name}[{index}]", choice):
            raise ValueError(f"{name}[{index}] must not be empty")
    pattern = "|".join(map(re.escape, choices))
    _check_size(name, pattern)
    return _checked(name, _matcher().grammar_from_regex(pattern))


@_on_large_stack
def rules_grammar(name: str, rules: object) -> str:
    """A grammar in llguidance's Lark dialect, or in GBNF (``root ::= ...``)."""
    from llguidance.gbnf_to_lark import any_to_lark

    text = _text(name, rules)
    _check_size(name, text)
    num_rules = text.count(":")  # at least one each; a few more may stand in its strings
    if num_rules > MAX_RULES:
        raise ValueError(f"{name} has {num_rules} colons: at most {MAX_RULES}, one for each rule")
    if text.count("&") > MAX_INTERSECTED:
        raise ValueError(f"{name} has more than {MAX_INTERSECTED} intersections (&)")
    for found in re.finditer(r"%json\s*", text):
        _check_schema(name, _embedded_schema(name, text, found.end()))
    try:
        lark = any_to_lark(text)
    except Exception as error:  # of its own class, or whatever its parser stumbled over
        raise ValueError(f"{name} is no grammar: {error}") from error
    return _checked(name, _matcher().grammar_from_lark(lark))


def limits() -> "LLParserLimits":
    """Those of llguidance, with short messages: the long ones show all of the parser's state."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def _matcher() -> "type[LLMatcher]":
    from llguidance import LLMatcher

    return LLMatcher


def _schema_grammar(name: str, schema: object) -> str:
    if isinstance(schema, str):
        _check_size(name, schema)
        try:
            schema = json.loads(schema, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise ValueError(f"{name} must be a JSON schema, an object, got {type(schema).__name__}")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from error
    _check_size(name, _text(name, text))
    _check_schema(name, schema)
    options: JsonCompileOptions = {"whitespace_pattern": WHITE_SPACE, "lenient": False}
    try:
        return _matcher().grammar_from_json_schema(text, overrides=options)
    except ValueError as error:  # nested too deeply for its parser
        raise ValueError(f"{name}: {error}") from error


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _embedded_schema(name: str, text: str, begin: int) -> object:
    try:
        return json.JSONDecoder().raw_decode(text, begin)[0]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} has no JSON schema after %json: {error}") from error


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be valid Unicode, without lone surrogates") from None
    return value


def _check_size(name: str, text: str) -> None:
    size = len(text.encode(errors="replace"))
    if size > MAX_GRAMMAR_BYTES:
        raise ValueError(f"{name} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are accepted")


def _check_schema(name: str, schema: object) -> None:
    """References are followed, each place once; a definition is as deep as it is by itself."""
    depth, factor = 0, 1
    regexes: set[str] = set()
    intersects = False
    multiples: set[int] = set()
    schemas: dict[int, Mapping[str, object]] = {}
    seen = {id(schema)}
    waiting = [schema]
    while waiting:
        level = [waiting.pop()]
        while level:
            depth += 1
            if depth > MAX_SCHEMA_DEPTH:
                raise ValueError(
                    f"{name} is too deep: its levels and those of its definitions are more than "
                    f"{MAX_SCHEMA_DEPTH} together"
                )
            below: list[object] = []
            for value in level:
                if isinstance(value, (list, tuple)):
                    below += value
                if not isinstance(value, Mapping):
                    continue
                below += value.values()
                schemas[id(value)] = value
                _check_names(name, value, schema)
                reference = value.get("$ref")
                if isinstance(reference, str):
                    target = _target(schema, reference)
                    if id(target) not in seen:
                        seen.add(id(target))
                        waiting.append(target)
                intersects = intersects or _intersects(value)
                regexes |= {
                    text
                    for text in (value.get("pattern"), value.get("format"))
                    if isinstance(text, str)
                }
                if isinstance(by_pattern := value.get("patternProperties"), Mapping):
                    regexes |= by_pattern.keys()
                    if len(by_pattern) > MAX_PATTERN_PROPERTIES:
                        raise ValueError(
                            f"{name} has {len(by_pattern)} patternProperties in one object: at "
                            f"most {MAX_PATTERN_PROPERTIES}"
                        )
                multiple = value.get("multipleOf")
                if isinstance(multiple, (int, float)) and multiple not in (True, False):
                    multiples.add(_digits(multiple))
            level = below
    if intersects and len(regexes) > MAX_INTERSECTED:
        raise ValueError(
            f"{name} has {len(regexes)} patterns and formats beside schemas that are combined "
            f"(allOf, or $ref, anyOf or oneOf with other keywords): at most {MAX_INTERSECTED}"
        )
    _check_ends(name, schema, list(schemas.values()))
    for multiple in multiples:
        factor *= multiple
    if factor > MAX_MULTIPLE:
        raise ValueError(
            f"{name} has too large a multipleOf: its digits, or the product of those of several, "
            f"must be at most {MAX_MULTIPLE}"
        )


def _check_names(name: str, value: Mapping[str, object], root: object) -> None:
    """What is checked here must be what llguidance follows: places are named by their pointers in
    the whole schema, and by nothing else.
    """
    reference = value.get("$ref")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        raise ValueError(
            f"{name} has the $ref {reference[:80]!r}: it must be '#' or '#/...', a place in the "
            "schema itself"
        )
    if value is root:
        return
    draft = root.get("$schema") if isinstance(root, Mapping) else None
    old = isinstance(draft, str) and any(old in draft for old in _DRAFTS_WITH_ID)
    for key in ("$id", "$schema", "id") if old else ("$id", "$schema"):
        if isinstance(value.get(key), str):
            raise ValueError(f"{name} has {key} below its root, which is not supported")


def _check_ends(name: str, root: object, schemas: list[Mapping[str, object]]) -> None:
    """Every schema must have an output that ends, or an output could begin that cannot go on. Found
    from those that need no other, in as many passes as it takes.
    """
    ends: set[int] = set()

    def has_end(value: object) -> bool:
        return not isinstance(value, Mapping) or id(value) in ends

    def all_end(schema: Mapping[str, object]) -> bool:
        """Whether all that it cannot do without ends."""
        reference = schema.get("$ref")
        if isinstance(reference, str) and not has_end(_target(root, reference)):
            return False
        if not all(map(has_end, _list(schema.get("allOf")))):
            return False
        for choice in (_list(schema.get("anyOf")), _list(schema.get("oneOf"))):
            if choice and not any(map(has_end, choice)):
                return False
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            required = (key for key in _list(schema.get("required")) if isinstance(key, str))
            if not all(has_end(properties.get(key)) for key in required):
                return False
        count = schema.get("minItems")
        items = _list(schema.get("prefixItems"))
        if not isinstance(count, int):
            return True
        return all(map(has_end, items[:count])) and (
            count <= len(items) or has_end(schema.get("items"))
        )

    left = schemas[::-1]  # what is referred to comes later
    for _ in range(MAX_PASSES):
        num_left = len(left)
        for schema in left:
            if all_end(schema):
                ends.add(id(schema))
        left = [schema for schema in left if id(schema) not in ends][::-1]
        if len(left) in (0, num_left):
            break
    if left:
        raise ValueError(f"{name} refers to itself so that an output could not end")


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else ()


def _intersects(schema: Mapping[str, object]) -> bool:
    """Whether several of its parts, each maybe with a pattern, hold for the same place."""
    combined = sum(name in schema for name in ("allOf", "anyOf", "oneOf", "$ref"))
    own = {"pattern", "format", "properties", "patternProperties", "additionalProperties", "items",
           "prefixItems"}  # fmt: skip
    all_of = schema.get("allOf")
    return (isinstance(all_of, list) and len(all_of) > 1) or (
        combined > 0 and combined + (not own.isdisjoint(schema)) > 1
    )


def _digits(number: float) -> int:
    """Without zeros at the ends and the point: 12.50 has 125."""
    text = "".join(map(str, Decimal(repr(number)).as_tuple().digits)).strip("0")
    return int(text[:9] or "1")


def _target(schema: object, reference: str) -> object:
    """What a reference points to; None if there is nothing, which llguidance says, too."""
    if reference == "#":
        return schema
    value = schema
    for part in urllib.parse.unquote(reference)[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isascii() and key.isdigit() and len(key) < 9:
            value = value[int(key)] if int(key) < len(value) else None
        else:
            return None
    return value


@cache
def _bytes_tokenizer() -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    class Bytes:
        eos_token_id = 256
        bos_token_id = None
        tokens: Sequence[bytes] = [*(bytes([byte]) for byte in range(256)), b"<end>"]
        special_token_ids: Sequence[int] = [256]

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return LLTokenizer(TokenizerWrapper(Bytes()), slices=[])


def _checked(name: str, grammar: str) -> str:
    if len(grammar.encode()) > MAX_COMPILED_BYTES:
        raise ValueError(f"{name} becomes a grammar of more than {MAX_COMPILED_BYTES} bytes")
    matcher = _matcher()(_bytes_tokenizer(), grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        error = " ".join(matcher.get_error().split())[:400]
        raise ValueError(f"{name}: {_NO_TEXT_FITS if 'NoExtension' in error else error}")
    return grammar
