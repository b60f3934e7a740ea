"""lm-eval's API models on the tasks of tasks/; log-likelihoods against transformers'."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from clients.common import KEY, MODEL, needs
from processes.server_process import ServerProcess

pytestmark = [pytest.mark.slow, needs("lm_eval")]

TASKS = Path(__file__).parent / "tasks"


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``simple_evaluate`` with these tasks."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.chdir(TASKS)  # where the tasks name their data
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)

    def run(model: str, task: str, **options: Any) -> Any:
        return lm_eval.simple_evaluate(
            model=model, tasks=[task], task_manager=manager, bootstrap_iters=0, **options
        )

    return run


class Reference:
    """Log-likelihoods by transformers, in float32, of one text after the other."""

    def __init__(self, path: str) -> None:
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(path, dtype=torch.float32).eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    @torch.inference_mode()
    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Of the continuation, and whether greedy decoding would give it."""
        logits = self.model(torch.tensor([context + continuation])).logits[0]
        logprobs = logits[len(context) - 1 : -1].log_softmax(-1)
        chosen = torch.tensor(continuation)
        total = logprobs.gather(1, chosen[:, None]).sum()
        return float(total), bool((logprobs.argmax(-1) == chosen).all())


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> Reference:
    return Reference(tiny_model)


def completions(server: ServerProcess, tokenizer: str, **arguments: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": tokenizer,
        "max_retries": 1,
        **arguments,
    }


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="token ids"),
        pytest.param({"batch_size": 3}, id="batches of token ids"),
        pytest.param({"num_concurrent": 4}, id="at once"),
        pytest.param({"tokenized_requests": False, "batch_size": 3}, id="batches of texts"),
    ],
)
def test_local_completions_scores_choices(
    evaluate: Any,
    tiny_server: ServerProcess,
    tiny_model: str,
    reference: Reference,
    arguments: dict[str, Any],
) -> None:
    found = evaluate(
        "local-completions",
        "colours",
        model_args=completions(tiny_server, tiny_model, **arguments),
    )
    samples = found["samples"]["colours"]
    assert len(samples) == 5
    right = 0
    for sample in samples:
        expected = []
        for name, response in zip(sample["arguments"], sample["filtered_resps"], strict=True):
            context, continuation = name
            whole = reference.encode(context + continuation)
            begin = len(reference.encode(context))
            expected.append(reference.score(whole[:begin], whole[begin:]))
            assert response[0] == pytest.approx(expected[-1][0], abs=1e-3)
            assert response[1] == expected[-1][1]
        best = max(range(len(expected)), key=lambda index: expected[index][0])
        right += best == sample["doc"]["answer"]
    assert found["results"]["colours"]["acc,none"] == right / 5


def test_local_completions_knows_greedy_continuations(
    evaluate: Any, tiny_server: ServerProcess, tiny_model: str, reference: Reference
) -> None:
    from lm_eval.api.registry import get_model

    context = reference.encode("The quick brown fox")
    greedy: list[int] = []
    for _ in range(4):
        with torch.inference_mode():
            logits = reference.model(torch.tensor([context + greedy])).logits[0, -1]
        greedy.append(int(logits.argmax()))
    other = [*greedy[:-1], greedy[-1] ^ 1]
    model = get_model("local-completions")(**completions(tiny_server, tiny_model, batch_size=2))
    pairs = [(("", str(ids)), context, ids) for ids in (greedy, other)]
    found = model._loglikelihood_tokens(pairs)
    for (score, is_greedy), ids in zip(found, (greedy, other), strict=True):
        assert (pytest.approx(score, abs=1e-3), is_greedy) == reference.score(context, ids)
    assert [is_greedy for _, is_greedy in found] == [True, False]


def test_local_completions_scores_whole_texts(
    evaluate: Any, tiny_server: ServerProcess, tiny_model: str, reference: Reference
) -> None:
    found = evaluate(
        "local-completions", "sayings", model_args=completions(tiny_server, tiny_model)
    )
    for sample in found["samples"]["sayings"]:
        ids = reference.encode(sample["doc"]["text"])
        expected, _ = reference.score([reference.tokenizer.bos_token_id], ids)
        assert sample["resps"][0][0] == pytest.approx(expected, abs=1e-3)


def test_local_chat_completions_generates(
    evaluate: Any, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    found = evaluate(
        "local-chat-completions",
        "capitals",
        model_args={
            "model": MODEL,
            "base_url": f"{server.url}/v1/chat/completions",
            "num_concurrent": 2,
            "max_retries": 1,
        },
        apply_chat_template=True,
    )
    assert found["results"]["capitals"]["exact_match,the word"] == 1
    for sample in found["samples"]["capitals"]:
        [[text]] = sample["resps"]
        assert text and "\n" not in text and "." not in text
