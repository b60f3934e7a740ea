"""What an engine leaves in the program that used it, and what it leaves behind when that ends."""

import gc
import os
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import vllm_lite
from leftovers import Leftovers
from vllm_lite import LLM, SamplingParams
from waiting import PATIENCE, wait_until

PACKAGE = str(Path(vllm_lite.__file__).parents[1])

USE_LLM = """
from vllm_lite import LLM, SamplingParams
llm = LLM(MODEL, num_threads=1)
made = llm.generate("The quick", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
assert made[0].outputs[0].token_ids
"""
USE_PROCESSES = """
from vllm_lite import Engine, SamplingParams
engine = Engine(MODEL, multiprocess=True, num_threads=1)
engine.add_request("a", "The quick", SamplingParams(max_tokens=None, ignore_eos=True))
while not engine.step():
    pass
"""
USE_ASYNC = """
import asyncio
from vllm_lite import AsyncLLMEngine, SamplingParams
engine = AsyncLLMEngine(MODEL, num_threads=1)
async def main():
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    async for output in engine.generate("The quick", params):
        return
asyncio.run(main())
"""
ENDS = {
    "at the end": ("", 0),
    "by exception": ("raise RuntimeError('the script fails')", 1),
    "by sys.exit": ("import sys; sys.exit(3)", 3),
    "by sys.exit in a thread": (
        "import sys, threading\n"
        "thread = threading.Thread(target=sys.exit, args=(3,))\nthread.start(); thread.join()",
        0,
    ),
    "by kill -9": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
}


def run_script(
    text: str, model: str, left: Leftovers, **options: object
) -> subprocess.CompletedProcess[str]:
    script = Path(left.environment["TMPDIR"]) / "script.py"
    script.write_text(f"MODEL = {model!r}\n" + textwrap.dedent(text))
    environment = {**left.environment, "PYTHONPATH": PACKAGE}
    return subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        **options,
    )


CASES = [
    (USE_PROCESSES, "at the end"),
    (USE_PROCESSES, "by exception"),
    (USE_PROCESSES, "by kill -9"),
    (USE_ASYNC, "by sys.exit"),
    (USE_LLM, "by sys.exit in a thread"),
]
NAMES = {USE_LLM: "LLM", USE_PROCESSES: "Engine in processes", USE_ASYNC: "AsyncLLMEngine"}


@pytest.mark.case("SHD-03")
@pytest.mark.parametrize(("use", "end"), CASES, ids=[f"{NAMES[u]}, {e}" for u, e in CASES])
def test_script_without_main_guard_leaves_nothing(tiny_model: str, use: str, end: str) -> None:
    """Children are not started by importing the script again, and end with it."""
    left = Leftovers()
    last_line, code = ENDS[end]
    done = run_script(f"print('begun')\n{use}\n{last_line}\n", tiny_model, left)
    assert done.returncode == code, done.stderr
    assert done.stdout == "begun\n"
    left.assert_none()
    if code == 0 and use is not USE_LLM:
        assert "Traceback" not in done.stderr


def test_children_find_the_package_as_their_parent_did(tiny_model: str, tmp_path: Path) -> None:
    """By a path that the program set itself, from a directory full of files with others' names."""
    left = Leftovers()
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("json.py", "msgspec.py", "torch.py", "vllm_lite.py"):
        (trap / name).write_text("raise SystemExit('imported from the current directory')")
    link = tmp_path / "link"
    link.symlink_to(PACKAGE)
    left.environment.pop("PYTHONPATH", None)
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, 'link')\n"
        f"import vllm_lite\nos.chdir({str(trap)!r})\nMODEL = {tiny_model!r}\n{USE_PROCESSES}"
    )
    done = subprocess.run(
        [sys.executable, "-P", str(script)],
        env=left.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    left.assert_none()


def test_fork_before_use_works_and_a_fork_leaves_its_parents_engine_alone(tiny_model: str) -> None:
    left = Leftovers()
    text = """
    import os, sys
    from vllm_lite import LLM, Engine, SamplingParams
    GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def in_fork(work):
        pid = os.fork()
        if pid == 0:
            work()
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0

    def use_llm():
        with LLM(MODEL, num_threads=1) as llm:
            assert len(llm.generate("The", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4

    in_fork(use_llm)
    engine = Engine(MODEL, multiprocess=True, num_threads=1)
    in_fork(lambda: None)        # ends with a copy of the engine
    in_fork(engine.close)        # closes its copy
    engine.add_request("a", "The", GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs[-1].outputs[0].token_ids) == 4
    """
    done = run_script(text, tiny_model, left)
    assert done.returncode == 0, done.stderr
    left.assert_none()


def test_use_in_a_fork_raises_where_it_would_hang(tiny_model: str) -> None:
    left = Leftovers()
    text = """
    import os
    from vllm_lite import LLM, SamplingParams
    GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def generate(llm):
        return llm.generate("The quick brown fox " * 20, GREEDY, use_tqdm=False)[0].outputs

    def refused_in_fork(work, *words):
        pid = os.fork()
        if pid == 0:
            try:
                work()
            except RuntimeError as error:
                missing = [word for word in words if word not in str(error)]
                os._exit(3 if missing else 0)
            os._exit(4)
        assert os.waitpid(pid, 0)[1] == 0

    with LLM(MODEL, num_threads=2) as llm:
        expected = generate(llm)
        me = str(os.getpid())
        refused_in_fork(lambda: generate(llm), "belongs to process " + me, "fork")
        refused_in_fork(lambda: LLM(MODEL), "forked from process " + me, "multiprocess", "spawn")
        assert generate(llm) == expected
    """
    done = run_script(text, tiny_model, left)
    assert done.returncode == 0, done.stderr
    left.assert_none()


def test_ctrl_c_ends_a_script_and_its_children_quietly(tiny_model: str) -> None:
    left = Leftovers()
    text = f"""
    import os, signal, sys, threading, time
    exec({USE_PROCESSES!r})
    # It gives nothing more, so that step() waits when the signal comes. Between two calls of
    # step() the interrupt would be the script's own.
    worker = engine.client._processes.children[0].process.pid
    os.kill(worker, signal.SIGSTOP)

    def interrupt():
        looks = 0
        while looks < 10:
            waits = sys._current_frames()[threading.main_thread().ident].f_code.co_name == "poll"
            looks = looks + 1 if waits else 0
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    try:
        threading.Thread(target=interrupt).start()
        while True:
            engine.step()
    except KeyboardInterrupt:
        os.kill(worker, signal.SIGCONT)
        assert not engine.has_unfinished_requests()
        engine.add_request("c", "The quick", SamplingParams(max_tokens=4, ignore_eos=True))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert len(outputs[-1].outputs[0].token_ids) == 4
        print("interrupted and usable")
    """
    done = run_script(text, tiny_model, left)
    assert (done.returncode, done.stdout) == (0, "interrupted and usable\n"), done.stderr
    left.assert_none()


def resources() -> set[tuple[str, str]]:
    """Threads, descriptors and children of this process: (kind, which). What tests before have
    left may end at any time, so that numbers do not compare. A thread that has been joined is
    still there for a moment.
    """
    found = {("thread", name) for name in os.listdir("/proc/self/task")}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of listdir
            found.add(("descriptor", f"{name} {os.readlink(f'/proc/self/fd/{name}')}"))
    return found | {("child", str(child.pid)) for child in psutil.Process().children()}


@pytest.mark.case("SHD-05")
def test_five_engines_one_after_another_leave_the_program_as_it_was(tiny_model: str) -> None:
    """With and without close()."""

    def use(close: bool) -> list[int]:
        llm = LLM(tiny_model, num_threads=1)
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(["The quick"] * 32, params, use_tqdm=False)
        if close:
            llm.close()
        del llm
        gc.collect()
        return outputs[0].outputs[0].token_ids

    first = use(close=True)
    use(close=False)
    before, memory = resources(), psutil.Process().memory_info().rss
    for cycle in range(5):
        assert use(close=cycle % 2 == 0) == first
    wait_until(lambda: resources() <= before)
    # An arena or a model that stayed would be 10 MB or more each time.
    assert psutil.Process().memory_info().rss - memory < 20 << 20


@pytest.mark.case("SHD-05")
def test_five_engines_in_processes_leave_no_descriptor_thread_or_child(tiny_model: str) -> None:
    before = resources()
    for cycle in range(2):
        engine = vllm_lite.Engine(tiny_model, multiprocess=True, num_threads=1)
        engine.add_request("a", "The", SamplingParams(max_tokens=4))
        engine.step()
        if cycle == 0:
            engine.close()
        del engine
        gc.collect()
    wait_until(lambda: resources() <= before)


@pytest.mark.parametrize("multiprocess", [False, True])
def test_failed_start_leaves_nothing_and_says_why(
    tiny_model: str, tmp_path: Path, multiprocess: bool
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in os.listdir(tiny_model):
        (broken / name).write_bytes((Path(tiny_model) / name).read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    before = resources()
    with pytest.raises((ValueError, vllm_lite.errors.EngineDeadError), match=r"model\.safetensors"):
        vllm_lite.Engine(str(broken), multiprocess=multiprocess, num_threads=1)
    gc.collect()
    wait_until(lambda: resources() <= before)


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, vllm_lite, vllm_lite.cli\n"
        "heavy = {'torch', 'numpy', 'transformers', 'fastapi', 'uvicorn', 'zmq'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": PACKAGE}, check=True
    )
