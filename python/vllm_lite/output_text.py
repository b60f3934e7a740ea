"""Text that comes in pieces, and JSON and Python literals in it.

Everything here is a generator that yields where it needs more text and returns what it found, so
that a grammar is written as if the whole text were there. ``use`` is given text as it comes.
"""

import json
import re
import string
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
# Yields where more text is needed; gives T.
Steps = Generator[None, None, T]
Use = Callable[[str], None]

SPACE = re.compile(r"\s*+")
WORD = re.compile(r"[\w.-]*+", re.ASCII)

_STRING_PART = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_JSON_TOKEN = re.compile(
    r'(?P<plain>[\s\w:,.+-]++)|(?P<opening>[\[{]++)|(?P<closing>[\]}])|(?P<quote>")', re.ASCII
)
_SCALAR = re.compile(r"[\w.+-]*+", re.ASCII)

_MAX_NESTING = 100  # of Python literals
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_PYTHON_TEXT = {quote: re.compile(rf"[^\\{quote}]*+") for quote in "'\""}
# To JSON. Any other character behind a backslash means both of them, as in Python.
_ESCAPES = {"\n": "", "\\": "\\\\", "'": "'", '"': '\\"', "a": "\\u0007", "v": "\\u000b"} | {
    letter: f"\\{letter}" for letter in "bfnrt"
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class IncrementalText:
    """Text of which a part is used, a part is waiting, and the rest is still to come.

    While ``held`` is a list, what is used is also kept there.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # what is not used yet begins here
        self.closed = False
        self.held: list[str] | None = None

    def add(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def forward(self, end: int) -> str:
        piece = self.text[self.at : end]
        self.at = end
        if self.held is not None:
            self.held.append(piece)
        return piece

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self.at == len(self.text):
            if self.closed:
                return ""
            yield
        return self.text[self.at]

    def accept(self, literal: str) -> Steps[bool]:
        """Uses the literal if the text goes on with it."""
        while True:
            if self.text.startswith(literal, self.at):
                self.forward(self.at + len(literal))
                return True
            waiting = self.text[self.at : self.at + len(literal)]
            if self.closed or not literal.startswith(waiting):
                return False
            yield

    def ends_in(self, literal: str) -> bool:
        """Uses what is left if the text is closed and ends within the literal."""
        if not self.closed or not literal.startswith(self.text[self.at :]):
            return False
        self.forward(len(self.text))
        return True

    def copy(self, pattern: re.Pattern[str], use: Use) -> Steps[None]:
        """The longest run of a pattern ``[...]*`` in the pieces in which it comes."""
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None
            if match.end() > self.at:
                use(self.forward(match.end()))
            if self.at < len(self.text) or self.closed:
                return
            yield

    def copy_until(self, mark: str, use: Use) -> Steps[bool]:
        """Text up to the mark, which is used up; False when the text ends before it."""
        while True:
            found = self.text.find(mark, self.at) if mark else -1
            end = found if found >= 0 else len(self.text)
            if found < 0 and not self.closed:
                end -= _part_of(mark, self.text, self.at)
            if end > self.at:
                use(self.forward(end))
            if found >= 0:
                self.forward(found + len(mark))
                return True
            if self.closed:
                return False
            yield

    def take(self, pattern: re.Pattern[str]) -> Steps[str]:
        pieces: list[str] = []
        yield from self.copy(pattern, pieces.append)
        return "".join(pieces)

    def space(self) -> Steps[None]:
        if self.at == len(self.text) or self.text[self.at].isspace():
            yield from self.copy(SPACE, ignore)


def ignore(_: str) -> None:
    pass


def _part_of(mark: str, text: str, at: int) -> int:
    """Length of the longest end of ``text[at:]`` with which the mark could begin."""
    for size in range(min(len(mark) - 1, len(text) - at), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


# -- JSON ------------------------------------------------------------------------------------------


def json_object(text: IncrementalText, use: Use) -> Steps[bool]:
    """An object or a list as it stands. False: it is not JSON from here on, or it ends.

    Looks at brackets, strings and the characters outside of them, not at the grammar: enough to
    find the end, or something that stands where no JSON could be.
    """
    scanner = _JsonScanner()
    while True:
        end = scanner.scan(text.text, text.at)
        if text.closed and scanner.complete is None:
            end = len(text.text)
        if end > text.at:
            use(text.forward(end))
        if scanner.complete is not None:
            return scanner.complete
        if text.closed:
            return False
        yield


class _JsonScanner:
    """Finds the end of an object or list. ``complete``: True there, False where it breaks."""

    def __init__(self) -> None:
        self.complete: bool | None = None
        self._open: list[str] = []
        self._in_string = False

    def scan(self, text: str, at: int) -> int:
        """Goes on at ``at``; gives where it came to: the end, unless ``complete`` is set now or a
        backslash comes last.
        """
        while at < len(text):
            if self._in_string:
                match = _STRING_PART.match(text, at)
                assert match is not None
                at = match.end()
                if not text.startswith('"', at):
                    return at
                at += 1
                self._in_string = False
                continue
            match = _JSON_TOKEN.match(text, at)
            if match is None:
                self.complete = False
                return at
            kind = match.lastgroup
            if kind == "opening":
                self._open.extend(match[0])
            elif kind == "closing":
                if self._open.pop() != ("{" if match[0] == "}" else "["):
                    self.complete = False
                    return at
                if not self._open:
                    self.complete = True
                    return match.end()
            else:
                self._in_string = kind == "quote"
            at = match.end()
        return at


def json_string(text: IncrementalText) -> Steps[str | None]:
    """The value of a string; None if there is none, or a broken one."""
    if not (yield from text.accept('"')):
        return None
    pieces: list[str] = []
    while True:
        yield from text.copy(_STRING_PART, pieces.append)
        if (yield from text.accept('"')):
            break
        if text.closed:
            return None
        yield  # a backslash, whose character is still to come
    raw = "".join(pieces)
    if "\\" not in raw:
        return raw
    try:
        value: str = json.loads(f'"{raw}"', strict=False)
    except ValueError:
        return None
    return value


def skip_json(text: IncrementalText) -> Steps[bool]:
    """Any value; False if there is none, or a broken one."""
    char = yield from text.peek()
    if char == '"':
        return (yield from json_string(text)) is not None
    if char in ("{", "["):
        return (yield from json_object(text, ignore))
    return bool((yield from text.take(_SCALAR)))


# -- Python ----------------------------------------------------------------------------------------


def python_literal(text: IncrementalText, use: Use, levels: int = _MAX_NESTING) -> Steps[bool]:
    """Gives a literal as JSON: a string, number, True, False, None, a list, or a dict with strings
    as keys. False: it is not one from here on, or it ends.
    """
    char = yield from text.peek()
    if char in ("'", '"'):
        return (yield from _python_string(text, use))
    if char in ("[", "{"):
        return levels > 0 and (yield from _python_items(text, use, levels - 1))
    value = _python_scalar((yield from text.take(_SCALAR)))
    if value is None:
        return False
    use(value)
    return True


def _python_items(text: IncrementalText, use: Use, levels: int) -> Steps[bool]:
    opening = text.forward(text.at + 1)
    closing = "]" if opening == "[" else "}"
    use(opening)
    before = ""
    yield from text.space()
    while not (yield from text.accept(closing)):
        use(before)
        if opening == "{":
            if not (yield from _python_string(text, use)):
                return False
            yield from text.space()
            if not (yield from text.accept(":")):
                return False
            use(": ")
            yield from text.space()
        if not (yield from python_literal(text, use, levels)):
            return False
        yield from text.space()
        if (yield from text.accept(",")):
            before = ", "  # written with the next item, for there may be none
            yield from text.space()
        elif (yield from text.peek()) != closing:
            return False
    use(closing)
    return True


def _python_string(text: IncrementalText, use: Use) -> Steps[bool]:
    quote = yield from text.peek()
    if quote not in ("'", '"'):
        return False
    text.forward(text.at + 1)
    end = quote * 3 if (yield from text.accept(quote * 2)) else quote
    use('"')
    while True:
        yield from text.copy(_PYTHON_TEXT[quote], lambda piece: use(_json_text(piece)))
        if (yield from text.accept(end)):
            use('"')
            return True
        if (yield from text.accept(quote)):  # less than three
            use(_json_text(quote))
        elif not (yield from text.accept("\\")) or not (yield from _python_escape(text, use)):
            return False


def _python_escape(text: IncrementalText, use: Use) -> Steps[bool]:
    """What stands behind a backslash."""
    char = yield from text.peek()
    if not char:
        return False
    if "0" <= char <= "7":
        code = int((yield from _digits(text, string.octdigits, 3)), 8)
    elif char in _HEX_DIGITS:
        text.forward(text.at + 1)
        digits = yield from _digits(text, string.hexdigits, _HEX_DIGITS[char])
        if len(digits) < _HEX_DIGITS[char] or (code := int(digits, 16)) > 0x10FFFF:
            return False
    else:
        text.forward(text.at + 1)
        use(_ESCAPES[char] if char in _ESCAPES else _json_text("\\" + char))
        return True
    # Half of a surrogate pair stays an escape.
    use(json.dumps(chr(code), ensure_ascii=0xD800 <= code < 0xE000)[1:-1])
    return True


def _digits(text: IncrementalText, allowed: str, most: int) -> Steps[str]:
    digits = ""
    while len(digits) < most:
        char = yield from text.peek()
        if not char or char not in allowed:
            break
        digits += text.forward(text.at + 1)
    return digits


def _python_scalar(word: str) -> str | None:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _JSON_NUMBER.fullmatch(word):
        return word
    if not any(map(str.isdigit, word)):  # a name, or inf or nan, which JSON has not
        return None
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        return json.dumps(float(word), allow_nan=False)
    except ValueError:
        return None


def _json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
