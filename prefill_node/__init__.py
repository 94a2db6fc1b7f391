"""A prefill group: Chunked Pipeline Parallelism (CPP) over several stages."""
