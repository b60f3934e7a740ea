from collections.abc import Callable

import numpy
import openvino
import openvino_genai
from protocol import Batch, serve


def load(model: str, threads: int) -> Callable[[Batch], list[int]]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = 256
    scheduler.max_num_batched_tokens = 2048
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )

    def run(batch: Batch) -> list[int]:
        prompts = [
            openvino.Tensor(numpy.array([request["prompt"]], dtype=numpy.int64))
            for request in batch
        ]
        configs = []
        for request in batch:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = request["max_tokens"]
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        results = pipeline.generate(prompts, configs)
        return [len(result.m_generation_ids[0]) for result in results]

    return run


serve(load)
