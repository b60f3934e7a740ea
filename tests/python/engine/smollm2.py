"""SmolLM2-135M-Instruct; the reference is transformers' float32 run of the dequantised weights."""

from functools import cache

import gguf
import torch
import transformers

from vllm_lite.model_files import find_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village,",
    "def fibonacci(n):",
    "The three primary colours are",
    "In 2026, the year of",
    "Water boils at a temperature of",
    "Dear Sir or Madam,",
    "Q: What is 7 times 8?\nA:",
    "The mitochondria is",
    "SELECT name FROM users WHERE",
    "My favourite recipe begins with",
    "To be, or not to be,",
    "The speed of light is about",
    "import numpy as np\n",
    "Les enfants jouent dans",
    "Roses are red, violets are",
    "The first president of the United States was",
    "Photosynthesis is the process by which",
    "1, 1, 2, 3, 5, 8,",
    "A good way to learn a language is",
    "The largest planet in the solar system",
    "Shakespeare wrote",
    "If x + 3 = 10, then x =",
    "The best thing about winter is",
    "Breaking news:",
    "Ingredients: flour, sugar,",
    "An electron has a charge of",
    "The opposite of hot is",
    "Computer science is the study of",
    "<html>\n<head>\n",
    "She opened the door and saw",
    "The quick brown fox",
]


@cache
def reference_model() -> transformers.LlamaForCausalLM:
    """Read by the gguf package, not by our loader."""
    reader = gguf.GGUFReader(find_model("smollm2").path)
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True,
        attn_implementation="eager",
    )  # fmt: skip
    config.rope_parameters = {"rope_type": "default", "rope_theta": 100000.0}
    names = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            state[f"{names[parts[0]]}.weight"] = values
            continue
        kind = parts[2]
        if kind in ("attn_q", "attn_k"):
            # The file has each head's rotary pairs interleaved; transformers wants them as halves.
            heads = 9 if kind == "attn_q" else 3
            values = values.view(heads, 32, 2, 576).transpose(1, 2).reshape(heads * 64, 576)
        state[f"model.layers.{parts[1]}.{names[kind]}.weight"] = values
    model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def reference_logits(prompt: list[int], output: list[int]) -> torch.Tensor:
    """Float32 ``[len(output), vocab_size]``: the logits from which each of ``output`` is chosen."""
    ids = torch.tensor([prompt + output])
    return reference_model()(ids).logits[0, len(prompt) - 1 : -1].float()
