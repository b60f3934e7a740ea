"""How a request's tokens are chosen and when it ends."""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property
from numbers import Real
from operator import index
from typing import Any

import msgspec

from vllm_lite.grammar import choice_grammar, json_grammar, regex_grammar, rules_grammar

MAX_SAMPLES = 128  # n
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 2.0
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
# Logits are multiplied and divided by it in float32; further out they would leave its range.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_LENGTH_PENALTY = 10.0
_INT32_MAX = 2**31 - 1


class RequestOutputKind(Enum):
    CUMULATIVE = 0  # every output holds everything so far
    DELTA = 1  # every output holds what is new
    FINAL_ONLY = 2  # one output, at the end


# What has no meaning where nothing is sampled, or is not there yet for beams.
_NOT_WITH_BEAM_SEARCH = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "stop",
    "min_tokens",
    "structured_outputs",
    "bad_words",
    "prompt_logprobs",
)


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True, dict=True
):
    """What the whole output must be: exactly one of the fields. Checked when it is made;
    ``ValueError`` names the field.

    json: a JSON schema, as an object or as text. regex: in the syntax of Rust's regex crate.
    choice: one of these texts. grammar: llguidance's Lark dialect or GBNF. json_object: any JSON
    object.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        self.compiled  # noqa: B018  # raises for what is wrong

    @cached_property
    def compiled(self) -> str:
        """llguidance's grammar. Microseconds to milliseconds, for the largest half a second."""
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise _error(
                "structured_outputs.json_object", "must be true or false", self.json_object
            )
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        given = [name for name, value in fields.items() if value is not None and value is not False]
        if len(given) != 1:
            names = ", ".join(self.__struct_fields__)
            got = " and ".join(given) or "none"
            raise ValueError(f"structured_outputs must have exactly one of {names}, got {got}")
        name = f"structured_outputs.{given[0]}"
        match given[0]:
            case "json":
                return json_grammar(name, self.json)
            case "regex":
                return regex_grammar(name, self.regex)
            case "choice":
                return choice_grammar(name, self.choice)
            case "grammar":
                return rules_grammar(name, self.grammar)
        return json_grammar(name, {"type": "object"})


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's names and defaults, validated when it is made.

    ``best_of`` samples are drawn and the ``n`` with the highest cumulative log-probability given,
    best first. ``use_beam_search``: the ``n`` best of a beam search of width ``n``, as
    transformers' ``generate(num_beams=n)`` finds them; ``early_stopping`` is False, True or
    "never". Both give one output, at the end.

    ``ValueError`` names the field, the limit and the value. Numbers are normalised to plain int and
    float, ``top_k=-1`` to 0, a single ``stop`` string to a list. A bool is no number, nor is a
    string (but JSON's keys are strings, so ``logit_bias`` takes "123" for 123).

    max_tokens: 0 generates nothing; the prompt is computed for its ``prompt_logprobs``.
    prompt_logprobs_start: the first of the prompt's tokens whose log-probability is asked for; what
    comes before may come from the prefix cache.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    bad_words: list[str] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self.n = _integer("n", self.n, 1, MAX_SAMPLES)
        self.temperature = _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0, above_minimum=True)
        self.top_k = max(0, _integer("top_k", self.top_k, -1, _INT32_MAX, hint="-1 or 0: all"))
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, MIN_SEED, MAX_SEED)
        self.repetition_penalty = _number(
            "repetition_penalty",
            self.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            setattr(self, name, _number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY))
        if self.logit_bias is not None:
            self.logit_bias = _bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must not be empty; leave it out to allow all")
        if self.stop is not None:
            self.stop = _stop_strings(self.stop)
        if self.stop_token_ids is not None:
            self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids)
            if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
                requirement = f"must have at most {MAX_STOP_TOKEN_IDS} token ids"
                raise _error("stop_token_ids", requirement, len(self.stop_token_ids))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _error(name, "must be true or false", getattr(self, name))
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 0, _INT32_MAX)
            if self.min_tokens > self.max_tokens:
                raise _error(
                    "min_tokens", f"must be <= max_tokens ({self.max_tokens})", self.min_tokens
                )
        if self.logprobs is not None:
            self.logprobs = _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            requirement = "must be StructuredOutputsParams"
            raise _error("structured_outputs", requirement, self.structured_outputs)
        if self.bad_words is not None:
            self.bad_words = _bad_words(self.bad_words)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = _integer(
                "prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS
            )
        self.prompt_logprobs_start = _integer(
            "prompt_logprobs_start", self.prompt_logprobs_start, 0, _INT32_MAX
        )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _error("output_kind", "must be a RequestOutputKind", self.output_kind)
        if self.best_of is not None:
            self.best_of = _integer("best_of", self.best_of, self.n, MAX_SAMPLES, hint="n or more")
        self._check_beam_search()
        if self.gives_one_output and self.output_kind is RequestOutputKind.DELTA:
            name = "use_beam_search" if self.use_beam_search else "best_of"
            raise _error(
                name, "cannot be streamed: what is best is known at the end", getattr(self, name)
            )

    def _check_beam_search(self) -> None:
        self.length_penalty = _number(
            "length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise _error("early_stopping", "must be true, false or 'never'", self.early_stopping)
        if not isinstance(self.use_beam_search, bool):
            raise _error("use_beam_search", "must be true or false", self.use_beam_search)
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != _DEFAULTS[name]:
                    raise _error(name, "needs use_beam_search", getattr(self, name))
            return
        if self.max_tokens == 0:
            raise _error("max_tokens", "must be at least 1 with use_beam_search", 0)
        # Both leave the model's log-probabilities as they are.
        if self.temperature not in (0.0, 1.0):
            raise _error("temperature", "must be 0 or 1 with use_beam_search", self.temperature)
        for name in _NOT_WITH_BEAM_SEARCH:
            value = getattr(self, name)
            if value != _DEFAULTS[name] and value not in ([], {}):
                requirement = "cannot be combined with use_beam_search"
                raise _error(name, requirement, getattr(self, name))
        if self.logprobs:
            requirement = "must be 0 with use_beam_search: those of the chosen tokens alone"
            raise _error("logprobs", requirement, self.logprobs)
        if self.best_of not in (None, self.n):
            raise _error("best_of", f"must equal n ({self.n}) with use_beam_search", self.best_of)

    @property
    def num_samples(self) -> int:
        """How many sequences the engine core makes of it."""
        return self.best_of or self.n

    @property
    def gives_one_output(self) -> bool:
        return self.use_beam_search or self.num_samples > self.n

    def check_token_ids(self, vocab_size: int) -> None:
        """The part of ``validate_for`` that needs no tokenizer."""
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids),
            ("stop_token_ids", self.stop_token_ids),
        ):
            if ids and len(ids) > vocab_size:
                requirement = f"must have at most {vocab_size} token ids (vocabulary size)"
                raise _error(name, requirement, len(ids))
            if ids and (largest := max(ids)) >= vocab_size:
                raise _error(
                    name, f"must hold token ids below {vocab_size} (vocabulary size)", largest
                )

    def validate_for(self, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        """Raises ValueError if a token id is not below ``vocab_size``, the width of the logits, if
        there are more of them, or if no token could be chosen before ``min_tokens``.
        """
        self.check_token_ids(vocab_size)
        if self.structured_outputs is not None and not eos_token_ids:
            raise ValueError(
                "structured_outputs needs a model with an end-of-sequence token, which ends an "
                "output that is complete; this one has none"
            )
        ends = {*(self.stop_token_ids or ()), *(() if self.ignore_eos else eos_token_ids)}
        if self.use_beam_search and min(self.n + len(ends), vocab_size) > MAX_LOGPROBS:
            raise _error(
                "n (beam_width)",
                f"must be at most {MAX_LOGPROBS - len(ends)} with use_beam_search: a step looks at "
                f"{MAX_LOGPROBS} tokens after each beam, and {len(ends)} token ids end a sequence",
                self.n,
            )
        if self.min_tokens == 0:
            return
        if len(ends) >= vocab_size or (
            self.allowed_token_ids and ends.issuperset(self.allowed_token_ids)
        ):
            raise _error(
                "min_tokens",
                "must be 0 where every token that is allowed ends the request",
                self.min_tokens,
            )


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


class BeamSearchParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What ``LLM.beam_search`` takes: vLLM's names, and transformers' ``early_stopping``.

    beam_width: beams, and sequences of the result; max_tokens: output tokens; length_penalty:
    sequences are ranked by their log-probability / length ** length_penalty, the length counting
    output tokens, EOS too. ``temperature`` must be 0. ``ValueError`` as ``SamplingParams``.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False
    stop_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        self.beam_width = _integer("beam_width", self.beam_width, 1, MAX_SAMPLES)
        if _number("temperature", self.temperature, 0.0) != 0.0:
            raise _error("temperature", "must be 0 in a beam search", self.temperature)
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop_token_ids=self.stop_token_ids,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _error(name: str, requirement: str, value: object) -> ValueError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return ValueError(f"{name} {requirement}, got {shown}")


def _number(
    name: str,
    value: Any,
    minimum: float,
    maximum: float = math.inf,
    *,
    above_minimum: bool = False,
) -> float:
    """The value as a finite float. Written as "not (good)": every comparison of NaN is false."""
    bound = f"{'>' if above_minimum else '>='} {minimum:g}"
    if maximum != math.inf:
        bound += f" and <= {maximum:g}"
    error = _error(name, f"must be a finite number {bound}", value)
    if not isinstance(value, Real) or isinstance(value, bool):
        raise error
    try:
        number = float(value)
    except OverflowError:
        raise error from None
    inside = minimum < number <= maximum if above_minimum else minimum <= number <= maximum
    if not (inside and math.isfinite(number)):
        raise error
    return number


def _integer(name: str, value: Any, minimum: int, maximum: int, *, hint: str = "") -> int:
    error = _error(
        name, f"must be an integer from {minimum} to {maximum}{hint and f' ({hint})'}", value
    )
    if isinstance(value, bool):
        raise error
    try:
        number = index(value)  # takes numpy integers, refuses floats and strings
    except TypeError:
        raise error from None
    if not minimum <= number <= maximum:
        raise error
    return number


def _token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise _error(name, "must be a list of token ids", value)
    return [_integer(f"{name}[{i}]", token, 0, _INT32_MAX) for i, token in enumerate(value)]


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _error("logit_bias", "must map token ids to numbers", value)
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise _error(
            "logit_bias", f"must have at most {MAX_LOGIT_BIAS_ENTRIES} entries", len(value)
        )
    result: dict[int, float] = {}
    for key, bias in value.items():
        token = key
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
            token = int(key)
        token = _integer("logit_bias key", token, 0, _INT32_MAX)
        if token in result:
            raise _error("logit_bias", "must name each token id once", token)
        result[token] = _number(f"logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return result


def _stop_strings(value: Any) -> list[str]:
    if not isinstance(value, (str, list, tuple)):
        raise _error("stop", "must be a string or a list of strings", value)
    strings = [value] if isinstance(value, str) else value
    return _strings("stop", strings, MAX_STOP_STRINGS, MAX_STOP_CHARS)


def _bad_words(value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)):
        raise _error("bad_words", "must be a list of strings", value)
    words = _strings("bad_words", value, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    for i, word in enumerate(words):
        if not word.strip():
            raise _error(f"bad_words[{i}]", "must not be white space alone", word)
    return words


def _strings(name: str, values: Sequence[Any], most: int, most_chars: int) -> list[str]:
    if len(values) > most:
        raise _error(name, f"must have at most {most} strings", len(values))
    for i, text in enumerate(values):
        if not isinstance(text, str) or not 1 <= len(text) <= most_chars:
            raise _error(f"{name}[{i}]", f"must be a string of 1 to {most_chars} characters", text)
        check_unicode(f"{name}[{i}]", text)
    return list(values)


def check_unicode(name: str, text: str) -> str:
    """The text; ``ValueError`` if half a surrogate pair is in it, which no UTF-8 can say."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _error(name, "must be valid Unicode, without lone surrogates", text) from None
    return text
