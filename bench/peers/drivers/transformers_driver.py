from collections.abc import Callable

import torch
from protocol import Batch, serve
from transformers import AutoModelForCausalLM


def load(path: str, threads: int) -> Callable[[Batch], list[int]]:
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    def run(batch: Batch) -> list[int]:
        """One padded batch: generate() has no other way to take prompts of several lengths."""
        (max_tokens,) = {request["max_tokens"] for request in batch}
        longest = max(len(request["prompt"]) for request in batch)
        pads = [longest - len(request["prompt"]) for request in batch]
        rows = zip(pads, batch, strict=True)
        input_ids = torch.tensor([[0] * pad + request["prompt"] for pad, request in rows])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        with torch.inference_mode():
            output = model.generate(
                input_ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
        return [output.shape[1] - longest] * len(batch)

    return run


serve(load)
