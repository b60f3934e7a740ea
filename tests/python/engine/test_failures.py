"""A step that fails, a queue that is full, an interrupt: who is harmed and who goes on."""

import pytest

from engine.calls import GREEDY, PROMPTS, drain, drained_ids, greedy, ids_of, run
from vllm_lite import LLM, Engine, LLMEngine


@pytest.mark.case("WRK-03")
def test_a_failed_step_ends_its_requests_and_others_go_on(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_lite.worker.worker import Worker

    launch = Worker.launch
    calls = 0

    def failing(worker: Worker, plan: memoryview) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("no room for activations")
        return launch(worker, plan)

    expected = drained_ids(engine, "unharmed")
    monkeypatch.setattr(Worker, "launch", failing)
    engine.add_request("harmed", "The", greedy(n=2, temperature=1))
    outputs = []
    while not outputs or not outputs[-1].finished:
        outputs += engine.step()
        if len(outputs) == 1:
            assert outputs[0].error is None
    last = outputs[-1]
    assert last.error == "MemoryError: no room for activations"
    assert [sample.finish_reason for sample in last.outputs] == ["error", "error"]
    assert 1 <= len(last.outputs[0].token_ids) <= 2  # what had come before is kept
    assert "no room for activations" in caplog.text
    assert drained_ids(engine, "unharmed") == expected
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)


@pytest.mark.case("WRK-03")
def test_llm_returns_the_others_when_one_fails(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_lite.worker.worker import Worker

    launch = Worker.launch
    monkeypatch.setattr(llm.engine.config, "max_num_waiting", 1)  # so that they run one by one
    calls = 0

    def failing(worker: Worker, plan: memoryview) -> object:
        nonlocal calls
        calls += 1
        if calls == 14:
            raise RuntimeError("one step fails")
        return launch(worker, plan)

    expected = ids_of(run(llm, PROMPTS[:3]))
    monkeypatch.setattr(Worker, "launch", failing)
    outputs = run(llm, PROMPTS[:3])
    assert [output.error for output in outputs] == [None, "RuntimeError: one step fails", None]
    assert ids_of(outputs)[::2] == expected[::2]
    assert outputs[1].outputs[0].finish_reason == "error"


def test_full_queue_is_an_error_of_the_whole_request(tiny_model: str) -> None:
    with Engine(tiny_model, num_threads=1, max_num_seqs=1, max_num_waiting=2) as engine:
        for name in ("a", "b", "c", "d"):
            engine.add_request(name, "The", greedy(n=1 if name != "d" else 2))
        outputs = {name: made[-1] for name, made in drain(engine).items()}
        assert set(outputs) == {"a", "b", "c", "d"}
        failed = {name for name, output in outputs.items() if output.error}
        assert "d" in failed and "a" not in failed
        for name in failed:
            assert "waiting queue is full (2 sequences)" in outputs[name].error
            assert {sample.finish_reason for sample in outputs[name].outputs} == {"error"}


def test_interrupt_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_lite import _core
    from vllm_lite.worker.worker import Worker

    expected = ids_of(run(llm, PROMPTS[:2]))
    launch = Worker.launch
    for when in ("before", "after"):
        calls = 0

        def interrupted(worker: Worker, plan: memoryview, when: str = when) -> object:
            nonlocal calls
            calls += 1
            result = launch(worker, plan) if when == "after" or calls != 3 else None
            if calls == 3:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(Worker, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(llm, PROMPTS[:4])
        monkeypatch.setattr(Worker, "launch", launch)
        assert not llm.engine.has_unfinished_requests()
        assert ids_of(run(llm, PROMPTS[:2])) == expected
        assert llm.engine.stats().kv_used_blocks == 0
    # An interrupt may also come between two lines, while a step is planned and not yet run.
    core: _core.EngineCore = llm.engine.client._core
    llm.engine.add_request("x", "The", GREEDY)
    assert core.begin_step() is not None
    with pytest.raises(_core.InternalError):
        llm.engine.step()  # plans twice, which fails, and the step is given up
    llm.engine.abort_request("x")
    assert ids_of(run(llm, PROMPTS[:2])) == expected
