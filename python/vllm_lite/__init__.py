"""vllm_lite: LLM inference and serving with a hand-written C++ core.

The public names are loaded when they are first used: importing the package is quick and loads no
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_lite.async_engine import AsyncLLMEngine
    from vllm_lite.config import EngineConfig
    from vllm_lite.config import EngineConfig as AsyncEngineArgs
    from vllm_lite.config import EngineConfig as EngineArgs
    from vllm_lite.engine import Engine, LLMEngine
    from vllm_lite.llm import LLM
    from vllm_lite.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        RequestOutput,
    )
    from vllm_lite.pooling_params import PoolingParams
    from vllm_lite.sampling_params import (
        BeamSearchParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from vllm_lite.version import __version__

_HOMES = {
    "AsyncEngineArgs": ("vllm_lite.config", "EngineConfig"),
    "AsyncLLMEngine": ("vllm_lite.async_engine", "AsyncLLMEngine"),
    "BeamSearchOutput": ("vllm_lite.outputs", "BeamSearchOutput"),
    "BeamSearchParams": ("vllm_lite.sampling_params", "BeamSearchParams"),
    "BeamSearchSequence": ("vllm_lite.outputs", "BeamSearchSequence"),
    "CompletionOutput": ("vllm_lite.outputs", "CompletionOutput"),
    "Engine": ("vllm_lite.engine", "Engine"),
    "EngineArgs": ("vllm_lite.config", "EngineConfig"),
    "EngineConfig": ("vllm_lite.config", "EngineConfig"),
    "LLM": ("vllm_lite.llm", "LLM"),
    "LLMEngine": ("vllm_lite.engine", "LLMEngine"),
    "PoolingParams": ("vllm_lite.pooling_params", "PoolingParams"),
    "RequestOutput": ("vllm_lite.outputs", "RequestOutput"),
    "RequestOutputKind": ("vllm_lite.sampling_params", "RequestOutputKind"),
    "SamplingParams": ("vllm_lite.sampling_params", "SamplingParams"),
    "StructuredOutputsParams": ("vllm_lite.sampling_params", "StructuredOutputsParams"),
    "__version__": ("vllm_lite.version", "__version__"),
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Engine",
    "EngineArgs",
    "EngineConfig",
    "LLMEngine",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vllm_lite' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value
