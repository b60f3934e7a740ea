"""``AsyncLLMEngine`` on a tiny random model: many requests, and every way to leave one."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

import pytest

from tiny_model import MAX_POSITIONS, VOCAB_SIZE
from vllm_lite import (
    AsyncEngineArgs,
    AsyncLLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from vllm_lite.errors import EngineDeadError, QueueFullError
from waiting import PATIENCE

PROMPTS = ["The quick", "def f(x):", "Größe", "東京", "lazy dog, and", "it is", "12345", "café"]


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **options})


# Runs for half a minute unless somebody ends it.
ENDLESS = greedy(max_tokens=None)


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[AsyncLLMEngine]:
    made = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(model=tiny_model, num_threads=1, max_num_seqs=16, max_num_waiting=24)
    )
    yield made
    made.close()


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


async def wait_idle(engine: AsyncLLMEngine) -> None:
    """Until the engine core itself says that it holds nothing."""

    def is_idle() -> bool:
        stats = engine.stats()
        return (stats.num_running, stats.num_waiting, stats.kv_used_blocks) == (0, 0, 0)

    async with asyncio.timeout(PATIENCE):
        await engine.drain()
    await until(is_idle)
    assert not engine.engine.has_unfinished_requests()


def num_steps(engine: AsyncLLMEngine) -> int:
    return engine.engine._core_stats.num_steps


def test_concurrent_requests_equal_their_solo_runs(engine: AsyncLLMEngine) -> None:
    async def main() -> None:
        alone = [(await collect(engine.generate(p, greedy())))[-1].outputs[0] for p in PROMPTS]
        together = await asyncio.gather(
            *(collect(engine.generate(p, greedy(), f"r{i}")) for i, p in enumerate(PROMPTS))
        )
        for index, (outputs, expected) in enumerate(zip(together, alone, strict=True)):
            assert {output.request_id for output in outputs} == {f"r{index}"}
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[-1].outputs[0].token_ids == expected.token_ids
            assert outputs[-1].outputs[0].text == expected.text
        await wait_idle(engine)

    asyncio.run(main())


@pytest.mark.case("NSA-01")
def test_n_samples_come_as_consistent_streams(engine: AsyncLLMEngine) -> None:
    async def main() -> None:
        options = {"n": 2, "temperature": 1.0, "seed": 4}
        delta = greedy(**options, output_kind=RequestOutputKind.DELTA)
        final = greedy(**options, output_kind=RequestOutputKind.FINAL_ONLY)
        deltas = await collect(engine.generate("The", delta))
        (whole,) = await collect(engine.generate("The", final))
        cumulative = await collect(engine.generate("The", greedy(**options)))
        assert cumulative[-1].outputs == whole.outputs
        first, second = whole.outputs
        assert (first.index, second.index) == (0, 1) and first.token_ids != second.token_ids
        for sample in whole.outputs:
            parts = [s for o in deltas for s in o.outputs if s.index == sample.index]
            assert "".join(part.text for part in parts) == sample.text
            assert [t for part in parts for t in part.token_ids] == sample.token_ids
            assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]

    asyncio.run(main())


async def leave_by_break(engine: AsyncLLMEngine) -> None:
    async for output in engine.generate("The", ENDLESS):
        if len(output.outputs[0].token_ids) >= 2:
            break


async def leave_by_deleting(engine: AsyncLLMEngine) -> None:
    outputs = engine.generate("The", ENDLESS)
    await anext(outputs)
    del outputs


async def leave_by_closing_from_another_task(engine: AsyncLLMEngine) -> None:
    outputs = engine.generate("The", ENDLESS)
    await anext(outputs)
    await asyncio.create_task(outputs.aclose())


async def leave_by_cancel_while_waiting(engine: AsyncLLMEngine) -> None:
    task = asyncio.create_task(collect(engine.generate("The", ENDLESS)))
    while not engine.engine.has_unfinished_requests():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_cancel_while_the_consumer_sleeps(engine: AsyncLLMEngine) -> None:
    asleep = asyncio.Event()

    async def consume() -> None:
        async for _ in engine.generate("The", ENDLESS):
            asleep.set()
            await asyncio.sleep(1000)

    task = asyncio.create_task(consume())
    await asleep.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_an_exception(engine: AsyncLLMEngine) -> None:
    with pytest.raises(ZeroDivisionError):
        async for _ in engine.generate("The", ENDLESS):
            raise ZeroDivisionError


WAYS_OUT = [
    leave_by_break,
    leave_by_deleting,
    leave_by_closing_from_another_task,
    leave_by_cancel_while_waiting,
    leave_by_cancel_while_the_consumer_sleeps,
    leave_by_an_exception,
]


@pytest.mark.case("ABT-03")
@pytest.mark.parametrize("leave", WAYS_OUT, ids=lambda way: way.__name__)
def test_leaving_the_iterator_aborts_the_request(
    engine: AsyncLLMEngine, leave: Callable[[AsyncLLMEngine], Coroutine[None, None, None]]
) -> None:
    """Whichever way out, the request ends and its blocks are free again."""

    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            await wait_idle(engine)
            steps = num_steps(engine)
            other = asyncio.create_task(collect(engine.generate("fox", greedy(max_tokens=60))))
            await leave(engine)
            assert len((await other)[-1].outputs[0].token_ids) == 60
            await wait_idle(engine)
            # One that nobody ends takes a step for each position.
            assert num_steps(engine) - steps < MAX_POSITIONS // 2, "nobody ended the request"

    asyncio.run(main())


def test_abort_ends_the_iterator_with_what_there_is(engine: AsyncLLMEngine) -> None:
    async def main() -> None:
        outputs = []
        async with asyncio.timeout(PATIENCE):
            async for output in engine.generate("The", ENDLESS, "doomed"):
                outputs.append(output)
                if len(outputs) == 3:
                    await engine.abort("doomed")
        last = outputs[-1]
        assert last.finished and last.outputs[0].finish_reason == "abort"
        assert last.outputs[0].token_ids[:3] == outputs[2].outputs[0].token_ids[:3]
        await engine.abort("doomed")
        await engine.abort("never there")
        await wait_idle(engine)

    asyncio.run(main())


def test_id_is_free_after_abort_while_the_old_iterator_still_lives(engine: AsyncLLMEngine) -> None:
    async def main() -> None:
        old = engine.generate("The", ENDLESS, "same")
        await anext(old)
        with pytest.raises(ValueError, match="'same' is already in use"):
            await anext(engine.generate("fox", greedy(), "same"))
        await engine.abort("same")
        new = engine.generate("fox", greedy(), "same")
        first = await anext(new)
        assert first.prompt == "fox"
        while not (await anext(old)).finished:
            pass
        with pytest.raises(StopAsyncIteration):
            await anext(old)
        # Not ended by the old one's end. If all was there at once, the first was the last.
        outputs = [first, *await collect(new)]
        assert len(outputs[-1].outputs[0].token_ids) == 12
        await wait_idle(engine)

    asyncio.run(main())


def test_bad_requests_raise_before_any_output(engine: AsyncLLMEngine) -> None:
    async def main() -> None:
        for prompt, params, message in (
            ([VOCAB_SIZE], greedy(), f"prompt token 0 is {VOCAB_SIZE}"),
            ("", greedy(), "prompt is empty"),
            ([5] * MAX_POSITIONS, greedy(), f"prompt has {MAX_POSITIONS} tokens"),
            ("The", greedy(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
        ):
            with pytest.raises(ValueError, match=message):
                await anext(engine.generate(prompt, params))
        assert not engine.engine.has_unfinished_requests()

    asyncio.run(main())


def test_full_queue_raises_and_the_others_finish(engine: AsyncLLMEngine) -> None:
    async def main() -> None:
        # 16 sequences run until they are ended, 24 may wait: 6 requests of 4, 14 are refused.
        running = [
            asyncio.create_task(
                collect(engine.generate("The", greedy(max_tokens=None, n=4), f"long{i}"))
            )
            for i in range(4)
        ]
        await until(lambda: engine.stats().num_running == 16)
        requests = [
            asyncio.create_task(collect(engine.generate("The", greedy(n=4)))) for _ in range(20)
        ]
        await until(lambda: sum(request.done() for request in requests) >= 14)
        for i in range(4):
            await engine.abort(f"long{i}")
        results = await asyncio.gather(*requests, return_exceptions=True)
        refused = [r for r in results if isinstance(r, BaseException)]
        assert len(refused) == 14 and all(type(r) is QueueFullError for r in refused)
        assert "waiting queue is full (24 sequences)" in str(refused[0])
        finished = [r for r in results if not isinstance(r, BaseException)]
        assert len(finished) == 6 and all(r[-1].finished for r in finished)
        await asyncio.gather(*running)
        await wait_idle(engine)

    asyncio.run(main())


def test_a_second_event_loop_may_take_over(engine: AsyncLLMEngine) -> None:
    async def abandon() -> None:
        # The loop is closed with the request running: asyncio closes the iterator.
        outputs = engine.generate("The", ENDLESS, "abandoned")
        await anext(outputs)

    async def use() -> list[int]:
        outputs = await collect(engine.generate("The", greedy(), "abandoned"))
        await wait_idle(engine)
        return outputs[-1].outputs[0].token_ids

    first = asyncio.run(use())
    asyncio.run(abandon())
    assert asyncio.run(use()) == first


def test_under_uvloop(engine: AsyncLLMEngine) -> None:
    import uvloop

    async def main() -> None:
        outputs = await asyncio.gather(*(collect(engine.generate(p, greedy())) for p in PROMPTS))
        assert all(made[-1].finished for made in outputs)
        await leave_by_break(engine)
        await wait_idle(engine)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_idle_engine_uses_no_processor_time(engine: AsyncLLMEngine) -> None:
    """Nobody polls: not the front end, not the engine core, not the worker."""

    def ticks(pid: int) -> int:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    async def main() -> None:
        await collect(engine.generate("The", greedy()))
        await wait_idle(engine)
        pids = [os.getpid(), *pids_of(engine)]
        used = [100]  # hundredths of a second
        async with asyncio.timeout(PATIENCE):
            while max(used) > 3:  # until all have gone to sleep; who polls never does
                before = [ticks(pid) for pid in pids]
                await asyncio.sleep(1)
                used = [ticks(pid) - old for pid, old in zip(pids, before, strict=True)]

    asyncio.run(main())


def pids_of(engine: AsyncLLMEngine) -> list[int]:
    return [child.process.pid for child in engine._client._processes.children]


@pytest.mark.case("WRK-01")
@pytest.mark.parametrize("index", [0, 1], ids=["worker", "engine core"])
def test_killed_process_ends_every_request_with_the_reason(tiny_model: str, index: int) -> None:
    engine = AsyncLLMEngine(tiny_model, num_threads=1)
    role = ["worker", "engine core"][index]

    async def main() -> None:
        running = [engine.generate(prompt, ENDLESS) for prompt in PROMPTS[:3]]
        for outputs in running:
            await anext(outputs)
        assert engine.health() is None
        os.kill(pids_of(engine)[index], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            for outputs in running:
                with pytest.raises(EngineDeadError, match=f"the {role} was killed by SIGKILL"):
                    await collect(outputs)
        assert "SIGKILL" in (engine.health() or "")
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await anext(engine.generate("The", greedy()))
        await engine.drain()

    try:
        asyncio.run(main())
    finally:
        engine.close()
    assert all(child.process.poll() is not None for child in engine._client._processes.children)


def test_stopped_engine_core_is_noticed_while_requests_run(tiny_model: str) -> None:
    engine = AsyncLLMEngine(tiny_model, num_threads=1, step_timeout=PATIENCE)

    def let_time_pass(seconds: float) -> None:
        engine._last_news -= seconds

    async def main() -> None:
        let_time_pass(2 * PATIENCE)
        outputs = engine.generate("The", ENDLESS)
        first = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)  # the request is with the engine, and no news has been read
        assert engine.engine.has_unfinished_requests()
        assert engine.health() is None, "silence before the request counts"
        await first
        os.kill(pids_of(engine)[1], signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE):
            while engine.health() is None:
                let_time_pass(1)  # until the next news, of which some are still to be read
                await asyncio.sleep(0.01)
        assert "no news for" in (engine.health() or "")
        await outputs.aclose()
        assert engine.health() is None, "nothing is expected of it"

    try:
        asyncio.run(main())
    finally:
        engine.close()


def test_outputs_that_wait_are_one(engine: AsyncLLMEngine) -> None:
    options = {"max_tokens": 200, "n": 2, "logprobs": 2, "seed": 3, "temperature": 1}

    async def ask(kind: RequestOutputKind) -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate("The", greedy(output_kind=kind, **options)):
            outputs.append(output)
            while len(outputs) == 2 and engine.engine.has_unfinished_requests():
                await asyncio.sleep(0.01)
        return outputs

    async def main() -> None:
        (whole,) = await ask(RequestOutputKind.FINAL_ONLY)
        for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
            outputs = await ask(kind)
            assert len(outputs) <= 3, "outputs have piled up"
            assert outputs[-1].finished
            assert outputs[-1].num_cached_tokens == whole.num_cached_tokens
            if kind is RequestOutputKind.CUMULATIVE:
                assert outputs[-1].outputs == whole.outputs
            for sample in whole.outputs:
                parts = [s for o in outputs for s in o.outputs if s.index == sample.index]
                if kind is RequestOutputKind.DELTA:
                    assert "".join(part.text for part in parts) == sample.text
                    assert [t for part in parts for t in part.token_ids] == sample.token_ids
                    assert [p for part in parts for p in part.logprobs or ()] == sample.logprobs
                assert parts[-1].cumulative_logprob == sample.cumulative_logprob
                assert parts[-1].finish_reason == "length"

    asyncio.run(main())


def test_what_waits_is_given_before_the_engines_death(tiny_model: str) -> None:
    engine = AsyncLLMEngine(tiny_model, num_threads=1)

    async def main() -> None:
        outputs = engine.generate(
            "The", greedy(max_tokens=None, output_kind=RequestOutputKind.DELTA), "waits"
        )
        await anext(outputs)
        mailbox = engine._mailboxes["waits"]
        while mailbox._output is None or len(mailbox._output.outputs[0].token_ids) < 2:
            await asyncio.sleep(0.01)
        engine.declare_dead("dead")
        assert len((await anext(outputs)).outputs[0].token_ids) > 1
        with pytest.raises(EngineDeadError, match="dead"):
            await anext(outputs)

    try:
        asyncio.run(main())
    finally:
        engine.close()


def test_close_ends_running_requests(tiny_model: str) -> None:
    engine = AsyncLLMEngine(tiny_model, num_threads=1)

    async def main() -> None:
        outputs = engine.generate("The", ENDLESS)
        await anext(outputs)
        engine.close()
        engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await collect(outputs)
        with pytest.raises(EngineDeadError, match="closed"):
            await anext(engine.generate("The", greedy()))

    asyncio.run(main())
    assert engine.stats().num_running >= 0
