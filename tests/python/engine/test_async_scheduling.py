"""Asynchronous scheduling changes when a plan leaves, never what a request gives."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.delayed import DelayedDevice
from tiny_model import block_bytes
from vllm_lite import Engine, RequestOutput, SamplingParams
from vllm_lite.arguments import engine_config, serve_parser
from vllm_lite.clients import ProcessClient, deliver, make_core
from vllm_lite.config import EngineConfig
from vllm_lite.messages import decode_outputs
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles
from vllm_lite.requests import make_add_request
from vllm_lite.settings import read
from vllm_lite.tokenizer import load_tokenizer
from vllm_lite.worker.step_plan import StepPlan
from vllm_lite.worker.worker import Worker
from waiting import held

PROMPTS = ["The quick", "def f(x):", "Größe", "東京", "lazy dog, and", "it is", "12345", "café"]
# A pool in which about three sequences fit, so that running ones are preempted.
SMALL_POOL = {"max_model_len": 64, "block_size": 16, "kv_cache_memory": 5 * block_bytes(16)}


def params_of(index: int) -> SamplingParams:
    """Requests of many kinds."""
    options: dict[str, object] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    options |= [
        {"logprobs": 2},
        {"n": 2, "temperature": 1.0, "seed": 7, "logprobs": 0},
        {"stop": ["e", "o", "a"], "temperature": 1.0, "seed": index},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3, "min_tokens": 5, "ignore_eos": False},
        {"stop_token_ids": list(range(100, 200)), "min_tokens": 2},
    ][index % 6]
    return SamplingParams(**options)


def pids_of(engine: Engine) -> list[int]:
    """Of its processes, if it has any."""
    if not isinstance(engine.client, ProcessClient):
        return []
    assert engine.client._processes is not None
    return [child.process.pid for child in engine.client._processes.children]


def generate(
    model: str, async_scheduling: bool, multiprocess: bool = False
) -> tuple[dict[str, RequestOutput], int]:
    """(the last output of each request, preemptions) of 24 requests of which some are aborted."""
    last: dict[str, RequestOutput] = {}
    with Engine(
        model, multiprocess=multiprocess, num_threads=1, async_scheduling=async_scheduling,
        **SMALL_POOL,
    ) as engine:  # fmt: skip
        with ExitStack() as all_at_once:
            for pid in pids_of(engine):
                all_at_once.enter_context(held(pid))
            for index in range(24):
                prompt = PROMPTS[index % len(PROMPTS)]
                engine.add_request(str(index), prompt, params_of(index))
                if index % 8 == 7:
                    engine.add_request(f"aborted {index}", prompt, SamplingParams(max_tokens=40))
        aborted = False
        while engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
            if last and not aborted:
                engine.abort_request([f"aborted {index}" for index in (7, 15, 23)])
                aborted = True
        stats = engine.stats()
        assert stats.num_running == stats.num_waiting == stats.kv_used_blocks == 0
    return {
        name: output for name, output in last.items() if name.isdecimal()
    }, stats.num_preemptions


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DelayedDevice:
    return DelayedDevice(monkeypatch)


@pytest.mark.parametrize("multiprocess", [False, True], ids=["in process", "in processes"])
def test_tokens_and_logprobs_are_those_of_the_synchronous_engine(
    tiny_model: str, multiprocess: bool, device: DelayedDevice
) -> None:
    expected, _ = generate(tiny_model, False)
    assert set(device.in_flight_at_launch) == {0}
    device.in_flight_at_launch.clear()
    outputs, num_preemptions = generate(tiny_model, True, multiprocess)
    assert num_preemptions > 0
    if not multiprocess:
        # Some steps begin alone: after one that found no room, or ended the requests.
        assert set(device.in_flight_at_launch) == {0, 1}
        assert device.in_flight_at_launch.count(1) > device.num_launched / 2
        assert device.num_placeholders > device.num_launched
    assert len(outputs) == len(expected) == 24
    reasons = set()
    for name, output in outputs.items():
        for sample, wanted in zip(output.outputs, expected[name].outputs, strict=True):
            assert (sample.token_ids, sample.text) == (wanted.token_ids, wanted.text), name
            assert sample.finish_reason == wanted.finish_reason
            assert sample.stop_reason == wanted.stop_reason
            reasons.add((sample.finish_reason, type(sample.stop_reason)))
            assert (sample.logprobs is None) == (wanted.logprobs is None)
            for got, want in zip(sample.logprobs or [], wanted.logprobs or [], strict=True):
                assert got.keys() == want.keys()
                for token, logprob in got.items():
                    assert (logprob.logprob, logprob.rank) == (
                        want[token].logprob,
                        want[token].rank,
                    )
    assert reasons >= {("length", type(None)), ("stop", str), ("stop", int)}


def test_plans_leave_with_placeholders_which_the_worker_fills_in(tiny_model: str) -> None:
    config = EngineConfig(
        model=tiny_model, max_model_len=64, num_threads=1, max_num_seqs=4, async_scheduling=True
    )
    files = ModelFiles(Path(tiny_model))
    model_config = load_model_config(files)
    resolved = config.resolve(model_config)
    tokenizer = load_tokenizer(files)
    core = make_core(
        config, resolved, model_config, tokenizer.token_table(), 1, resolved.async_scheduling
    )
    worker = Worker(config, resolved, files, model_config)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for key, prompt in enumerate(PROMPTS[:2]):
        ids = tokenizer.encode(prompt)
        deliver(core, make_add_request(key, ids, params, 0, "", (), 64, tokenizer))
    plans: list[bytes] = []
    num_placeholders = []
    tokens: dict[int, list[int]] = {0: [], 1: []}
    while core.has_work():
        plan = core.begin_step()
        if plan is not None:
            plans.append(bytes(plan))
            num_placeholders.append(StepPlan(plan).num_placeholders)
            if len(plans) < 2:
                continue
        core.finish_step(worker.execute(plans.pop(0)))
        core.check_invariants()
        news = core.take_outputs(0)
        assert news is not None
        for output in decode_outputs(news).outputs:
            tokens[output.key] += output.token_ids
    assert num_placeholders == [0, 2, 2, 2, 2, 2]
    with Engine(tiny_model, num_threads=1, max_model_len=64) as engine:
        for key, prompt in enumerate(PROMPTS[:2]):
            engine.add_request(str(key), prompt, params)
        last: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
    assert tokens == {int(name): output.outputs[0].token_ids for name, output in last.items()}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_common_beginning_is_computed_once(tiny_model: str, async_scheduling: bool) -> None:
    common = [5 + i * 7 % 200 for i in range(80)]
    prompts = [[*common, *range(10 + i, 18 + i)] for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def generate(salt: str) -> tuple[list[list[int]], list[int]]:
        for i, ids in enumerate(prompts):
            prompt = {"prompt_token_ids": ids, "cache_salt": salt or f"own {i}"}
            engine.add_request(str(i), prompt, params)
        last: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
        outputs = [last[str(i)] for i in range(len(prompts))]
        return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs]

    with Engine(
        tiny_model, multiprocess=True, num_threads=1, max_model_len=128,
        max_num_batched_tokens=256, block_size=16, async_scheduling=async_scheduling,
    ) as engine:  # fmt: skip
        alone, cached = generate("")
        assert cached == [0] * 12
        assert generate("common") == (alone, [0] + [80] * 11)


# --- in one process -------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def engine(tiny_model: str, device: DelayedDevice) -> Iterator[Engine]:
    with Engine(tiny_model, num_threads=1, max_model_len=64, async_scheduling=True) as engine:
        yield engine
        assert engine.stats().kv_used_blocks == 0


def tokens_of(
    engine: Engine, prompts: list[str], params: SamplingParams = GREEDY
) -> list[tuple[list[int], str | None]]:
    """What is left when everything is finished: (token ids, error) of each, in order."""
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{index}", prompt, params)
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    outputs = [last[str(index)] for index in range(len(prompts))]
    return [(output.outputs[0].token_ids, output.error) for output in outputs]


def test_abort_with_steps_in_flight(engine: Engine, device: DelayedDevice) -> None:
    expected = tokens_of(engine, PROMPTS[:3])
    for num_steps in range(1, 10):
        engine.add_request("aborted", "The quick", SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(num_steps):
            engine.step()
        assert len(device.queue) == 1
        engine.abort_request("aborted")
        if num_steps % 2 == 0:
            assert engine.stats().num_running == 0  # seen without a step of another
        assert tokens_of(engine, PROMPTS[:3]) == expected


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_failed_step_ends_its_requests_and_others_go_on(
    engine: Engine, device: DelayedDevice, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens_of(engine, PROMPTS[:4])
    for number in range(1, 8):
        # A lone surrogate cannot be sent as it is.
        error = MemoryError("no room \udc80 for activations")
        errors = device.launch_errors if where == "launch" else device.wait_errors
        errors[device.num_launched + number] = error
        made = tokens_of(engine, PROMPTS[:2])
        for (tokens, message), (whole, _) in zip(made, expected, strict=False):
            assert message == "MemoryError: no room ? for activations"
            # The steps before have given their tokens, the one after has not.
            assert tokens == whole[:number]
        assert "no room" in caplog.text
        caplog.clear()
        assert tokens_of(engine, PROMPTS[:4]) == expected


def test_who_waits_while_a_step_fails_comes_next(tiny_model: str, device: DelayedDevice) -> None:
    """While the step planned on top of the one that failed is still on the device."""
    options = {"num_threads": 1, "max_model_len": 64, "max_num_seqs": 1}
    with Engine(tiny_model, async_scheduling=True, **options) as engine:
        (first, _), second, third = tokens_of(engine, PROMPTS[:3])
        for number in range(7):
            device.wait_errors[device.num_launched + number] = RuntimeError("this step fails")
            assert tokens_of(engine, PROMPTS[:3]) == [
                (first[:number], "RuntimeError: this step fails"), second, third
            ]  # fmt: skip
            assert engine.stats().kv_used_blocks == 0
            device.wait_errors.clear()


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_interrupt_with_a_step_in_flight_leaves_the_engine_usable(
    engine: Engine, device: DelayedDevice, where: str
) -> None:
    expected = tokens_of(engine, PROMPTS[:4])
    for number in range(1, 5):
        errors = device.launch_errors if where == "launch" else device.wait_errors
        errors[device.num_launched + number] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            tokens_of(engine, PROMPTS[:2])
        assert not engine.has_unfinished_requests()
        assert engine.stats().kv_used_blocks == 0
        assert tokens_of(engine, PROMPTS[:4]) == expected


def test_close_waits_for_the_step_in_flight(tiny_model: str, device: DelayedDevice) -> None:
    engine = Engine(tiny_model, num_threads=1, max_model_len=64, async_scheduling=True)
    engine.add_request("a", "The", GREEDY)
    while not engine.step():
        pass
    (step,) = device.queue
    engine.close()
    assert step.result is not None
    engine.close()


def test_close_after_a_failure_on_the_device(tiny_model: str, device: DelayedDevice) -> None:
    engine = Engine(tiny_model, num_threads=1, max_model_len=64, async_scheduling=True)
    engine.add_request("a", "The", GREEDY)
    device.wait_errors[1] = RuntimeError("the device is gone")
    while not engine.step():
        pass
    assert len(device.queue) == 1
    engine.close()
    assert not device.queue


def test_option() -> None:
    def parsed(*flags: str) -> bool | None:
        return engine_config(read(serve_parser(), list(flags), {}).values).async_scheduling

    assert parsed() is None
    assert parsed("--async-scheduling") is True
    assert parsed("--no-async-scheduling") is False
    with pytest.raises(ValueError, match="async_scheduling must be true, false or None, got 1"):
        EngineConfig(async_scheduling=1)


def test_is_off_on_cpu_unless_asked_for(tiny_model: str) -> None:
    model_config = load_model_config(ModelFiles(Path(tiny_model)))
    for given, resolved in ((None, False), (True, True), (False, False)):
        config = EngineConfig(model=tiny_model, async_scheduling=given)
        assert config.resolve(model_config).async_scheduling is resolved
