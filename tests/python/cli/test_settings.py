"""Flags, YAML file, environment and defaults: who wins, and what is refused."""

import itertools
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_lite
from cli.options_page import PAGE, render
from vllm_lite.arguments import engine_config, serve_parser, server_options
from vllm_lite.settings import (
    OTHER_VARIABLES,
    Settings,
    json_object,
    read,
    unknown_variables,
    variable_of,
)
from waiting import PATIENCE

PACKAGE = str(Path(vllm_lite.__file__).parents[1])


def settings(*flags: str, **environment: str) -> Settings:
    return read(serve_parser(), list(flags), environment)


def written(directory: Path, text: str) -> str:
    path = directory / "config.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.case("CFG-01")
@pytest.mark.parametrize("sources", list(itertools.product([False, True], repeat=3)))
def test_flag_wins_over_file_over_environment_over_default(
    tmp_path: Path, sources: tuple[bool, bool, bool]
) -> None:
    flag, file, variable = sources
    path = written(tmp_path, "port: 2\nmax-num-seqs: 20\n" if file else "max_num_seqs: 20\n")
    flags = [["--config", path], *([["--port", "3"]] if flag else [])]
    environment = {"VLLM_LITE_PORT": "1"} if variable else {}
    expected, source = next(
        found
        for given, found in zip(
            (flag, file, variable, True),
            ((3, "flag"), (2, "file"), (1, "environment"), (8000, None)),
            strict=True,
        )
        if given
    )
    for order in itertools.permutations(flags):
        made = settings(*itertools.chain(*order), **environment)
        assert made.values["port"] == expected
        assert made.sources.get("port") == source
        assert made.values["max_num_seqs"] == 20


@pytest.mark.case("CFG-01")
def test_every_option_can_come_from_each_source(tmp_path: Path) -> None:
    """One file, one environment and one command line say the same of every option there is."""
    parser = serve_parser()
    lines, environment, flags = [], {}, []
    expected: dict[str, Any] = {}
    for action in parser.settable():
        if action.dest == "config":
            continue
        key = (action.option_strings or [action.dest])[0].lstrip("-")
        if type(action).__name__ == "BooleanOptionalAction":
            value: Any = not action.default
            yaml, text, flag = str(value).lower(), str(value).lower(), [f"--{key}"]
            if not value:
                flag = [f"--no-{key}"]
        elif action.nargs == "+" or type(action).__name__ == "_AppendAction":
            value, yaml, text = ["a", "b"], "[a, b]", "a b"
            flag = [f"--{key}", "a", "b"] if action.nargs else [f"--{key}", "a", f"--{key}", "b"]
        elif action.choices:
            value = yaml = text = list(action.choices)[-1]
            flag = [f"--{key}", value]
        elif action.type is None:
            value = yaml = text = "name"
            flag = [f"--{key}", "name"] if action.option_strings else ["name"]
        elif action.type is json_object:
            value, yaml, text = {"a": [1]}, "{a: [1]}", '{"a": [1]}'
            flag = [f"--{key}", text]
        else:
            value, yaml, text, flag = 7, "7", "7", [f"--{key}", "7"]
        expected[action.dest] = value
        lines.append(f"{key}: {yaml}")
        environment[variable_of(action)] = text
        flags += flag
    assert len(expected) > 30
    path = written(tmp_path, "\n".join(lines))
    model = expected.pop("model")
    for made in (settings("--config", path), settings(**environment)):
        assert made.values["model"] == model
        assert {name: made.values[name] for name in expected} == expected
    names = flags.index("name")
    made = settings(flags[names], *flags[:names], *flags[names + 1 :])
    assert {name: made.values[name] for name in expected} == expected
    assert unknown_variables(parser, environment) == []


@pytest.mark.case("CFG-01")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-nm-seqs: 5", "max-nm-seqs: there is no such option; did you mean max-num-seqs?"),
        ("prot: 1", "prot: there is no such option; did you mean port?"),
        ("config: other.yaml", "config: there is no such option"),
        ("help: true", "help: there is no such option"),
        ("5: true", "5: there is no such option"),
        ("port: 1\nport: 2", "port: set twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "max_num_seqs: set twice"),
        ("port: true", "port: must be a single value, got True"),
        ("port: [1]", r"port: must be a single value, got \[1\]"),
        ("port: 70000", "port: not a port from 0 to 65535"),
        ("max-num-seqs: many", "max-num-seqs: .*'many'"),
        ("access-log: 'yes'", "access-log: must be true or false, got 'yes'"),
        ("prefix-caching: 1", "prefix-caching: must be true or false, got 1"),
        ("dtype: float8", "dtype: must be one of auto, float32, bfloat16, float16, got 'float8'"),
        ("api-key: 0123", r"api-key: must be text \(put it in quotes\), got 83"),
        ("served-model-name: [a, 5]", "served-model-name: must be text"),
        ("kv-cache-memory: lots", "kv-cache-memory: not a number of bytes"),
        ("speculative-config: '{'", "speculative-config: not JSON"),
        ("speculative-config: '" + 5000 * '{"a":' + "'", "speculative-config: not JSON"),
        ("speculative-config: '[1]'", r"speculative-config: must be a JSON object, got '\[1\]'"),
        ("speculative-config: [1]", r"speculative-config: must be a single value, got \[1\]"),
        ("- port", "must be a mapping"),
        ("port: {", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("port: 2020-13-45", "not valid YAML"),
        ("port: !!timestamp x", "not valid YAML"),
        ("port: " + "9" * 5000, "port: |not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_what_a_file_may_not_say_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings("--config", written(tmp_path, text))


def test_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config /nowhere\.yaml: No such file"):
        settings("--config", "/nowhere.yaml")
    assert settings("--config", written(tmp_path, "# nothing\n")).sources.keys() == {"config"}
    path = written(tmp_path, "port: null\nmax-model-len:\n")
    assert settings("--config", path).values["port"] == 8000
    assert settings(VLLM_LITE_CONFIG=written(tmp_path, "port: 5")).values["port"] == 5


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VLLM_LITE_PORT", "x", "VLLM_LITE_PORT: not a port"),
        ("VLLM_LITE_ACCESS_LOG", "perhaps", "VLLM_LITE_ACCESS_LOG: must be true or false"),
        ("VLLM_LITE_DTYPE", "int3", "VLLM_LITE_DTYPE: must be one of"),
    ],
)
def test_bad_variable_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**{name: value})


@pytest.mark.parametrize("word", ["true", "YES", "on", "1", "False", "no", "off", "0"])
def test_booleans_of_the_environment(word: str) -> None:
    value = settings(VLLM_LITE_ACCESS_LOG=word).values["access_log"]
    assert value is (word.lower() in ("true", "yes", "on", "1"))


def test_variable_that_nothing_reads_is_told() -> None:
    environment = {"VLLM_LITE_MAX_NUM_SEQ": "4", "PATH": "/bin", **dict.fromkeys(OTHER_VARIABLES)}
    assert unknown_variables(serve_parser(), environment) == [
        "VLLM_LITE_MAX_NUM_SEQ is set, and nothing reads it; did you mean VLLM_LITE_MAX_NUM_SEQS?"
    ]


def test_description_has_every_value_and_no_key() -> None:
    made = settings("--api-key", "hunter2", "--port", "5", VLLM_LITE_MAX_NUM_SEQS="9")
    text = made.describe()
    assert "hunter2" not in text and "api_keys=(hidden) (flag)" in text
    assert "port=5 (flag)" in text and "max_num_seqs=9 (environment)" in text
    assert all(f"{name}=" in text for name in made.values)


def test_values_become_the_engines_and_the_servers_options() -> None:
    values = settings("m", "--no-prefix-caching", "--api-key", "k", "--http-threads", "3").values
    config, options = engine_config(values), server_options(values)
    assert (config.model, config.enable_prefix_caching) == ("m", False)
    assert (options.api_keys, options.threads) == (("k",), 3)
    assert engine_config(settings("--enable-prefix-caching").values).enable_prefix_caching
    assert engine_config(settings().values).model == "smollm2"


def test_page_of_options_is_what_the_parser_says() -> None:
    assert PAGE.read_text() == render(), "run python tests/python/cli/options_page.py"


def serve(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_lite.cli", "serve", *arguments],
        env={"PYTHONPATH": PACKAGE, "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.case("CFG-03")
def test_port_in_use_is_noticed_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # A model that is not there would be the error if it were looked at first.
        process = serve(str(tmp_path / "no_model"), "--port", str(port))
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert f"port {port}" in errors and "no_model" not in errors


@pytest.mark.case("CFG-01")
def test_effective_configuration_is_logged_without_keys(tmp_path: Path, tiny_model: str) -> None:
    path = written(tmp_path, "api-key: hunter2\nmax-num-seqs: 3\n")
    process = serve(tiny_model, "--port", "0", "--config", path)
    assert process.stderr is not None
    configuration = next(line for line in process.stderr if "configuration:" in line)
    next(line for line in process.stderr if "starting" in line)  # from here on it heeds signals
    process.terminate()
    _, rest = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, rest
    assert "max_num_seqs=3 (file)" in configuration and "port=0 (flag)" in configuration
    assert "hunter2" not in configuration + rest
