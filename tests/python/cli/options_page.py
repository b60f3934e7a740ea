"""docs/options.md from the parser: ``python tests/python/cli/options_page.py`` writes it anew."""

import argparse
from pathlib import Path

from vllm_lite.arguments import serve_parser
from vllm_lite.settings import OTHER_VARIABLES, key_of, variable_of

PAGE = Path(__file__).parents[3] / "docs" / "options.md"

_HEAD = """\
# Options

`vllm-lite serve MODEL --config server.yaml --port 9000`: a flag wins over the YAML file of
`--config`, that over the environment, that over the default, wherever the flags stand. In the file
an option's key is its flag without the dashes in front (underscores do, too); booleans are `true`
and `false`, lists are lists, null leaves an option out, and a key that no option has is an error:

```yaml
model: smollm2
port: 9000
max-num-seqs: 64
prefix-caching: false
kv-cache-memory: 2G
served-model-name: [small, default]
```

In a variable a list's entries stand with spaces between them. `serve` logs the value of every
option and where it is from, without keys, and names variables with the prefix `VLLM_LITE_` that
nothing reads. The options under "Model" and "Engine" are also those of `chat MODEL`,
`complete MODEL`, `run-batch`, `bench throughput` and `bench latency`.

This page is written by `python tests/python/cli/options_page.py`; a test compares it with the
program.
"""

_TITLES = {
    "positional arguments": "What to serve",
    "options": "File",
    "model": "Model",
    "engine": "Engine",
}


def render() -> str:
    parser = serve_parser()
    parts = [_HEAD]
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.dest in {s.dest for s in parser.settable()}]
        if not actions:
            continue
        parts.append(f"\n## {_TITLES.get(group.title, group.title)}\n")
        parts.append("| option | variable | default | what |\n|---|---|---|---|")
        parts += [_row(action) for action in actions]
    parts.append("\n## Variables without an option\n\n| variable | what |\n|---|---|")
    parts += [f"| `{name}` | {what} |" for name, what in OTHER_VARIABLES.items()]
    return "\n".join(parts) + "\n"


def _row(action: argparse.Action) -> str:
    flag = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.metavar}`"
    if action.choices:
        flag += " " + " ".join(f"`{choice}`" for choice in action.choices)
    help = (action.help or "").replace(" (default: %(default)s)", "").replace("|", "\\|")
    default = "" if action.default in (None, [], ()) else f"`{_show(action.default)}`"
    assert key_of(action)
    return f"| {flag} | `{variable_of(action)}` | {default} | {help} |"


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(render())
