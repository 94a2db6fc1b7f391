"""Send one prompt to a conductor and fail unless text comes back."""

import json
import os
import sys
import urllib.request


def main(url: str, model: str, prompt: str, max_tokens: int, timeout_s: float) -> int:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("MOONTIDE_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        answer = json.load(response)
    print(json.dumps(answer))
    return 0 if answer["choices"][0]["text"] and answer["usage"]["completion_tokens"] > 0 else 1


if __name__ == "__main__":
    url, model, prompt, max_tokens, timeout_s = sys.argv[1:]
    sys.exit(main(url, model, prompt, int(max_tokens), float(timeout_s)))
