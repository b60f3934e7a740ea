"""Who may include and import whom: the arrows of docs/architecture.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import PATIENCE

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"

# Folder -> folders whose headers it may include. cache/ has two halves: host part and kernels; ops/
# knows the kernels alone.
ALLOWED = {
    "core": {"core"},
    "cache": {"cache", "core"},
    "scheduler": {"scheduler", "cache", "core"},
    "engine": {"engine", "scheduler", "cache", "ipc", "core"},
    "ipc": {"ipc", "core"},
    "attention": {"attention", "core"},
    "ops": {"ops", "cache", "core"},
    "bindings": {"bindings", "engine", "scheduler", "cache", "ipc", "attention", "ops", "core"},
}
CACHE_KERNEL_HEADERS = {"cache/store_kv.h", "cache/kv_slot.h"}


def sources(folder: str) -> list[Path]:
    return [p for p in (CSRC / folder).rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]


def includes(path: Path) -> list[tuple[str, bool]]:
    """(what is included, whether in angle brackets)"""
    found = re.findall(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', path.read_text(), re.MULTILINE)
    return [(name, bracket == "<") for bracket, name in found]


def test_every_folder_has_its_rule() -> None:
    assert {path.name for path in CSRC.iterdir() if path.is_dir()} == set(ALLOWED)


@pytest.mark.parametrize("folder", ALLOWED)
def test_folder_includes_only_what_it_may(folder: str) -> None:
    assert sources(folder)
    for path in sources(folder):
        for name, angled in includes(path):
            if angled:
                if folder != "bindings":
                    assert not re.match(r"(torch|ATen|c10|pybind11|Python)", name), (
                        f"{path}: {name}"
                    )
                continue
            assert name.split("/")[0] in ALLOWED[folder], f"{path} includes {name}"
            if folder in {"scheduler", "engine"}:
                assert name not in CACHE_KERNEL_HEADERS, f"{path} includes the kernel header {name}"
            if folder == "ops" and name.startswith("cache/"):
                assert name in CACHE_KERNEL_HEADERS, f"{path} includes the host header {name}"


def test_cache_host_part_and_kernels_do_not_include_each_other() -> None:
    kernels = {"store_kv", "copy_blocks", "swap_blocks", "kv_slot"}
    for path in sources("cache"):
        is_kernel = any(path.name.startswith(name) for name in kernels)
        for name, _ in includes(path):
            if name.startswith("cache/"):
                assert (name in CACHE_KERNEL_HEADERS) == is_kernel, f"{path} includes {name}"


def test_libraries_link_only_what_their_folder_may_include() -> None:
    folder_of = {}
    links = {}
    for folder in ALLOWED:
        text = (CSRC / folder / "CMakeLists.txt").read_text()
        for name in re.findall(r"vl_library\((\w+)\)", text):
            folder_of[name] = folder
        for name, linked in re.findall(r"target_link_libraries\((\w+) \w+ ([^)]*)\)", text):
            links[name] = [word for word in linked.split() if word.startswith("vl_")]
    assert set(folder_of.values()) == set(ALLOWED) - {"bindings"}
    for name, linked in links.items():
        if name not in folder_of:  # a module of bindings/, which may link everything
            continue
        for other in linked:
            assert folder_of[other] in ALLOWED[folder_of[name]], (name, other)


def test_no_pickle_in_the_package() -> None:
    pattern = re.compile(r"\b(pickle|cloudpickle|marshal|dill|shelve)\b|torch\.load\b")
    for path in (ROOT / "python").rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("#")[0]
            if re.search(r"^\s*(import|from)\b|torch\.load", code):
                assert not pattern.search(code), f"{path}:{number}: {line}"


def test_front_end_and_engine_core_import_neither_torch_nor_numpy() -> None:
    """Each in an interpreter of its own, all at once: they take most of their time to start."""
    modules = [
        "vllm_lite.server.__main__",
        "vllm_lite.engine_core",
        "vllm_lite.serve",
        "vllm_lite.async_engine",
        "vllm_lite.engine",
        "vllm_lite",
    ]
    heavy = "','.join(m for m in ('torch', 'transformers', 'numpy') if m in sys.modules)"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"import sys, {module}; sys.exit({heavy} or 0)"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for module in modules
    ]
    errors = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    for module, process, error in zip(modules, processes, errors, strict=True):
        assert process.returncode == 0, f"{module} imports {error}"
