"""Typed, append-only streams of one run: protocols, the file backend, and the hub that opens them."""
