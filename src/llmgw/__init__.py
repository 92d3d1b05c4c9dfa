"""llmgw: a handful of machines as one governed, OpenAI-compatible LLM service."""

__version__ = "0.1.0"
