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
    if not equals:
        return override
    inside = re.sub(  # {api_key: abc, ...}
        r"([\w.-]+)(\s*:\s*)([^,{}\[\]]+)",
        lambda match: f"{match[1]}{match[2]}{redact(match[3], match[1])}",
        value,
    )
    return f"{key}={redact(inside, key)}"
