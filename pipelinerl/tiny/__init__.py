"""A model small enough to sample and train on a CPU: its tokenizer, its weights, and a short supervised warm-up."""
