"""transformers with torch's scaled dot-product attention, bfloat16: run_transformers.py MODEL_DIR THREADS"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import transformers
from protocol import serve
from transformers import AutoModelForCausalLM

MODEL_DIR, THREADS = sys.argv[1], int(sys.argv[2])


def load() -> Callable[[list[int]], int]:
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def first_token(token_ids: list[int]) -> int:
        answer = model.generate(
            torch.tensor([token_ids]), attention_mask=torch.ones(1, len(token_ids)), max_new_tokens=1, do_sample=False
        )
        return int(answer[0, -1])

    return first_token


if __name__ == "__main__":
    serve(
        load,
        engine=lambda: f"transformers {transformers.__version__}, torch {torch.__version__}",
        precision="bfloat16",
        threads=THREADS,
    )
