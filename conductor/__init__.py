"""The front door and global scheduler: OpenAI and gRPC APIs, tokenizer, prefix index, routing, recovery."""
