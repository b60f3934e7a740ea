"""Engines that are closed, made in threads, and several at once."""

import threading

import pytest

from engine.calls import GREEDY, PROMPTS, drain, drained_ids, greedy, ids_of, run
from vllm_lite import LLM, Engine
from vllm_lite.errors import EngineDeadError
from waiting import wait_until


@pytest.mark.case("SHD-05")
def test_use_after_close_raises_and_close_twice_does_not(tiny_model: str) -> None:
    llm = LLM(tiny_model, num_threads=1)
    run(llm, "The")
    llm.close()
    llm.close()
    for call in (
        lambda: run(llm, "The"),
        lambda: llm.engine.add_request("a", "The", GREEDY),
        lambda: llm.engine.step(),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    llm.engine.abort_request("a")
    assert llm.engine.stats().num_running == 0


def test_closing_in_another_thread_ends_generate(tiny_model: str) -> None:
    llm = LLM(tiny_model, num_threads=1)

    def close() -> None:
        wait_until(llm.engine.has_unfinished_requests)
        llm.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(EngineDeadError, match="closed while it was generating"):
        llm.generate("The", greedy(max_tokens=None), use_tqdm=False)
    closer.join()
    with pytest.raises(RuntimeError, match="closed"):
        run(llm, "The")


def test_two_engines_at_once_do_not_disturb_each_other(llm: LLM, tiny_model: str) -> None:
    expected = ids_of(run(llm, PROMPTS))
    with LLM(tiny_model, num_threads=1, max_num_batched_tokens=8) as other:
        assert ids_of(run(other, PROMPTS)) == expected
        assert ids_of(run(llm, PROMPTS)) == expected
    assert ids_of(run(llm, PROMPTS)) == expected


def test_engine_made_in_a_thread_and_used_from_several(tiny_model: str) -> None:
    made: list[LLM] = []
    maker = threading.Thread(target=lambda: made.append(LLM(tiny_model, num_threads=1)))
    maker.start()
    maker.join()
    expected = ids_of(run(made[0], PROMPTS))
    results: dict[int, list[list[int]]] = {}

    def work(index: int) -> None:
        results[index] = ids_of(run(made[0], PROMPTS))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), expected)
    made[0].close()


def test_multiprocess_engine_gives_the_same_tokens(llm: LLM, tiny_model: str) -> None:
    expected = run(llm, PROMPTS, greedy(logprobs=2))
    with Engine(tiny_model, multiprocess=True, num_threads=1, max_model_len=256) as engine:
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, greedy(logprobs=2))
        outputs = drain(engine)
        for index, output in enumerate(expected):
            here, there = output.outputs[0], outputs[str(index)][-1].outputs[0]
            assert (there.token_ids, there.text) == (here.token_ids, here.text)
            # Torch may add up in another order when other rows share the step.
            assert there.cumulative_logprob == pytest.approx(here.cumulative_logprob, abs=1e-3)
        engine.add_request("x", "The", greedy(max_tokens=200))
        engine.step()
        engine.abort_request("x")
        assert drained_ids(engine, "y") == ids_of(run(llm, "The quick"))[0]
        pids = [child.process.pid for child in engine.client._processes.children]
        assert len(pids) == 2
    assert all(child.process.poll() is not None for child in engine.client._processes.children)
