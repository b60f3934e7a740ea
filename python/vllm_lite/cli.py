"""The command ``vllm-lite``."""

import sys

_USAGE = """\
usage: vllm-lite serve [MODEL] [options]   serve a model over HTTP (OpenAI's API)
       vllm-lite --version

`vllm-lite serve --help` lists the options.
"""


def main() -> None:
    arguments = sys.argv[1:]
    # Only what the command needs is imported: --version is to answer at once.
    if arguments and arguments[0] == "serve":
        try:
            from vllm_lite.serve import main as serve

            sys.exit(serve(arguments[1:]))
        except KeyboardInterrupt:  # before the server takes its signals over
            sys.exit(130)
    if arguments in (["--version"], ["-V"]):
        from vllm_lite.version import __version__

        print(f"vllm-lite {__version__}")
        return
    if arguments in ([], ["--help"], ["-h"]):
        print(_USAGE, end="")
        return
    print(f"vllm-lite: unknown command {arguments[0]!r}\n\n{_USAGE}", end="", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
