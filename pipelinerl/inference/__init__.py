"""What runs inside a vLLM server: command line, token check, transfer engines, prefix-cache salts."""
