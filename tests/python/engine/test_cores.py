"""Which cores the kernels' threads take."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from vllm_lite import Engine, cores


def threads_of(pid: int) -> list[set[int]]:
    """The affinity of each of a process's threads."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            found.append(os.sched_getaffinity(int(task.name)))
    return found


def test_two_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(8):
        (tmp_path / str(cpu)).write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(cores, "_SIBLINGS", f"{tmp_path}/{{}}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 4, 5, 6})
    assert cores.cores() == [1, 2, 4]
    (tmp_path / "6").unlink()  # what is not known is a core of its own
    assert cores.cores() == [1, 2, 4, 6]


@pytest.mark.skipif(len(cores.cores()) < 2, reason="one core")
def test_a_workers_threads_are_pinned_if_they_have_all_cores(tiny_model: str) -> None:
    here = os.sched_getaffinity(0)
    for num_threads in (1, len(cores.cores())):
        with Engine(
            tiny_model, multiprocess=True, num_threads=num_threads, max_model_len=256
        ) as engine:
            affinities = [
                affinity
                for child in engine.client._processes.children
                for affinity in threads_of(child.process.pid)
            ]
        pinned = [affinity for affinity in affinities if len(affinity) == 1]
        assert here in affinities
        if num_threads == 1:
            assert pinned == []
        else:
            assert sorted(cpu for affinity in pinned for cpu in affinity) == cores.cores()
    assert os.sched_getaffinity(0) == here


def test_an_engine_in_the_callers_process_pins_nothing(tiny_model: str) -> None:
    here = os.sched_getaffinity(0)
    with Engine(tiny_model, max_model_len=256):
        assert all(affinity == here for affinity in threads_of(os.getpid()))
