"""How generation and training share time: rounds of generate-then-train, and draining before an update."""
