"""Faults that engines like this one have had, and the tests that keep them out: docs/cases.md.

``python tests/cases.py`` writes the page anew; tests/python/test_cases.py fails while it is stale.
A test names its cases with ``@pytest.mark.case("API-01")``, a C++ test in a comment in front of it
(``// KVA-05: ...``).
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/cases.md"

# Of what is not there yet: speculative decoding, adapters, more than one device.
NOT_YET = ("SPC", "LOR", "PAR")

_CASE = r"[A-Z]{3}-\d\d"
_CPP_TEST = re.compile(
    rf"((?:^ *//.*\n)+)(?:TEST|TEST_F|TEST_P|TYPED_TEST)\(\s*(\w+),\s*(\w+)\)", re.MULTILINE
)
_HEAD = """# Faults met elsewhere

Each row is a fault that users of other engines have reported. The tests prove that it does not happen here. Level A runs on a CPU with
a small model, level B needs more. Written by `python tests/cases.py` from the tests themselves.

"""


def cases() -> dict[str, tuple[str, str]]:
    """What is known of each case: (level, fault)."""
    lines = (ROOT / "tests/cases.tsv").read_text().splitlines()
    return {case: (level, fault) for case, level, fault in (line.split("\t") for line in lines)}


def tests_of_cases() -> dict[str, list[str]]:
    """The tests that name each case."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests/python").rglob("test_*.py")):
        for case, test in _python_tests(ast.parse(path.read_text())):
            found[case].append(f"{path.relative_to(ROOT)}::{test}")
    for path in sorted((ROOT / "tests/cpp").rglob("*_test.cpp")):
        for comment, suite, test in _CPP_TEST.findall(path.read_text()):
            for case in re.findall(_CASE, comment):
                found[case].append(f"{path.relative_to(ROOT)}::{suite}.{test}")
    return found


def _python_tests(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(
                "pytest.mark.case"
            ):
                for argument in decorator.args:
                    yield ast.literal_eval(argument), node.name


def page() -> str:
    tests = tests_of_cases()
    lines = [_HEAD, "| case | level | fault | tests |\n|---|---|---|---|\n"]
    for case, (level, fault) in cases().items():
        names = "<br>".join(f"`{test}`" for test in tests.get(case, ()))
        if not names:
            names = "not there yet" if case.startswith(NOT_YET) else "none"
        text = fault.replace("|", "\\|")
        lines.append(f"| {case} | {level} | {text} | {names} |\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
