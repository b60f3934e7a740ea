"""A device that works by itself, as a GPU does, for an engine of this process on the CPU."""

from collections import deque

import pytest

from vllm_lite.worker.sampler import PendingResult
from vllm_lite.worker.step_plan import StepPlan
from vllm_lite.worker.worker import Worker


class DelayedDevice:
    """``Worker.launch`` only queues a step. It is computed, after those before it, when its result
    or a later one's is waited for.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.queue: deque[DelayedStep] = deque()
        self.in_flight_at_launch: list[int] = []  # launched before and not waited for, per step
        self.num_placeholders = 0
        # By the number of the step, from 0: what its launch, or the wait for it, raises.
        self.launch_errors: dict[int, BaseException] = {}
        self.wait_errors: dict[int, BaseException] = {}
        self._launch = Worker.launch
        patch.setattr(Worker, "launch", lambda worker, plan: self._queue(worker, bytes(plan)))

    @property
    def num_launched(self) -> int:
        return len(self.in_flight_at_launch)

    def _queue(self, worker: Worker, plan: bytes) -> PendingResult:
        number = self.num_launched
        self.in_flight_at_launch.append(len(self.queue))
        if number in self.launch_errors:
            raise self.launch_errors[number]
        self.num_placeholders += StepPlan(plan).num_placeholders
        step = DelayedStep(self, worker, plan, number)
        self.queue.append(step)
        return step

    def run_until(self, last: "DelayedStep") -> None:
        while last.result is None:
            step = self.queue.popleft()
            error = self.wait_errors.get(step.number)
            if error is not None:
                raise error
            step.result = self._launch(step.worker, step.plan).wait()


class DelayedStep(PendingResult):
    is_pending = True

    def __init__(self, device: DelayedDevice, worker: Worker, plan: bytes, number: int) -> None:
        self.number = number
        self.worker = worker
        self.plan = plan
        self.result: bytes | None = None
        self._device = device

    def wait(self) -> bytes:
        self._device.run_until(self)
        assert self.result is not None
        return self.result
