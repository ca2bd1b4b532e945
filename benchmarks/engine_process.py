"""Runs one engine on one model: started by harness.py, prints READY and then one JSON line."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from harness import MAX_OUTPUT, MAX_PROMPT, workload

Requests = list[tuple[list[int], int]]
Generate = Callable[[Requests], list[list[int]]]
STATIC_BATCH = 16


def load_octavo(options: dict[str, Any]) -> Generate:
    from octavo import LLM, SamplingParams

    llm = LLM(
        options["model"],
        dtype=options["dtype"],
        num_threads=options["threads"],
        max_model_len=MAX_PROMPT + MAX_OUTPUT,
        enable_prefix_caching=False,
        owns_process=options["owns_process"],
        quantization=options["quantization"],
    )

    def generate(requests: Requests) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in requests
        ]
        outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    return generate


def load_transformers(options: dict[str, Any]) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(options["threads"])
    dtype = getattr(torch, options["dtype"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).eval()
    model.generation_config = GenerationConfig(pad_token_id=0, do_sample=False)

    def generate_batch(requests: Requests) -> list[list[int]]:
        longest = max(len(prompt) for prompt, _ in requests)
        rows = [[0] * (longest - len(prompt)) + prompt for prompt, _ in requests]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests]
        with torch.inference_mode():
            result = model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max(n for _, n in requests),
            )
        outputs: list[list[int]] = result[:, longest:].tolist()
        return [ids[:n] for ids, (_, n) in zip(outputs, requests, strict=True)]

    def generate(requests: Requests) -> list[list[int]]:
        """Static batches in the order given; each runs until its longest output is complete."""
        outputs: list[list[int]] = []
        for start in range(0, len(requests), STATIC_BATCH):
            outputs += generate_batch(requests[start : start + STATIC_BATCH])
        return outputs

    return generate


def load_openvino(options: dict[str, Any]) -> Generate:
    import numpy as np
    import openvino
    import openvino_genai

    kind = {"float32": "f32", "bfloat16": "bf16"}[options["dtype"]]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_PRECISION_HINT": kind,
        "KV_CACHE_PRECISION": kind,
        "INFERENCE_NUM_THREADS": options["threads"],
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        options["model"], scheduler, "CPU", properties
    )

    def generate(requests: Requests) -> list[list[int]]:
        configs = []
        for _, num_tokens in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = num_tokens
            config.ignore_eos = True
            configs.append(config)
        ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in requests]
        results = pipeline.generate(ids, configs)
        return [list(result.m_generation_ids[0]) for result in results]

    return generate


ENGINES = {
    "octavo": load_octavo,
    "transformers": load_transformers,
    "openvino": load_openvino,
}


def main() -> None:
    options = json.loads(sys.argv[1])
    generate = ENGINES[options["engine"]](options)
    requests = workload(options["num_requests"])
    # The engine is ready once it has answered the shortest possible request.
    generate([(requests[0][0][:1], 1)])
    print("READY", flush=True)
    generate([(prompt[:64], 8) for prompt, _ in requests[:8]])
    cpu, start = time.process_time(), time.perf_counter()
    token_ids = generate(requests)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu_seconds": time.process_time() - cpu,
                "peak_rss_mb": peak,
                "token_ids": token_ids,
            }
        )
    )


if __name__ == "__main__":
    main()
