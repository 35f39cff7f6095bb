"""Text for language models: documents, tokens, packed sequences."""
