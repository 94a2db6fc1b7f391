"""What Prometheus needs to know of a cluster: rules.py writes recording rules and alerts; their tests and scrape configs lie beside it."""
