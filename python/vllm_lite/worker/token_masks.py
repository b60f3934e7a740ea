"""Which tokens a row may sample: grammars and bad words, as one bit for each token.

The masks of a step are made by one thread beside the forward pass: it waits for what the step
before sampled, if that is not known yet, moves each row's grammar on by that token, and has
llguidance fill in the masks, without the interpreter's lock. Nothing is made, and llguidance is not
imported, before a row comes with a constraint.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_lite.grammar import large_stacks, limits
from vllm_lite.messages import TokenConstraint, decode_constraint
from vllm_lite.token_table import KIND_SPECIAL
from vllm_lite.tokenizer import Tokenizer
from vllm_lite.worker.sampler import PendingResult
from vllm_lite.worker.step_plan import RowConstraint, StepPlan

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

_MAX_COMPILED = 32  # grammars that are kept for requests to come


@dataclass(slots=True)
class StepMasks:
    """What ``ops.sample`` takes, in the host's memory, which is pinned where there is a GPU."""

    masks: torch.Tensor  # int32 [num_masks, ceil(vocab_size / 32)]
    index: torch.Tensor  # int32 [num_logits], -1: no mask


@dataclass(slots=True)
class _Sampled:
    """A step whose tokens have not been taken in."""

    result: PendingResult
    rows: list[tuple[int, int]]  # number of the logit, row


class _Row:
    """A row's constraint and how far it has come."""

    def __init__(
        self, constraint: TokenConstraint, matcher: "LLMatcher | None", output: list[int]
    ) -> None:
        """matcher: at the grammar's beginning, None if there is none. output: tokens so far, of a
        row that goes on after it was preempted.
        """
        self.matcher = matcher
        self._constraint = constraint
        self._output = output
        self._single = np.array([word[0] for word in constraint.bad_words if len(word) == 1], "u4")
        # Of longer words, by the token before the last: what may not come after what.
        self._endings: dict[int, list[tuple[list[int], int]]] = {}
        for word in constraint.bad_words:
            if len(word) > 1:
                self._endings.setdefault(word[-2], []).append((word[:-1], word[-1]))
        self._late_ids = np.array(constraint.late_ids, "u4")
        self._ignored_ids = np.array(constraint.ignored_ids, "u4")
        if matcher is not None:
            matcher.consume_tokens(output)

    def take(self, token: int) -> None:
        self._output.append(token)
        # What a stopped row has computed ahead is nobody's.
        if self.matcher is not None and not self.matcher.is_stopped():
            self.matcher.consume_token(token)

    def finish(self, mask: np.ndarray, matcher: "LLMatcher | None", drafts: list[int]) -> None:
        """mask: uint32, all that the grammar allows after ``drafts``; matcher: which is there."""
        if matcher is not None and matcher.is_error():
            if not drafts:
                logger.warning("a grammar failed: %s", matcher.get_error()[:400])
            mask[:] = 0
            return
        ends = [self._ignored_ids]
        output = self._output + drafts if drafts else self._output
        if len(output) < self._constraint.min_tokens:
            ends.append(self._late_ids)
        end_ids = np.concatenate(ends)
        if len(end_ids):
            without = mask.copy()
            _clear(without, end_ids)
            # A grammar that allows nothing else is complete, and the request ends.
            if matcher is None or without.any():
                mask[:] = without
        _clear(mask, self._single)
        if output:
            for beginning, last in self._endings.get(output[-1], ()):
                if output[-len(beginning) :] == beginning:
                    _clear(mask, np.array([last], "u4"))


@dataclass(slots=True)
class _Ahead:
    """A row on its way through the drafts of a step."""

    row: _Row
    matcher: "LLMatcher | None"
    mask: int  # number of the mask that is being made
    drafts: list[int]

    def advance(self, mask: np.ndarray, num_drafts: int) -> bool:
        """Past the next draft, after ``num_drafts`` others and where ``mask`` holds. False if there
        is none, or if whatever is sampled after it does not count.
        """
        if num_drafts == len(self.drafts):
            return False
        draft = self.drafts[num_drafts]
        if not mask[draft >> 5] >> (draft & 31) & 1:
            return False
        if self.matcher is not None:
            # A copy costs less than a mask. To take drafts back would not do: grammars with
            # max_tokens or a stop have no way back, nor is there one from one that has failed.
            if num_drafts == 0:
                self.matcher = self.matcher.deep_copy()
            if not self.matcher.is_stopped():
                self.matcher.consume_token(draft)
        self.mask += 1
        return True


def _clear(mask: np.ndarray, ids: np.ndarray) -> None:
    np.bitwise_and.at(mask, ids >> 5, ~(np.uint32(1) << (ids & 31)))


class TokenMasks:
    """Of all rows that have constraints.

    ``load_tokenizer`` is called when the first grammar comes; it gives the ids that end an output,
    too.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        load_tokenizer: Callable[[], tuple[Tokenizer, Sequence[int]]],
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._load_tokenizer = load_tokenizer
        self._thread: ThreadPoolExecutor | None = None
        # The caller's: rows that have constraints since the last plan, and what they sample in it,
        # for each row in the order of its tokens.
        self._constrained: set[int] = set()
        self._sampled: list[tuple[int, int]] = []
        self._untaken: list[_Sampled] = []
        # The thread's.
        self._rows: dict[int, _Row] = {}
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def begin(self, plan: StepPlan) -> "Future[StepMasks | None] | None":
        """Sets the thread to the masks of a step; None: no row needs one. The plan is not read
        after the call.
        """
        self._sampled = []
        new = plan.constraints()
        if not (new or self._constrained):
            return None
        gone = {*plan.freed_rows(), *plan.new_row_numbers()} & self._constrained
        self._constrained -= gone
        self._constrained |= {one.row for one in new}
        self._sampled = [
            (logit, row)
            for logit, row in enumerate(plan.sampled_rows())
            if row in self._constrained
        ]
        if not (gone or new or self._sampled):
            return None
        drafts = plan.drafts() if plan.num_drafts > 0 else {}
        untaken, self._untaken = self._untaken, []
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-lite-masks")
            with large_stacks():
                self._thread.submit(int)  # starts the thread
        return self._thread.submit(
            self._make, untaken, gone, new, self._sampled, drafts, plan.num_logits
        )

    def launched(self, result: PendingResult) -> None:
        """``result``: of the step that was begun last."""
        if self._sampled:
            self._untaken.append(_Sampled(result, self._sampled))

    def _make(
        self,
        untaken: list[_Sampled],
        gone: set[int],
        new: list[RowConstraint],
        sampled: list[tuple[int, int]],
        drafts: dict[int, list[int]],
        num_logits: int,
    ) -> StepMasks | None:
        for step in untaken:
            tokens = step.result.token_ids()
            for logit, row in step.rows:
                if tokens[logit] >= 0:
                    self._rows[row].take(tokens[logit])
        for row in gone:
            self._rows.pop(row, None)  # not there if the step that brought it failed
        for one in new:
            constraint = decode_constraint(one.constraint)
            matcher = self._matcher(constraint.grammar) if constraint.grammar else None
            self._rows[one.row] = _Row(constraint, matcher, one.output)
        if not sampled:
            return None
        pinned = self._device.type == "cuda"
        shape = len(sampled), (self._vocab_size + 31) // 32
        masks = torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned)
        index = torch.full((num_logits,), -1, dtype=torch.int32, pin_memory=pinned)
        # A row's masks lie behind one another, each after one draft more.
        ahead: list[_Ahead] = []
        num_masks = 0
        logits: dict[int, list[int]] = {}
        for logit, row in sampled:
            logits.setdefault(row, []).append(logit)
        for row, of_row in logits.items():
            constrained = self._rows[row]
            ahead.append(_Ahead(constrained, constrained.matcher, num_masks, drafts.get(row, [])))
            for logit in of_row:
                index[logit] = num_masks
                num_masks += 1
        words = masks.numpy().view(np.uint32)
        num_drafts = 0
        while ahead:
            matchers = [(each.matcher, each.mask) for each in ahead if each.matcher is not None]
            if matchers and self._executor is not None:
                self._executor.unsafe_compute_mask_ptr(
                    matchers, masks.data_ptr(), masks.shape[1] * 4, masks.shape[0]
                )
            for each in ahead:
                each.row.finish(words[each.mask], each.matcher, each.drafts[:num_drafts])
            ahead = [each for each in ahead if each.advance(words[each.mask], num_drafts)]
            num_drafts += 1
        return StepMasks(masks, index)

    def _matcher(self, grammar: str) -> "LLMatcher":
        """At its beginning. It may have failed, for what shows with the model's own tokens only."""
        from llguidance import LLExecutor, LLMatcher

        if self._tokenizer is None:
            self._tokenizer = make_ll_tokenizer(*self._load_tokenizer(), self._vocab_size)
            # On the CPU the other cores are the forward pass's.
            self._executor = LLExecutor(None if self._device.type == "cuda" else 1)
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
        self._compiled[grammar] = compiled
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()


class _Vocabulary:
    """What llguidance asks of a tokenizer. Ids without bytes are never allowed: those of the logits
    that the tokenizer does not have, too.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], vocab_size: int) -> None:
        table = tokenizer.token_table()
        self.eos_token_id = end_ids[0]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [
            token_id
            for token_id, kind in enumerate(table.kinds[:vocab_size])
            if kind == KIND_SPECIAL or token_id in end_ids
        ]
        self.greedy: Callable[[str], list[int]] | None = None
        self._special = set(self.special_token_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of text that a grammar forces: as the model would write it, if that is the
        text as it stands.
        """
        characters = text.decode(errors="replace")
        ids = self._tokenizer.encode(characters, add_special_tokens=False)
        is_plain = self._special.isdisjoint(ids) and max(ids, default=0) < len(self.tokens)
        if is_plain and b"".join(self.tokens[token_id] for token_id in ids) == text:
            return ids
        return [] if self.greedy is None else self.greedy(characters)


def make_ll_tokenizer(
    tokenizer: Tokenizer, end_ids: Sequence[int], vocab_size: int
) -> "LLTokenizer":
    """vocab_size: the width of the logits."""
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Vocabulary(tokenizer, end_ids, vocab_size)
    made = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=list(end_ids))
    vocabulary.greedy = made.greedy_tokenize
    return made
