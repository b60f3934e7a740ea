"""What the tests of the Python API have in common: prompts, and short ways to run them."""

from tiny_model import EOS, VOCAB_SIZE
from vllm_lite import LLM, Engine, RequestOutput, SamplingParams

PROMPTS = ["The quick", "def f(x):", "Größe", "東京", "lazy dog, and", "it is", "12345", "café"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **options})


def run(llm: LLM, prompts: object, params: object = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def ascii_ids(llm: LLM) -> list[int]:
    tokens = ((i, llm.get_tokenizer().token_bytes(i)) for i in range(EOS + 1, VOCAB_SIZE))
    return [i for i, data in tokens if data and all(32 < byte < 127 for byte in data)]


def drain(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def drained_ids(engine: Engine, name: str) -> list[int]:
    engine.add_request(name, "The quick", GREEDY)
    return drain(engine)[name][-1].outputs[0].token_ids
