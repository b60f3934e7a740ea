"""What an engine is started with. No torch here: every process reads this."""

import os
import re
from typing import Literal

import msgspec

from vllm_lite.model_config import ModelConfig
from vllm_lite.model_files import DEFAULT_MODEL

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]
KvCacheDTypeName = Literal["auto", "fp8", "int8", "int8_per_token_head"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
_KV_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "int8": "int8", "int8_per_token_head": "int8"}

# KV memory on CPU unless --kv-cache-memory says otherwise. Pages are touched only when they are
# used.
DEFAULT_KV_CACHE_MEMORY = 1 << 30

_KV_SCALE_BYTES = 4  # behind each row of an int8 cache (csrc/core/kv_layout_cpu.h)

_NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # the second under WSL

# The worker has room for the logits of at least so many tokens of a step.
MIN_LOGITS_ROWS = 64

_MAX_SPECULATIVE_TOKENS = 16  # kMaxDrafts (csrc/scheduler/sequence.h)
_MAX_PROMPT_LOOKUP = 64  # kMaxPromptLookup (csrc/engine/ngram_proposer.h)

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_LONGEST_STEP = 1e9
# Others: _INT32_MAX. The sampling kernels count sequences in y of their grids, which CUDA limits.
_MOST = {
    "kv_cache_memory": _INT64_MAX,
    "max_num_seqs": 65535,
    "block_size": 256,
    "num_threads": 4096,
}
_LEAST = {
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_num_waiting": 1,
    "max_chunk_tokens": 0,
    "block_size": 16,
    "kv_cache_memory": 1,
    "num_threads": 1,
}
_OPTIONAL = frozenset({"max_model_len", "kv_cache_memory", "num_threads"})
_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "device": ("auto", "cpu", "cuda"),
    "kv_cache_dtype": ("auto", *_KV_CACHE_DTYPES),
    "load_format": ("auto", "dummy"),
    "quantization": (None, "int8"),
    "scheduling_policy": ("fcfs", "priority"),
}


class SpeculativeConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Drafts of a sequence's next tokens, verified together in one step: what followed the last
    time upon the longest n-gram, of ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens, that it
    ends with.
    """

    method: Literal["ngram"]
    num_speculative_tokens: int  # drafts of a sequence in one step
    # Either alone stands for both; without either they are 2 and 5.
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ValueError(f"speculative_config.method must be ngram, got {self.method!r}")
        for name, most in (
            ("num_speculative_tokens", _MAX_SPECULATIVE_TOKENS),
            ("prompt_lookup_min", _MAX_PROMPT_LOOKUP),
            ("prompt_lookup_max", _MAX_PROMPT_LOOKUP),
        ):
            value = getattr(self, name)
            if value is None and name != "num_speculative_tokens":
                continue
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(
                    f"speculative_config.{name} must be an integer from 1 to {most}, got {value!r}"
                )
        least, most = self.ngram_lengths
        if least > most:
            raise ValueError(
                f"speculative_config.prompt_lookup_min is {least}, but must be at most "
                f"prompt_lookup_max, which is {most}"
            )

    @property
    def ngram_lengths(self) -> tuple[int, int]:
        """The least and the most tokens of an n-gram."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or 2, most or least or 5


class EngineConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of an engine; the command line has the same names with dashes."""

    model: str = DEFAULT_MODEL
    served_model_names: list[str] = []  # empty: the model as it was named
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights, for measurements
    dtype: DTypeName = "auto"
    quantization: Literal["int8"] | None = None  # of the matrices, when they are loaded; CPU alone
    device: DeviceName = "auto"  # auto: cuda where there is an NVIDIA driver, else cpu
    chat_template: str | None = None  # a file with the template to use in place of the model's
    max_model_len: int | None = None  # None: what the model allows
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_waiting: int = 4096  # sequences in the waiting queue; more are refused with 429
    max_chunk_tokens: int = 0  # tokens of one sequence in one step; 0: only the budget limits it
    block_size: int = 16  # tokens in a KV block: a power of two from 16 to 256
    # Bytes; None: DEFAULT_KV_CACHE_MEMORY on the CPU, what the worker finds free on a GPU.
    kv_cache_memory: int | None = None
    # auto: the dtype; fp8: float8_e4m3fn, on CUDA alone; int8, or int8_per_token_head: int8 with a
    # scale for each token and KV head, on the CPU alone.
    kv_cache_dtype: KvCacheDTypeName = "auto"
    gpu_memory_utilization: float = 0.9  # of the GPU's memory, for weights, activations and KV
    enforce_eager: bool = False  # no CUDA graphs
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    # Plan a step while the worker carries out the one before. None: resolve() decides. Within one
    # process the worker is called for each step, so that there is nothing to overlap.
    async_scheduling: bool | None = None
    # An object or a dict of its fields. Without asynchronous scheduling.
    speculative_config: SpeculativeConfig | None = None
    num_threads: int | None = None  # of the worker; None: the cores this process may use
    step_timeout: float = 300.0  # seconds after which a worker that gives no result counts as dead

    def __post_init__(self) -> None:
        """``ValueError`` names field, value, limit. msgspec checks types only when it decodes."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            most = _MOST.get(name, _INT32_MAX)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name} must be an integer from {least} to {most}, got {value!r}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                allowed = ", ".join(map(str, choices))
                raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
        for name in ("enable_prefix_caching", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                "gpu_memory_utilization must be above 0 and at most 1, got "
                f"{self.gpu_memory_utilization}"
            )
        if not isinstance(self.async_scheduling, bool | None):
            raise ValueError(
                f"async_scheduling must be true, false or None, got {self.async_scheduling!r}"
            )
        if isinstance(self.speculative_config, dict):
            self.speculative_config = _speculative_config(self.speculative_config)
        if not isinstance(self.speculative_config, SpeculativeConfig | None):
            raise ValueError(
                f"speculative_config must be a dict or None, got {self.speculative_config!r}"
            )
        if self.speculative_config is not None and self.async_scheduling:
            raise ValueError(
                "speculative_config and async_scheduling exclude each other: what the next step "
                "computes follows from the result of the one before"
            )
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if not 0 < self.step_timeout <= _LONGEST_STEP:
            raise ValueError(
                f"step_timeout must be above 0 and at most {_LONGEST_STEP:.0f} seconds, got "
                f"{self.step_timeout}"
            )
        if not isinstance(self.model, str):
            raise ValueError(f"model must be a string, got {self.model!r}")
        if not self.served_model_names:
            self.served_model_names = [self.model]

    @property
    def max_num_logits(self) -> int:
        """Of one step. Drafts take what samples leave of them."""
        return max(self.max_num_seqs, MIN_LOGITS_ROWS)

    def resolve(self, model: ModelConfig) -> "ResolvedConfig":
        """The numbers that follow from these options and the model.

        Raises ``ValueError`` if ``max_model_len`` exceeds the model's limit or does not fit into
        the KV memory, or if the device cannot compute in the dtype, read such a KV cache, use such
        weights or heads of such a size.
        """
        limit = model.max_position_embeddings
        max_model_len = limit if self.max_model_len is None else self.max_model_len
        if max_model_len > limit:
            raise ValueError(
                f"max_model_len {max_model_len} is more than the {limit} positions of the model"
            )
        device = resolve_device_name(self.device)
        dtype = resolve_dtype_name(self.dtype, model)
        if device == "cuda" and dtype == "float32":
            raise ValueError(
                "dtype float32 is not supported on CUDA: use --dtype bfloat16 or float16, or "
                "--device cpu"
            )
        if device == "cuda" and model.head_size == 32:
            raise ValueError("head_dim 32 is not supported on CUDA: use --device cpu")
        if self.quantization is not None and device == "cuda":
            raise ValueError(
                f"quantization {self.quantization} is not supported on CUDA: leave it out, or use "
                "--device cpu"
            )
        if self.quantization is not None and model.checkpoint_dtype == "quantized":
            raise ValueError(
                f"quantization {self.quantization}: the weights of {self.model} are quantized "
                "already, and are used as they are"
            )
        kv_cache_dtype = _KV_CACHE_DTYPES.get(self.kv_cache_dtype, dtype)
        if device == "cpu" and kv_cache_dtype == "float8_e4m3fn":
            raise ValueError(
                f"kv_cache_dtype {self.kv_cache_dtype} is not supported on the CPU: use "
                "--kv-cache-dtype auto or int8, or --device cuda"
            )
        if device == "cuda" and kv_cache_dtype == "int8":
            raise ValueError(
                f"kv_cache_dtype {self.kv_cache_dtype} is not supported on CUDA: use "
                "--kv-cache-dtype auto or fp8, or --device cpu"
            )
        row_bytes = kv_row_size(model.head_size, kv_cache_dtype) * DTYPE_BYTES[kv_cache_dtype]
        block_bytes = 2 * model.num_layers * model.num_kv_heads * self.block_size * row_bytes
        memory = self.kv_cache_memory
        if memory is None and device == "cpu":
            memory = DEFAULT_KV_CACHE_MEMORY
        num_blocks = None if memory is None else memory // block_bytes
        if num_blocks is not None and num_blocks > _INT32_MAX:
            raise ValueError(
                f"kv_cache_memory {memory} makes {num_blocks} blocks, and the limit is "
                f"{_INT32_MAX}: set --kv-cache-memory to at most {_INT32_MAX * block_bytes}"
            )
        if num_blocks is not None and num_blocks * self.block_size < max_model_len:
            needed = -(-max_model_len // self.block_size) * block_bytes
            shorter = f"--max-model-len to at most {num_blocks * self.block_size}, or "
            raise ValueError(
                f"one request of max_model_len {max_model_len} tokens needs {needed} bytes of "
                f"KV cache, and kv_cache_memory is {memory}: set {shorter if num_blocks else ''}"
                f"--kv-cache-memory to at least {needed}"
            )
        async_scheduling = self.async_scheduling
        if async_scheduling is None:
            # On a CPU the worker and the engine core would only take each other's cores.
            async_scheduling = device == "cuda" and self.speculative_config is None
        return ResolvedConfig(
            device=device,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            async_scheduling=async_scheduling,
        )


class ResolvedConfig(msgspec.Struct, frozen=True):
    device: str  # cpu or cuda
    dtype: str  # float32, bfloat16 or float16
    kv_cache_dtype: str  # the dtype, float8_e4m3fn or int8
    max_model_len: int
    num_blocks: int | None  # None: for the worker to find out
    block_bytes: int  # K and V of one block in all layers
    async_scheduling: bool


def _speculative_config(given: dict[str, object]) -> SpeculativeConfig:
    names = SpeculativeConfig.__struct_fields__
    for name in given:
        if name not in names:
            raise ValueError(
                f"speculative_config.{name} is not supported; there are {', '.join(names)}"
            )
    for name in ("method", "num_speculative_tokens"):
        if given.get(name) is None:
            raise ValueError(f"speculative_config.{name} is missing")
    return SpeculativeConfig(**given)  # type: ignore[arg-type]  # it checks


def kv_row_size(head_size: int, kv_cache_dtype: str) -> int:
    """Elements that the KV cache has for a token's key, or value, of one head."""
    return head_size + (_KV_SCALE_BYTES if kv_cache_dtype == "int8" else 0)


def resolve_dtype_name(name: DTypeName, model: ModelConfig) -> str:
    """``auto`` is the checkpoint's own dtype; a quantised checkpoint counts as bfloat16."""
    if name != "auto":
        return name
    return "bfloat16" if model.checkpoint_dtype == "quantized" else model.checkpoint_dtype


def resolve_device_name(name: DeviceName) -> str:
    """``auto`` is cuda if the NVIDIA driver is loaded. Nothing else changes a device: what is asked
    for is what is used.
    """
    if name != "auto":
        return name
    return "cuda" if any(map(os.path.exists, _NVIDIA_DEVICES)) else "cpu"


def parse_bytes(text: str) -> int:
    """``"1073741824"``, ``"512M"``, ``"1.5G"`` (powers of 1024) -> bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(f"not a number of bytes: {text!r} (try 512M or 2G)")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))
