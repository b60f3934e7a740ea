"""bench/gpu/host_step.py: what a step on a GPU costs the host, without one."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench/gpu/host_step.py"


def test_every_part_is_measured_and_every_call_of_the_device_is_counted() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seqs", "20", "--context", "24", "--repeats", "3"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(0 < line["least_us"] <= line["us"] < 1e6 for line in lines)
    calls = {line["name"]: line["device_calls"] for line in lines}
    assert len(calls) == len(lines) == 12
    assert {name for name in calls if name.startswith("apply")} == {"apply 2 table updates"}
    # The launch holds the upload and the table updates.
    assert calls["the whole launch, without the sampler"] == 6
    assert sum(count for name, count in calls.items() if "sampler" in name) == 12
