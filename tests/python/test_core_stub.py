"""_core.pyi says what the module exports: the same names, the same arguments of every function."""

import ast
from pathlib import Path
from types import ModuleType

import pytest

import vllm_lite
from vllm_lite import _core

STUB = ast.parse((Path(vllm_lite.__file__).parent / "_core.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}


def defined(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
    return {name: node for name, node in names.items() if not name.startswith("_")}


def exported(namespace: type | ModuleType) -> set[str]:
    return {name for name in vars(namespace) if not name.startswith("_")}


def arguments(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    """(name, keyword only) of each argument but ``self``."""
    positional = [(arg.arg, False) for arg in function.args.posonlyargs + function.args.args]
    return [a for a in positional if a[0] != "self"] + [
        (arg.arg, True) for arg in function.args.kwonlyargs
    ]


def runtime_arguments(function: object) -> list[tuple[str, bool]]:
    signature = (function.__doc__ or "").splitlines()[0]
    parsed = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    return arguments(parsed)


def test_the_module_exports_what_the_stub_names() -> None:
    assert set(defined(STUB.body)) == exported(_core)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_class_has_what_the_stub_names(name: str) -> None:
    if issubclass(getattr(_core, name), Exception):
        return
    assert set(defined(CLASSES[name].body)) == exported(getattr(_core, name))


@pytest.mark.parametrize("name", [*sorted(CLASSES), "module"])
def test_functions_take_the_arguments_that_the_stub_names(name: str) -> None:
    body = STUB.body if name == "module" else CLASSES[name].body
    namespace = _core if name == "module" else getattr(_core, name)
    for node in body:
        if not isinstance(node, ast.FunctionDef) or node.decorator_list:
            continue  # properties; static methods below
        special = node.name.startswith("__")
        if special and (node.name != "__init__" or name.endswith("Error")):
            continue
        assert runtime_arguments(getattr(namespace, node.name)) == arguments(node), node.name


def test_static_methods_too() -> None:
    create = defined(CLASSES["ShmRing"].body)["create"]
    assert isinstance(create, ast.FunctionDef)
    assert runtime_arguments(_core.ShmRing.create) == arguments(create)
