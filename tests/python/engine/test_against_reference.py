"""Token for token against transformers' own run of the tiny model: dense attention, float32."""

from collections.abc import Iterator

import pytest
import torch
import transformers

from vllm_lite import LLM, SamplingParams

PROMPTS = ["The quick brown fox", "def f(x):\n    return", "東京は", "it is what they have said."]


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> Iterator[LLM]:
    with LLM(tiny_model, num_threads=1, max_model_len=512) as made:
        yield made


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> transformers.LlamaForCausalLM:
    model = transformers.LlamaForCausalLM.from_pretrained(
        tiny_model, attn_implementation="eager", dtype=torch.float32
    )
    model.generation_config.eos_token_id = None  # it goes on to the last token
    return model.eval()


@torch.inference_mode()
def logits_of(reference: transformers.LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Float32 ``[len(tokens), vocab_size]``."""
    return reference(torch.tensor([tokens])).logits[0]


@pytest.mark.case("BIV-03")
def test_256_greedy_tokens_are_those_of_dense_attention(
    llm: LLM, reference: transformers.LlamaForCausalLM
) -> None:
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        prompt, ids = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(ids) == 256
        logits = logits_of(reference, prompt + ids)[len(prompt) - 1 : -1]
        values, best = logits.topk(2)
        for position, token in enumerate(ids):
            if token != best[position, 0]:
                assert token == best[position, 1], position
                assert values[position, 0] - values[position, 1] < 1e-4, position


@pytest.mark.case("PEN-05")
def test_repetition_penalty_gives_the_tokens_of_generate(
    llm: LLM, reference: transformers.LlamaForCausalLM
) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, repetition_penalty=1.2)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    plain = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    for output, without in zip(outputs, plain, strict=True):
        prompt = torch.tensor([output.prompt_token_ids])
        made = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, do_sample=False,
            max_new_tokens=64, repetition_penalty=1.2,
        )  # fmt: skip
        assert output.outputs[0].token_ids == made[0, prompt.shape[1] :].tolist()
        assert output.outputs[0].token_ids != without.outputs[0].token_ids


# The value of each, and what it makes of a logit: of a token of the prompt at the first step, and
# at the second of one that the first step gave.
PENALTIES = {
    "presence_penalty": (1.5, lambda logit: logit, lambda logit: logit - 1.5),
    "frequency_penalty": (1.25, lambda logit: logit, lambda logit: logit - 1.25),
    "repetition_penalty": (2.0, *[lambda logit: logit / 2 if logit > 0 else logit * 2] * 2),
}


@pytest.mark.case("PEN-03")
@pytest.mark.parametrize("logit", [4.0, -4.0])
@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("step", [0, 1])
def test_penalties_by_hand_after_a_repeated_prompt(
    llm: LLM,
    reference: transformers.LlamaForCausalLM,
    name: str,
    logit: float,
    step: int,
) -> None:
    """A token that logit_bias brings to ``logit`` just wins, and just loses, against another that
    logit_bias brings to what the penalty should make of it.
    """
    value, *penalised = PENALTIES[name]
    prompt = [300] * 3
    token = 300 + step
    logits = logits_of(reference, [*prompt, 301])[2:]
    bias = logit - float(logits[step, token])
    other_bias = penalised[step](logit) - logits[step]  # [vocab_size]
    # At the second step: the first has to give the token, whichever wins then.
    lead = float(logits[0, token]) + bias - (logits[0] + other_bias)
    lead[300:302] = -torch.inf
    other = int(lead.argmax())
    assert step == 0 or lead[other] > 0.1
    for offset, winner in ((-0.01, token), (0.01, other)):
        params = SamplingParams(
            temperature=0,
            max_tokens=step + 1,
            ignore_eos=True,
            allowed_token_ids=[token, other],
            logit_bias={token: bias, other: float(other_bias[other]) + offset},
            **{name: value},
        )
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.outputs[0].token_ids == [token] * step + [winner]
