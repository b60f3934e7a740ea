"""The options of ``vllm-lite serve``, and of the other commands that run an engine. Imports nothing
heavy: ``--help`` is to answer at once.
"""

import argparse
from typing import Any

from vllm_lite.config import EngineConfig, parse_bytes
from vllm_lite.model_files import DEFAULT_MODEL
from vllm_lite.output_formats import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS
from vllm_lite.server.options import ServerOptions
from vllm_lite.settings import Parser, add_config, add_to, json_object


def server_options(values: dict[str, Any]) -> ServerOptions:
    """From the values of ``serve_parser``. ``ValueError`` for what is out of bounds."""
    server = {name: values[name] for name in ServerOptions.__slots__ if name in values}
    server["api_keys"] = tuple(values["api_keys"])
    server["cors_origins"] = tuple(values["cors_origins"])
    return ServerOptions(**server)


def engine_config(values: dict[str, Any]) -> EngineConfig:
    """From the values of a parser with ``add_engine_options``. ``ValueError`` as above."""
    engine = {name: values[name] for name in EngineConfig.__struct_fields__ if name in values}
    engine["model"] = values["model"] or DEFAULT_MODEL
    return EngineConfig(**engine)


def serve_parser() -> Parser:
    parser = Parser("vllm-lite serve", "Serve a model over OpenAI's HTTP API.", "[MODEL]")
    add_model(parser)
    add_config(parser)
    server_default = ServerOptions()
    add = add_to(parser, "HTTP", server_default)
    add("--host", "address to listen on", default="127.0.0.1")
    add("--port", "0 chooses a free one", type=_port, default=8000)
    add("--api-key", "require this key on every route but /health; may be repeated; other "
        "users of the machine cannot see it in VLLM_LITE_API_KEY",
        dest="api_keys", action="append", default=[], metavar="KEY")  # fmt: skip
    add("--served-model-name", "names the model answers to (default: MODEL)",
        dest="served_model_names", nargs="+", default=[], metavar="NAME")  # fmt: skip
    add("--cors-origin", "allow browsers at this origin; may be repeated",
        dest="cors_origins", action="append", default=[], metavar="ORIGIN")  # fmt: skip
    add("--max-body-bytes", "largest request body", type=_bytes, metavar="BYTES")
    add("--max-pending-body-bytes", "of all bodies being read or tokenised; more get 429",
        type=_bytes, metavar="BYTES")  # fmt: skip
    add("--max-choices", "prompts x n of one request", type=int, metavar="N")
    add("--shutdown-grace", "time that running requests get at SIGTERM", type=float,
        metavar="SECONDS")  # fmt: skip
    add("--keep-alive", "time an idle connection stays open", type=float, metavar="SECONDS")
    add("--backlog", "connections that wait to be accepted", type=int, metavar="N")
    add("--tool-call-parser", "how the model writes calls of tools; auto: as its chat template "
        "says",
        choices=[AUTO, NONE, *TOOL_FORMATS])  # fmt: skip
    add("--reasoning-parser", "how the model marks reasoning, likewise",
        choices=[AUTO, NONE, *REASONING_FORMATS])  # fmt: skip
    add("--http-threads", "threads that parse and tokenise", dest="threads", type=int, metavar="N",
        default=server_default.threads)  # fmt: skip
    add("--access-log", "log every request but those for /health and /metrics")

    add("--trust-request-chat-template", "take chat_template from requests; it runs in a sandbox")

    add_engine_options(parser)
    return parser


def add_model(parser: Parser) -> None:
    """MODEL; None where it is left out, which ``engine_config`` makes the default."""
    help = f"directory, .gguf file or hub id (default: {DEFAULT_MODEL})"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=help)


def add_engine_options(parser: Parser) -> None:
    """``EngineConfig``'s options, in two groups."""
    engine_default = EngineConfig()
    add = add_to(parser, "model", engine_default)
    add("--dtype", "auto: the checkpoint's; bfloat16 for a quantised one",
        choices=["auto", "float32", "bfloat16", "float16"])  # fmt: skip
    add("--load-format", "dummy: random weights, for measurements; only config.json and the "
        "tokenizer are read", choices=["auto", "dummy"])  # fmt: skip
    add("--quantization", "int8: matrices become 8-bit integers with a scale per row when they are "
        "loaded, on a CPU; a GGUF file's own formats need no option", choices=["int8"])  # fmt: skip
    add("--device", "auto: cuda where there is an NVIDIA driver, else cpu",
        choices=["auto", "cpu", "cuda"])  # fmt: skip
    add("--chat-template", "file of a Jinja template to use in place of the model's",
        metavar="FILE")  # fmt: skip
    add("--max-model-len", "prompt + output (default: the model's limit)", type=int,
        metavar="TOKENS")  # fmt: skip

    add = add_to(parser, "engine", engine_default)
    add("--max-num-seqs", "sequences that run at once", type=int, metavar="N")
    add("--max-num-batched-tokens", "tokens in one step", type=int, metavar="N")
    add("--max-chunk-tokens", "tokens of one sequence in one step; 0: no limit of its own",
        type=int, metavar="N")  # fmt: skip
    add("--max-num-waiting", "sequences that wait; more get 429", type=int, metavar="N")
    add("--kv-cache-memory", "memory of the KV cache, such as 512M or 4G (default: 1G on a CPU, "
        "what is left on a GPU)", type=_bytes, metavar="BYTES")  # fmt: skip
    add("--kv-cache-dtype", "auto: that of --dtype; in half the memory fp8 (on CUDA) or int8 (on "
        "the CPU; vLLM's name for it is int8_per_token_head)",
        choices=["auto", "fp8", "int8", "int8_per_token_head"])  # fmt: skip
    add("--gpu-memory-utilization", "share of the GPU's memory to use", type=float,
        metavar="SHARE")  # fmt: skip
    add("--enforce-eager", "no CUDA graphs")
    add("--block-size", "tokens in a KV block: a power of two from 16 to 256", type=int,
        metavar="TOKENS")  # fmt: skip
    add("--prefix-caching", "share the KV of equal prompt beginnings",
        "--enable-prefix-caching", dest="enable_prefix_caching")  # fmt: skip
    add("--scheduling-policy", "order of requests", choices=["fcfs", "priority"])
    add("--async-scheduling", "plan a step while the worker carries out the one before; a request "
        "that a stop ends costs a step more (default: off on CPU)",
        action=argparse.BooleanOptionalAction)  # fmt: skip
    add("--speculative-config", 'guess tokens ahead from what a sequence has said before, such as '
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, '
        '"prompt_lookup_min": 2}; the output stays the same', type=json_object,
        metavar="JSON")  # fmt: skip
    add("--threads", "of the worker on a CPU (default: all cores)", dest="num_threads", type=int,
        metavar="N")  # fmt: skip
    add("--step-timeout", "after which a worker without a result counts as dead", type=float,
        metavar="SECONDS")  # fmt: skip


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"not a port from 0 to 65535: {text!r}")
    return int(text)
