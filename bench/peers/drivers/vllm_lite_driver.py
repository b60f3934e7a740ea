from collections.abc import Callable

from protocol import Batch, serve

from vllm_lite import LLM, SamplingParams


def load(model: str, threads: int) -> Callable[[Batch], list[int]]:
    llm = LLM(model, num_threads=threads, max_model_len=2048)

    def run(batch: Batch) -> list[int]:
        outputs = llm.generate(
            [request["prompt"] for request in batch],
            [
                SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
                for request in batch
            ],
            use_tqdm=False,
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


serve(load)
