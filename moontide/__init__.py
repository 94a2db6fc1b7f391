"""The leaf that every part of Moontide shares; it imports nothing of ours but the wire contract."""
