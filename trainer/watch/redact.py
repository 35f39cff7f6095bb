"""Secrets stay out of every file that a run writes."""

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

SECRET = re.compile(
    r"((^|[_.-])((api|access|secret|private|account|auth|signing|encryption|ssh|hub|hf)[_-]?)?key"
    r"|secret|password|passwd|passphrase|credentials?|token)$",
    re.I,
)
COLUMN = re.compile(r"[a-z]+_(key|token)$")
"""Names that end like a secret's and may be none: `data.user_key` is a column, `pad_token` a word."""
OURS = re.compile(
    r"attributes|behaviour|ids|item|label|text|time|user|vector"
    r"|pad|bos|eos|unk|cls|sep|mask|image|video|audio|boi|eoi|start|end|prefix|middle|suffix|fill"
)
"""What such names begin with."""
HIDDEN = "***"
SHORTEST = 8
"""Characters of a secret in the environment; a shorter one would hide innocent text."""


def redact(value: Any, key: str = "") -> Any:
    """`value` with everything under a secret-looking key hidden, at any depth.

    So is what some secret-looking variable of the environment holds, under whatever key.
    """
    if isinstance(value, dict):
        return {k: redact(v, str(k)) for k, v in value.items()}
    if is_secret(key) and value not in (None, ""):
        return HIDDEN
    if isinstance(value, list):
        return [redact(item) for item in value]
    return _without_environment(value) if isinstance(value, str) else value


def redact_override(override: str) -> str:
    """`logging.token=abc` -> `logging.token=***`."""
    key, equals, value = override.partition("=")
    if not equals:
        return _without_environment(override)
    inside = re.sub(  # {api_key: abc, ...}
        r"([\w.-]+)(\s*:\s*)([^,{}\[\]]+)",
        lambda match: f"{match[1]}{match[2]}{redact(match[3], match[1])}",
        value,
    )
    return f"{key}={redact(inside, key)}"


def is_secret(key: str) -> bool:
    """Whether a key's name says that its value is nobody's business."""
    last = key.rpartition(".")[2]
    known = COLUMN.fullmatch(last) and OURS.fullmatch(last.rpartition("_")[0])
    return SECRET.search(key) is not None and not known


def _without_environment(text: str) -> str:
    for secret in _secrets_of(tuple(sorted(os.environ.items()))):
        text = text.replace(secret, HIDDEN)
    return text


@cache
def _secrets_of(environment: tuple[tuple[str, str], ...]) -> list[str]:
    """Values of secret-looking variables, the longest first."""
    variables: Mapping[str, str] = dict(environment)
    found = [v for k, v in variables.items() if is_secret(k) and len(v) >= SHORTEST]
    return sorted(found, key=len, reverse=True)
