"""Secrets stay out of every file that a run writes."""

import re
from typing import Any

SECRET = re.compile(r"(^|[_.-])(api_?key|key|token|secret|password|passwd|credentials?)$", re.I)
HIDDEN = "***"


def redact(value: Any, key: str = "") -> Any:
    """`value` with everything under a secret-looking key hidden, at any depth."""
    if isinstance(value, dict):
        return {k: redact(v, str(k)) for k, v in value.items()}
    if SECRET.search(key) and value not in (None, "") and not key.endswith("text_key"):
        return HIDDEN
    if isinstance(value, list):
        return [redact(item) for item in value]
    return value


def redact_override(override: str) -> str:
    """`logging.token=abc` -> `logging.token=***`."""
    key, equals, value = override.partition("=")
    return f"{key}{equals}{redact(value, key)}" if equals else override
