"""What every driver shares. Runs in each engine's own interpreter: the standard library only.

    <driver>.py MODEL THREADS

A driver loads the model and prints {"ready": true}. Each line on its standard input is then one
batch, ``[{"prompt": [token ids], "max_tokens": n}, ...]``, answered by one line ``{"seconds": s,
"output_tokens": [tokens of each request]}``. It ends with its input.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Batch = list[dict[str, Any]]


def serve(load: Callable[[str, int], Callable[[Batch], list[int]]]) -> None:
    """``load(model, threads)`` returns what runs a batch and says how many tokens came out."""
    # What engines print themselves must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    run = load(sys.argv[1], int(sys.argv[2]))
    answer(ready=True)
    for line in sys.stdin:
        batch = json.loads(line)
        start = time.perf_counter()
        output_tokens = run(batch)
        answer(seconds=time.perf_counter() - start, output_tokens=output_tokens)
