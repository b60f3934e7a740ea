"""``/v1/completions``."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from vllm_lite.outputs import CompletionOutput, PromptLogprobs
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.server.body import decode
from vllm_lite.server.errors import bad_request, show
from vllm_lite.server.generation import Job, PromptResult, Renderer, make_job
from vllm_lite.server.logprobs import LogprobsWriter, prompt_list
from vllm_lite.server.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from vllm_lite.server.sampling import (
    check_choices,
    check_prompt_logprobs,
    check_token_ids,
    for_prompts,
    output_length,
    refuse_unsupported,
    sampling_params,
    served_name,
    truncated,
)
from vllm_lite.server.state import ServerState

DEFAULT_MAX_TOKENS = 16  # OpenAI's

_decoder = msgspec.json.Decoder(CompletionRequest)


def prepare(state: ServerState, body: bytes) -> tuple[Job, "CompletionRenderer"]:
    """Parses, checks and tokenises a body; runs in a thread. Raises ``ApiError``."""
    request = decode(_decoder, body)
    engine = state.engine
    model = served_name(engine, request.model)
    refuse_unsupported(request)
    prompts = split_prompts(request.prompt, "prompt")
    check_choices(state, request, len(prompts), "prompt")
    special = request.add_special_tokens is not False
    try:
        token_ids = [
            engine.tokenizer.encode(prompt, add_special_tokens=special)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
    except ValueError as error:  # too long to be worth tokenising
        raise bad_request(f"prompt: {error}", "prompt") from error
    for ids in token_ids:
        if not ids:
            raise bad_request("prompt: empty; it must have at least one token", "prompt")
    token_ids = [truncated(request, ids, engine.config.max_model_len) for ids in token_ids]
    if request.echo and request.logprobs is not None and request.use_beam_search:
        raise bad_request("echo: with logprobs it cannot be combined with use_beam_search", "echo")
    of_prompt = [request.prompt_logprobs, request.logprobs if request.echo else None]
    counts = [count for count in of_prompt if count is not None]
    if counts:
        told = (request.n or 1) if of_prompt[1] is not None else 1
        name = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        check_prompt_logprobs(told * sum(map(len, token_ids)), max(counts), name)
    lengths = [
        output_length(
            request, len(ids), engine.config.max_model_len, DEFAULT_MAX_TOKENS, "prompt",
            may_be_zero=bool(request.echo) or bool(counts),
        )
        for ids in token_ids
    ]  # fmt: skip
    for ids in token_ids:  # after the lengths, so that no endless list is looked through
        check_token_ids(ids, engine.model_config.vocab_size, "prompt")
    params = sampling_params(
        request, engine, logprobs=request.logprobs, prompt_logprobs=max(counts, default=None),
        max_tokens=min(lengths),
    )  # fmt: skip
    echoes = None
    if request.echo:
        skip = params.skip_special_tokens
        echoes = [
            prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt, skip)
            for prompt in prompts
        ]
    job = make_job(
        request, "cmpl-", model=model, prompts=token_ids, params=for_prompts(params, lengths)
    )
    return job, CompletionRenderer(state, job, params, request, echoes)


def split_prompts(prompt: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """One prompt per entry: a text, texts, one list of ids, or lists of ids; never a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if not kinds:
        raise bad_request(f"{param}: empty; it must have at least one token", param)
    if len(kinds) > 1:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise bad_request(f"{param}: a mixture of {names}: {show(prompt)}; use one kind", param)
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


class CompletionRenderer(Renderer):
    def __init__(
        self,
        state: ServerState,
        job: Job,
        params: SamplingParams,
        request: CompletionRequest,
        echoes: list[str] | None,
    ) -> None:
        """echoes: the texts of the prompts, if answers begin with them."""
        self._job = job
        self._echoes = echoes
        self._echoed: set[int] = set()  # choices whose prompt is out
        self._prompts: dict[int, PromptLogprobs] = {}
        self._prompt_top = request.prompt_logprobs
        self._usage_field: msgspec.UnsetType | None = None if job.include_usage else msgspec.UNSET
        self._greeted: set[int] = set()  # choices whose prompt's ids are out
        top = params.logprobs
        choices = len(job.prompts) * job.n
        self._writers = (
            [
                LogprobsWriter(
                    state.token_texts,
                    top,
                    ids=bool(request.return_tokens_as_token_ids),
                    skip_special=params.skip_special_tokens,
                )
                for _ in range(choices)
            ]
            if top is not None
            else None
        )

    def prompt(self, index: int, result: PromptResult) -> None:
        assert isinstance(result, PromptLogprobs)
        self._prompts[index] = result

    def chunks(
        self, choice: int, output: CompletionOutput, usage: Callable[[], Usage]
    ) -> Iterator[CompletionResponse]:
        tells_ids = self._writers is not None or self._job.return_token_ids
        echoes = self._echoes is not None and choice not in self._echoed
        has_text = echoes or bool(output.text)
        if has_text or output.finish_reason or (tells_ids and output.token_ids):
            shown = usage() if self._job.continuous_usage else self._usage_field
            yield self._response([self._choice(choice, output)], shown)

    def ending(self, usage: Usage) -> Iterator[CompletionResponse]:
        if self._job.include_usage:
            yield self._response([], usage)

    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> CompletionResponse:
        return self._response(
            [self._choice(choice, output) for choice, output in enumerate(outputs)], usage
        )

    def _choice(self, choice: int, output: CompletionOutput) -> CompletionChoice:
        job = self._job
        index = choice // job.n
        text, before = output.text, None
        if self._echoes is not None and choice not in self._echoed:
            self._echoed.add(choice)
            text = self._echoes[index] + text
            if self._writers is not None:
                before = self._writers[choice].echo(
                    job.prompts[index], self._prompts[index], self._echoes[index]
                )
        shown = CompletionChoice(
            index=choice,
            text=text,
            logprobs=self._logprobs(choice, output, before),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_logprobs=msgspec.UNSET
            if self._prompt_top is None
            else prompt_list(self._prompts[index], self._prompt_top),
        )
        if job.return_token_ids:
            shown.token_ids = output.token_ids
            if choice not in self._greeted:
                self._greeted.add(choice)
                shown.prompt_token_ids = job.prompts[index]
        return shown

    def _logprobs(
        self, choice: int, output: CompletionOutput, before: CompletionLogprobs | None
    ) -> CompletionLogprobs | None:
        """before: those of the prompt, if they come first."""
        if self._writers is None:
            return None
        own = self._writers[choice].completion(output.token_ids, output.logprobs or [])
        if before is None:
            return own
        return CompletionLogprobs(
            tokens=before.tokens + own.tokens,
            token_logprobs=before.token_logprobs + own.token_logprobs,
            top_logprobs=before.top_logprobs + own.top_logprobs,
            text_offset=before.text_offset + own.text_offset,
        )

    def _response(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> CompletionResponse:
        job = self._job
        return CompletionResponse(
            id=job.id, created=job.created, model=job.model, choices=choices, usage=usage
        )
