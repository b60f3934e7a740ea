from collections.abc import Callable

from protocol import Batch, serve
from vllm import LLM, SamplingParams


def load(model: str, threads: int) -> Callable[[Batch], list[int]]:
    llm = LLM(model, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=True)

    def run(batch: Batch) -> list[int]:
        outputs = llm.generate(
            [{"prompt_token_ids": request["prompt"]} for request in batch],
            [
                SamplingParams(
                    temperature=0,
                    max_tokens=request["max_tokens"],
                    ignore_eos=True,
                    detokenize=False,
                )
                for request in batch
            ],
            use_tqdm=False,
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    return run


if __name__ == "__main__":  # vLLM's engine process imports this file again
    serve(load)
