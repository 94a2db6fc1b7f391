"""The distributed KV store: names, bytes and places of KV blocks. Knows no model code and never imports torch."""
