"""The only package that knows all parts: it plans, starts, watches and stops whole clusters, and holds the command line."""
