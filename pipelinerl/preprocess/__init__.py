"""The preprocessor: groups in, one training batch per optimizer step out. Imports no torch."""
