"""Several GPUs give the tokens of one, whatever is captured, fused or dealt out on the way."""

from __future__ import annotations

import pytest
import torch
from sharded import model_for
from test_tensor_parallel import NUM_TOKENS, PROMPTS, compare, params, run_all

from octavo import LLM
from octavo.config import ModelImpl
from octavo.outputs import RequestOutput

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


NATIVE = [(name, "native") for name in ("gpt2", "opt-350m", "llama3", "qwen2", "olmo2")]
# Of the last, all ranks project all heads.
OTHERS = [(name, "transformers") for name in ("llama3", "gpt_oss", "phi3")]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("num_gpus", [2, 4])
@pytest.mark.parametrize(("name", "model_impl"), NATIVE + OTHERS)
def test_the_same_tokens(name: str, model_impl: ModelImpl, num_gpus: int, graphs: bool) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    directory = model_for(name, num_gpus)
    assert directory is not None
    results: list[list[RequestOutput]] = []
    for size in (1, num_gpus):
        with LLM(
            str(directory),
            device="cuda",
            model_impl=model_impl,
            dtype="float32",
            tensor_parallel_size=size,
            cuda_graphs=graphs,
            num_blocks=400,
            max_num_seqs=32,
            max_model_len=80,
        ) as llm:
            outputs = run_all(llm)
            # Many rows at once, all of one kind, so that each kind of graph draws for them.
            for asked in (params(temperature=0), params(temperature=0.9), params(top_p=0.9)):
                outputs += llm.generate(PROMPTS * 6, asked, use_tqdm=False)
            results.append(outputs)
    compare(results[1], results[0])
    assert all(len(each.outputs[0].token_ids) == NUM_TOKENS for each in results[1][-24:])
