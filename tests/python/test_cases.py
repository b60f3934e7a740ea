"""docs/cases.md says which tests prove which cases."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cases", Path(__file__).parents[1] / "cases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh(table: ModuleType) -> None:
    assert table.PAGE.read_text() == table.page(), "run python tests/cases.py"


def test_tests_name_known_cases(table: ModuleType) -> None:
    assert set(table.tests_of_cases()) <= set(table.cases())


def test_every_case_has_a_test(table: ModuleType) -> None:
    tests = table.tests_of_cases()
    untested = [
        name
        for name, case in table.cases().items()
        if case.level == "A" and name not in tests and not name.startswith(table.NOT_YET)
    ]
    assert untested == []
