"""One pipeline stage of one model over paged K/V: shared by prefill and decode nodes. Knows nothing of the network."""
