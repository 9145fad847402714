"""The preprocessor: groups in, one batch per optimizer step out. No torch."""
