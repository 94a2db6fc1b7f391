"""How bytes move between a process and the pool: one seam (`base`), the real store (`mooncake`), the in-process twin (`memory`)."""
