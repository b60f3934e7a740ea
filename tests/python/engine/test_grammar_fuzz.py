"""Random JSON schemas and regexes: an output is valid, or the request was refused.

Without a model: the worker's masks, and tokens chosen among those that they allow. The slow test
has ten thousand of them, the other a few hundred.
"""

import json
import random
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
import torch

from vllm_lite.messages import TokenConstraint, encode
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles
from vllm_lite.sampling_params import StructuredOutputsParams
from vllm_lite.tokenizer import Tokenizer, load_tokenizer
from vllm_lite.worker.step_plan import RowConstraint
from vllm_lite.worker.token_masks import TokenMasks

MAX_TOKENS = 300
STRINGS = ["a", "name", "é", "日本", 'quo"te', "back\\slash", "new\nline", "🙂", "", "x y"]
FORMATS = ["uuid", "ipv4"]


def random_schema(source: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth < 3:
        kinds += ["object", "object", "array", "array", "anyOf", "tuple", "ref"]
    kind = source.choice(kinds)
    low = source.randrange(-20, 20)
    match kind:
        case "string":
            least = source.randrange(4)
            return source.choice(
                [{"type": "string", "maxLength": 8},
                 {"type": "string", "minLength": least, "maxLength": least + source.randrange(6)},
                 {"type": "string", "format": source.choice(FORMATS)}]
            )  # fmt: skip
        case "integer" | "number":
            schema: dict[str, Any] = {"type": kind}
            if source.random() < 0.8:
                schema[source.choice(["minimum", "exclusiveMinimum"])] = low
                schema[source.choice(["maximum", "exclusiveMaximum"])] = low + source.randrange(50)
            if kind == "integer" and source.random() < 0.2:
                schema["multipleOf"] = source.randrange(1, 9)
            return schema
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            values = [*source.sample(STRINGS, 2), source.randrange(100), None, True]
            return {"enum": source.sample(values, source.randrange(1, 5))}
        case "const":
            return {"const": source.choice([*STRINGS, 1, {"a": [1, "b"]}, []])}
        case "pattern":
            return {"type": "string", "pattern": f"^{random_regex(source, 1)}$"}
        case "object":
            names = source.sample(STRINGS, source.randrange(4))
            schema = {
                "type": "object",
                "properties": {name: random_schema(source, depth + 1) for name in names},
                "required": [name for name in names if source.random() < 0.7],
            }
            if source.random() < 0.8:
                schema["additionalProperties"] = source.choice([False, False, {"type": "null"}])
            return schema
        case "array":
            least = source.randrange(3)
            return {
                "type": "array",
                "items": random_schema(source, depth + 1),
                "minItems": least,
                "maxItems": least + source.randrange(3),
            }
        case "tuple":
            items = [random_schema(source, depth + 1) for _ in range(2)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
        case "ref":
            return {"$ref": f"#/$defs/{source.choice('pqr')}"}
    return {kind: [random_schema(source, depth + 1) for _ in range(source.randrange(1, 4))]}


def with_definitions(source: random.Random) -> dict[str, Any]:
    """Definitions may refer to each other, and to themselves, without an end."""
    definitions = {name: random_schema(source, 1) for name in "pqr"}
    return random_schema(source) | {"$defs": definitions}


def random_regex(source: random.Random, depth: int = 0) -> str:
    atoms = ["a", "b", "7", "é", "日", "🙂", r"\d", r"\.", " ", "[a-f]", "[^a-z\\n]", "[д-щ]", ".",
             r"\n", "[0-9A-F]", "/", '"', r"[\x00-\u2e7f]", "(?i:ab)", r"\\"]  # fmt: skip
    kind = source.randrange(10 if depth < 3 else 4)
    if kind < 4:
        return source.choice(atoms)
    inner = random_regex(source, depth + 1)
    if kind < 6:
        return inner + random_regex(source, depth + 1)
    if kind < 7:
        return f"(?:{inner}|{random_regex(source, depth + 1)})"
    # Python takes a second quantifier for something else.
    group = inner if inner in atoms else f"(?:{inner})"
    counts = ["?", "{2}", "{1,3}", "{0,2}", "*", "+"]
    if source.random() < 0.1:
        # Which most engines refuse.
        return source.choice(["(?=a)", "(", "[", r"\b", "(?<!x)"]) + group
    return group + source.choice(counts)


def number(text: str) -> Decimal | float:
    """A float would round a number over its bound; no Decimal has an exponent of twenty digits."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def check(asked: dict[str, Any], text: str) -> None:
    if "regex" in asked:
        assert regex.fullmatch(asked["regex"], text), (asked, text)
        return
    value = json.loads(text, parse_float=number)
    checker = jsonschema.FormatChecker(FORMATS)
    jsonschema.Draft202012Validator(asked["json"], format_checker=checker).validate(value)


@dataclass
class Step:
    """What TokenMasks asks of a step plan, and of its result."""

    new: list[RowConstraint]
    rows: list[int]
    tokens: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    num_drafts = 0

    @property
    def num_logits(self) -> int:
        return len(self.rows)

    def constraints(self) -> list[RowConstraint]:
        return self.new

    def new_row_numbers(self) -> list[int]:
        return [one.row for one in self.new]

    def freed_rows(self) -> list[int]:
        return self.freed

    def sampled_rows(self) -> list[int]:
        return self.rows

    def token_ids(self) -> list[int]:
        return self.tokens


class Writer:
    """Writes what masks allow, at random, for many rows at once."""

    def __init__(self, tokenizer: Tokenizer, end_ids: list[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        self.masks = TokenMasks(vocab_size, torch.device("cpu"), lambda: (tokenizer, end_ids))

    def write(self, grammars: list[str], random: np.random.Generator) -> list[str | None]:
        """The text of each grammar's output; None for one that is not complete."""
        new = [
            RowConstraint(row, encode(TokenConstraint(grammar, [], [], 0, [])), [])
            for row, grammar in enumerate(grammars)
        ]
        rows = list(range(len(grammars)))
        outputs: list[list[int]] = [[] for _ in rows]
        complete: dict[int, str] = {}
        freed: list[int] = []
        for _ in range(MAX_TOKENS):
            step = Step(new, rows, freed=freed)
            made = self.masks.begin(step)  # type: ignore[arg-type]
            assert made is not None
            masks = made.result()
            assert masks is not None and masks.index.tolist() == list(range(len(rows)))
            bits = np.unpackbits(masks.masks.numpy().view(np.uint8), axis=1, bitorder="little")
            assert not bits[:, self._tokenizer.vocab_size :].any()
            freed, going = [], []
            for row, allowed in zip(rows, bits, strict=True):
                ids = np.flatnonzero(allowed)
                assert len(ids), "no token is allowed"
                ends = [token for token in self._end_ids if allowed[token]]
                token = int(ends[0] if ends and random.random() < 0.4 else random.choice(ids))
                step.tokens.append(token)
                if token in self._end_ids:
                    complete[row] = self._tokenizer.decode(outputs[row])
                    freed.append(row)
                else:
                    outputs[row].append(token)
                    going.append(row)
            self.masks.launched(step)  # type: ignore[arg-type]
            new, rows = [], going
            if not rows:
                break
        self.masks.begin(Step([], [], freed=[*freed, *rows]))  # type: ignore[arg-type]
        return [complete.get(row) for row in range(len(grammars))]


def run(writer: Writer, seeds: range) -> tuple[int, int, int]:
    """(valid, refused, not complete)"""
    asked: list[dict[str, Any]] = []
    grammars: list[str] = []
    for seed in seeds:
        source = random.Random(seed)
        what = {"json": with_definitions(source)} if seed % 2 else {"regex": random_regex(source)}
        try:
            grammars.append(StructuredOutputsParams(**what).compiled)
        except ValueError as error:
            assert str(error).startswith("structured_outputs."), (seed, what)
            continue
        asked.append(what)
    num_valid = 0
    for at in range(0, len(grammars), 64):
        texts = writer.write(grammars[at : at + 64], np.random.default_rng(seeds.start + at))
        for what, text in zip(asked[at : at + 64], texts, strict=True):
            if text is not None:
                check(what, text)
                num_valid += 1
    return num_valid, len(seeds) - len(grammars), len(grammars) - num_valid


@pytest.fixture(scope="module")
def writer(tiny_model: str) -> Writer:
    files = ModelFiles(Path(tiny_model))
    config = load_model_config(files)
    return Writer(load_tokenizer(files), config.eos_token_ids, config.vocab_size)


def test_outputs_of_random_grammars_are_valid(writer: Writer) -> None:
    num_valid, num_refused, num_cut = run(writer, range(300))
    assert num_valid > 200 and num_refused > 0 and num_cut < 15, (num_valid, num_refused, num_cut)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_outputs_of_ten_thousand_random_grammars_are_valid(writer: Writer, part: int) -> None:
    begin = 1000 + 1000 * part
    num_valid, num_refused, num_cut = run(writer, range(begin, begin + 1000))
    assert num_valid > 800 and num_refused > 0 and num_cut < 50, (num_valid, num_refused, num_cut)
