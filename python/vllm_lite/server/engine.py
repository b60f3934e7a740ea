"""What the server needs of an engine. ``AsyncLLMEngine`` fits; so does a test's fake."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from vllm_lite.outputs import PoolingRequestOutput, RequestOutput
from vllm_lite.pooling_params import PoolingParams
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.stats import EngineStats


class TokenizerLike(Protocol):
    """Methods may be called from several threads at once."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """One template, or named ones."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Raises ValueError when the template refuses the conversation or there is none."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class ModelConfigLike(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def generation_defaults(self) -> Mapping[str, Any]: ...


class EngineConfigLike(Protocol):
    @property
    def model(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_num_waiting(self) -> int: ...

    @property
    def served_model_names(self) -> Sequence[str]: ...


class EngineLike(Protocol):
    """See ``AsyncLLMEngine`` for the contract of each call."""

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def model_config(self) -> ModelConfigLike: ...

    @property
    def config(self) -> EngineConfigLike: ...

    def generate(
        self,
        prompt: list[int] | Mapping[str, object],
        sampling_params: SamplingParams,
        request_id: str,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """``prompt``: ids, or ``{"prompt_token_ids": ids, "cache_salt": text}``. Closing the
        generator aborts the request.

        Raises before its first output ``ValueError``, ``QueueFullError`` or ``EngineDeadError``;
        later ``EngineError`` when the request failed.
        """
        ...

    def encode(
        self,
        prompt: list[int],
        pooling_params: PoolingParams,
        request_id: str,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """One output; errors as ``generate``'s."""
        ...

    def health(self) -> str | None: ...

    def stats(self) -> EngineStats: ...

    async def drain(self) -> None: ...
