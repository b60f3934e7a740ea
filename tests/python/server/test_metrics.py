"""/metrics."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.client import Client
from server.fakes import FakeEngine, Script
from vllm_lite.errors import EngineError, QueueFullError
from vllm_lite.stats import EngineStats


def scrape(client: Client) -> dict[tuple[str, str], float]:
    """(name, finished_reason or le) -> value; every sample carries the model's name."""
    response = client.get("/metrics")
    assert response.status_code == 200
    out = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.name.startswith("vllm_lite:")
            assert sample.labels["model_name"] == "fake"
            extra = sample.labels.get("finished_reason") or sample.labels.get("le") or ""
            out[sample.name.removeprefix("vllm_lite:"), extra] = sample.value
    return out


def test_engine_state_is_read_at_the_scrape(client: Client) -> None:
    client.engine.now = EngineStats(3, 2, 25, 100, 400, 150, 7)
    seen = scrape(client)
    assert seen["num_requests_running", ""] == 3
    assert seen["num_requests_waiting", ""] == 2
    assert seen["kv_cache_usage_perc", ""] == 0.25
    assert seen["prefix_cache_queries_total", ""] == 400
    assert seen["prefix_cache_hits_total", ""] == 150
    assert seen["num_preemptions_total", ""] == 7
    # The engine starts again from zero: totals go on.
    client.engine.now = EngineStats(kv_total_blocks=0, prefix_queries=10)
    seen = scrape(client)
    assert seen["prefix_cache_queries_total", ""] == 410
    assert seen["prefix_cache_hits_total", ""] == 150
    assert seen["kv_cache_usage_perc", ""] == 0


@pytest.mark.case("MET-03")
def test_requests_are_counted_by_how_they_ended(client: Client) -> None:
    client.complete(prompt=["ab", "cde"])  # 2 requests, 12 tokens each
    client.complete(max_tokens=4, stream=True)
    client.engine.script = Script(error_at=2, error=EngineError("x"))
    client.complete(stream=True)
    client.complete()  # fails before it has told anything
    client.engine.script = Script(start_error=QueueFullError("full"))
    client.complete()  # refused: not counted
    client.complete(temperature=9)
    seen = scrape(client)
    ended = {k[1]: v for k, v in seen.items() if k[0] == "request_success_total"}
    assert ended == {"stop": 2, "length": 1, "error": 2, "abort": 0}
    assert seen["prompt_tokens_total", ""] == 5 + 3 + 3
    assert seen["generation_tokens_total", ""] == 24 + 4 + 2
    assert seen["e2e_request_latency_seconds_count", ""] == 3
    assert seen["time_to_first_token_seconds_count", ""] == 2
    assert seen["inter_token_latency_seconds_count", ""] == 3 + 1


def test_a_failing_metric_never_breaks_a_request(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("counters can only be incremented by non-negative amounts")

    monkeypatch.setattr(client.state.metrics.generation_tokens, "inc", broken)
    monkeypatch.setattr(client.state.metrics.ended["stop"], "inc", broken)
    assert client.complete().status_code == 200
    assert client.complete(stream=True).text.endswith("[DONE]\n\n")
    client.engine.stats_error = RuntimeError("no engine")
    seen = scrape(client)
    assert ("num_requests_running", "") not in seen
    assert seen["prompt_tokens_total", ""] == 6


def test_two_servers_in_one_process_do_not_share_metrics() -> None:
    one, two = Client(FakeEngine()), Client(FakeEngine())
    one.complete()
    assert scrape(one)["prompt_tokens_total", ""] == 3
    assert scrape(two)["prompt_tokens_total", ""] == 0
