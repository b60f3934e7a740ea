"""The command ``vllm-lite``."""

import sys
from importlib import import_module

# Command to its module, whose main(argv) returns the exit code, and what it does.
_COMMANDS = {
    "serve": ("vllm_lite.serve", "serve a model over HTTP"),
    "chat": ("vllm_lite.commands.chat", "talk to a server, or to a model, in the terminal"),
    "complete": ("vllm_lite.commands.complete", "let a server, or a model, go on with a text"),
    "bench": ("vllm_lite.bench", "measure throughput, latency, serving or start-up"),
    "run-batch": ("vllm_lite.commands.run_batch", "answer a file of requests (OpenAI's format)"),
    "collect-env": ("vllm_lite.commands.collect_env", "what a bug report should say"),
}


def main() -> None:
    arguments = sys.argv[1:]
    # Only what the command needs is imported: --version is to answer at once.
    if arguments and arguments[0] in _COMMANDS:
        module, _ = _COMMANDS[arguments[0]]
        try:
            sys.exit(import_module(module).main(arguments[1:]))
        except KeyboardInterrupt:  # before the command takes its signals over
            sys.exit(130)
        except BrokenPipeError:  # nobody reads any more, as behind `| head`
            sys.stderr.close()
            sys.exit(141)
    if arguments in (["--version"], ["-V"]):
        from vllm_lite.version import __version__

        print(f"vllm-lite {__version__}")
        return
    if arguments in ([], ["--help"], ["-h"]):
        print(_usage(), end="")
        return
    print(f"vllm-lite: unknown command {arguments[0]!r}\n\n{_usage()}", end="", file=sys.stderr)
    sys.exit(2)


def _usage() -> str:
    commands = "".join(f"  {name:<12} {what}\n" for name, (_, what) in _COMMANDS.items())
    return (
        f"usage: vllm-lite COMMAND [options]\n       vllm-lite --version\n\n{commands}\n"
        "`vllm-lite COMMAND --help` lists the options of each.\n"
    )


if __name__ == "__main__":
    main()
