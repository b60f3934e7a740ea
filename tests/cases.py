"""Faults that engines like this one have had, and the tests that keep them out: docs/cases.md.

``python tests/cases.py`` writes the page anew; tests/python/test_cases.py fails while it is stale.
A test names its cases with ``@pytest.mark.case("API-01")``, a C++ test in a comment in front of it
(``// KVA-05: ...``).
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/cases.md"

# Of what is not there yet: adapters, more than one device, Gemma.
NOT_YET = ("LOR", "PAR", "NUM-15")

_CASE = r"[A-Z]{3}-\d\d"
_CPP_TEST = re.compile(
    r"((?:^ *//.*\n)+)(?:TEST|TEST_F|TEST_P|TYPED_TEST)\(\s*(\w+),\s*(\w+)\)", re.MULTILINE
)
_HEAD = """# Faults met elsewhere

Each row is a fault that users of other engines have reported, and the tests that prove that it
does not happen here. Level A runs on a CPU with a small model, level B needs more. Written by
`python tests/cases.py` from the tests themselves.
"""


@dataclass(slots=True)
class Case:
    theme: str
    level: str
    fault: str


def cases() -> dict[str, Case]:
    """By id, in the file's order: a line per case, the themes' names in lines of their own."""
    found = {}
    theme = ""
    for line in (ROOT / "tests/cases.tsv").read_text().splitlines():
        if line.startswith("# "):
            theme = line.removeprefix("# ")
        else:
            case, level, fault = line.split("\t")
            found[case] = Case(theme, level, fault)
    return found


def tests_of_cases() -> dict[str, list[str]]:
    """The tests that name each case."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests/python").rglob("test_*.py")):
        text = path.read_text()
        if "mark.case(" not in text:
            continue
        for case, test in _python_tests(ast.parse(text)):
            found[case].append(f"{path.relative_to(ROOT)}::{test}")
    for path in sorted((ROOT / "tests/cpp").rglob("*_test.cpp")):
        for comment, suite, test in _CPP_TEST.findall(path.read_text()):
            for case in re.findall(_CASE, comment):
                found[case].append(f"{path.relative_to(ROOT)}::{suite}.{test}")
    return found


def _python_tests(module: ast.Module) -> Iterator[tuple[str, str]]:
    """(case, test) of the module's functions."""
    for node in module.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            for call in ast.walk(decorator):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.case":
                    for argument in call.args:
                        yield ast.literal_eval(argument), node.name


def page() -> str:
    tests = tests_of_cases()
    lines = [_HEAD]
    theme = ""
    for name, case in cases().items():
        if case.theme != theme:
            theme = case.theme
            lines.append(f"\n## {theme}\n\n| case | level | fault | tests |\n|---|---|---|---|\n")
        proof = "<br>".join(f"`{test}`" for test in tests.get(name, ()))
        if not proof:
            proof = "not there yet" if name.startswith(NOT_YET) else "none"
        fault = case.fault.replace("|", "\\|")
        lines.append(f"| {name} | {case.level} | {fault} | {proof} |\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
