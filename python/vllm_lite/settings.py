"""Where a command's options come from: flag, else configuration file, else environment, else
default.

Every option of a parser has one key, its long flag without dashes (``max-num-seqs``, also written
with underscores), under which the YAML file of ``--config`` knows it, and one environment variable
(``VLLM_LITE_MAX_NUM_SEQS``). Imports nothing heavy.
"""

import argparse
import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

ENVIRONMENT_PREFIX = "VLLM_LITE_"
# What is read elsewhere: by log.py, csrc/core/isa.cpp, and the build.
OTHER_VARIABLES = {
    "VLLM_LITE_LOG_LEVEL": "DEBUG, INFO, WARNING or ERROR: what vllm_lite's processes log (INFO)",
    "VLLM_LITE_CPU_ISA": "portable, avx2, avx512, avx512_bf16 or amx: the instruction set of the "
    "CPU kernels (the best there is)",
    "VLLM_LITE_CUDA": "AUTO, ON or OFF: whether the build compiles the CUDA kernels (AUTO: where "
    "there is a GPU)",
}
_SECRET = frozenset({"api_keys", "api_key"})
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def json_object(text: str) -> dict[str, Any]:
    """Type of an option that is a JSON object; in a file it may be a mapping."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence and exits with code 1, as every other failure to start
    does.

    ``positional``: for the line of usage, which does not repeat the options. ``flags_only``:
    options that neither a file nor the environment can set.
    """

    def __init__(
        self, prog: str, description: str, positional: str = "", flags_only: Iterable[str] = ()
    ) -> None:
        usage = " ".join(word for word in (prog, positional, "[options]") if word)
        super().__init__(prog=prog, usage=usage, description=description, allow_abbrev=False)
        self.flags_only = {"help", *flags_only}

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message} (options: {self.prog} --help)\n")

    def settable(self) -> list[argparse.Action]:
        """The options that a file or the environment may set, too."""
        return [action for action in self._actions if action.dest not in self.flags_only]


def add_to(parser: argparse.ArgumentParser, title: str, default_of: object) -> Callable[..., None]:
    """A function that adds an option to a new group; its default is the attribute of its name."""
    group = parser.add_argument_group(title)

    def add(flag: str, help: str, *aliases: str, **options: Any) -> None:
        name = options.setdefault("dest", flag.lstrip("-").replace("-", "_"))
        default = options.setdefault("default", getattr(default_of, name, None))
        if isinstance(default, bool):
            options.setdefault("action", argparse.BooleanOptionalAction)
        shown = "" if default is None or default in ([], ()) else " (default: %(default)s)"
        group.add_argument(flag, *aliases, help=help + shown, **options)

    return add


def add_config(parser: argparse.ArgumentParser) -> None:
    help = (
        "YAML file with options as keys, such as max-num-seqs: 64; flags win over it, it wins over "
        "variables (VLLM_LITE_MAX_NUM_SEQS)"
    )
    parser.add_argument("--config", metavar="FILE", help=help)


@dataclass(frozen=True)
class Settings:
    """``values``: by destination. ``sources``: of each value that is not the default."""

    values: dict[str, Any]
    sources: dict[str, str]

    def describe(self) -> str:
        """Every value, secrets hidden, on one line."""
        parts = []
        for name, value in self.values.items():
            shown = "(hidden)" if name in _SECRET and value else value
            source = self.sources.get(name)
            parts.append(f"{name}={shown}" + (f" ({source})" if source else ""))
        return ", ".join(parts)


def read(
    parser: Parser, argv: list[str] | None, environment: Mapping[str, str] | None = None
) -> Settings:
    """Raises ``ValueError`` naming file or variable, key and value; wrong flags end the program."""
    environment = os.environ if environment is None else environment
    actions = {action.dest: action for action in parser.settable()}
    # None stands for an option that was not given: argparse puts defaults only where nothing is.
    unset = argparse.Namespace(**dict.fromkeys(action.dest for action in parser._actions))
    flags = vars(parser.parse_args(argv, unset))
    variables = {variable_of(action): action for action in actions.values()}
    from_environment = {
        action.dest: _from_text(action, environment[name], name)
        for name, action in variables.items()
        if environment.get(name)
    }
    from_file: dict[str, Any] = {}
    path = flags.get("config") or from_environment.get("config")
    if path is not None:
        from_file = _read_file(path, actions)
    values, sources = {}, {}
    for action in parser._actions:
        name = action.dest
        if name == "help":
            continue
        values[name] = action.default
        if isinstance(action.default, str) and callable(action.type):
            values[name] = action.type(action.default)
        for source, found in (
            ("environment", from_environment),
            ("file", from_file),
            ("flag", flags),
        ):
            if found.get(name) is not None:
                values[name], sources[name] = found[name], source
    return Settings(values, sources)


def unknown_variables(parser: Parser, environment: Mapping[str, str]) -> list[str]:
    """A sentence for every variable with our prefix that nothing reads."""
    known = {variable_of(action) for action in parser.settable()} | OTHER_VARIABLES.keys()
    return [
        f"{name} is set, and nothing reads it{_nearest(name, known)}"
        for name in environment
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known
    ]


def key_of(action: argparse.Action) -> str:
    """Under which a file knows the option."""
    return action.option_strings[0].lstrip("-") if action.option_strings else action.dest


def variable_of(action: argparse.Action) -> str:
    return ENVIRONMENT_PREFIX + key_of(action).upper().replace("-", "_")


def is_list(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction) or action.nargs == "+"


def _from_text(action: argparse.Action, text: str, where: str) -> Any:
    if isinstance(action, argparse.BooleanOptionalAction):
        word = text.strip().lower()
        if word not in _TRUE + _FALSE:
            raise ValueError(f"{where}: must be true or false, got {text!r}")
        return word in _TRUE
    if is_list(action):
        return [_convert(action, word, where) for word in text.split()]
    return _convert(action, text, where)


def _from_yaml(action: argparse.Action, value: Any, where: str) -> Any:
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{where}: must be true or false, got {value!r}")
        return value
    if action.type is json_object and isinstance(value, dict):
        return value
    if is_list(action):
        items = value if isinstance(value, list) else [value]
        return [_from_scalar(action, item, where) for item in items]
    return _from_scalar(action, value, where)


def _from_scalar(action: argparse.Action, value: Any, where: str) -> Any:
    # YAML reads 0123 and 1e3 in its own ways: where text is wanted, text must stand.
    wanted: tuple[type, ...] = (str,) if action.type is None else (str, int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        what = "text (put it in quotes)" if action.type is None else "a single value"
        raise ValueError(f"{where}: must be {what}, got {value!r}")
    return _convert(action, str(value), where)


def _convert(action: argparse.Action, text: str, where: str) -> Any:
    convert = action.type
    try:
        value = convert(text) if callable(convert) else text
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"{where}: {error}") from None
    if action.choices is not None and value not in action.choices:
        raise ValueError(
            f"{where}: must be one of {', '.join(map(str, action.choices))}, got {value!r}"
        )
    return value


def _read_file(path: str, actions: Mapping[str, argparse.Action]) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    by_key = {
        flag.lstrip("-").replace("-", "_"): action
        for action in actions.values()
        if action.dest != "config"
        for flag in action.option_strings or [action.dest]
        if not flag.startswith("--no-")
    }
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, yaml.SafeLoader)
            file.seek(0)
            content = yaml.safe_load(file)
    except OSError as error:
        raise ValueError(f"config {path}: {error.strerror}") from None
    except Exception as error:  # of its own class, or whatever its constructors stumbled over
        raise ValueError(f"config {path}: not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"config {path}: must be a mapping of options to values")
    found: dict[str, Any] = {}
    # The nodes still have a key that stands there twice.
    for name in (key.value for key, _ in root.value):
        value = content.get(name)
        where = f"config {path}: {name}"
        action = by_key.get(str(name).replace("-", "_"))
        if action is None:
            keys = sorted({key_of(each) for each in by_key.values()})
            raise ValueError(f"{where}: there is no such option{_nearest(str(name), keys)}")
        if action.dest in found:
            raise ValueError(f"{where}: set twice")
        found[action.dest] = None if value is None else _from_yaml(action, value, where)
    return found


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"; did you mean {close[0]}?" if close else ""
