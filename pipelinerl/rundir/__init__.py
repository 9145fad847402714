"""The directory of one run: its layout and identity, durable writes, and heartbeats. Knows no role."""
