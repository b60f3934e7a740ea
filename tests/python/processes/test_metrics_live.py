"""``/metrics`` of a server that preempts, shares prefixes and loses clients, under a scraper."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from processes.server_process import ServerProcess, metrics, stream
from tiny_model import block_bytes
from waiting import wait_until

_COUNTS = re.compile(r"(vllm_lite:\S+?(?:_total|_count|_sum|_bucket)\{[^}]*\}) (\S+)")


@pytest.fixture
def server(tmp_path: Path, tiny_model: str) -> Iterator[ServerProcess]:
    """Of a pool in which about three long sequences fit."""
    options = ("--max-model-len", "600", "--kv-cache-memory", str(40 * block_bytes()))
    made = ServerProcess(tmp_path, tiny_model, "--threads", "1", *options)
    yield made.wait_ready()
    made.close()


@pytest.mark.case("MET-01")
def test_counters_never_fall_whatever_happens_to_requests(server: ServerProcess) -> None:
    done = threading.Event()
    faults: list[str] = []
    scrapes = 0

    def scrape() -> None:
        nonlocal scrapes
        last: dict[str, float] = {}
        with server.client() as client:
            while not done.is_set():
                answer = client.get("/metrics")
                found = {name: float(value) for name, value in _COUNTS.findall(answer.text)}
                if answer.status_code != 200 or len(found) < 20:
                    faults.append(answer.text)
                faults.extend(
                    f"{name}: {value} after {last[name]}"
                    for name, value in found.items()
                    if value < last.get(name, 0)
                )
                plain = metrics(client)
                hits = plain["vllm_lite:prefix_cache_hits_total"]
                if not 0 <= hits <= plain["vllm_lite:prefix_cache_queries_total"]:
                    faults.append(f"{hits} hits")
                last = found
                scrapes += 1
                time.sleep(0.05)

    def ask(index: int) -> None:
        prompt = [5] * 64 + [6 + index]
        with server.client() as client:
            if index % 4 == 3:  # a client that goes away, long before all is there
                with stream(client, prompt=prompt, max_tokens=500, n=2) as events:
                    next(events)
                return
            # Four samples of one request are more than the pool holds, whoever else is there.
            body = {"prompt": prompt, "max_tokens": 150, "ignore_eos": True, "n": 4}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert usage["prompt_tokens"] >= cached >= 0

    scraper = threading.Thread(target=scrape)
    scraper.start()
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(24)))

    def ended() -> dict[str, float]:
        text = client.get("/metrics").text
        found = re.findall(r'success_total\{.*finished_reason="(\w+)".*\} (\S+)', text)
        return {name: float(value) for name, value in found}

    with server.client() as client:
        server.wait_idle(client)
        wait_until(lambda: sum(ended().values()) == 24)  # the API server has noticed, too
        wait_until(lambda: scrapes > 3)
        done.set()
        scraper.join()
        assert client.get("/health").status_code == 200
        found = metrics(client)
        counts = ended()
    assert faults == []
    assert found["vllm_lite:num_preemptions_total"] > 0
    assert found["vllm_lite:prefix_cache_hits_total"] > 0
    assert (counts["stop"], counts["error"]) == (0, 0)
    # A client that is slow to leave may be given the whole answer.
    assert counts["length"] + counts["abort"] == 24 and 1 <= counts["abort"] <= 6
