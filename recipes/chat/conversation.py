"""Conversations out of rows, in the layouts that people use.

| fields of a row | what they hold |
|---|---|
| `messages` | a list of `{role, content}` |
| `conversations` | a list of `{from, value}`, perhaps with `system` beside it |
| `prompt`, `completion` | text, or lists of messages |
| `instruction`, `input`, `output` | text; `input` may be missing or empty |

The first layout that a row has counts. `tools` beside `messages` is given to the template.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""`role` and `content`, and whatever else the template understands, such as `tool_calls`."""

COLUMNS = (
    "messages", "conversations", "system", "tools", "prompt", "completion",
    "instruction", "input", "output",
)  # fmt: skip
ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
"""How roles are called in files, and how templates call them."""


@dataclass(frozen=True)
class Conversation:
    """What was said, and the tools that could be called."""

    messages: list[Message]
    tools: list[Any] | None = None

    @property
    def answers(self) -> list[int]:
        """Which messages are the assistant's."""
        return [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]


def read_conversation(row: Mapping[str, Any]) -> Conversation:
    """The conversation that a row holds. Raises `ValueError` that says what is wrong with it."""
    messages = _messages(row)
    if not messages:
        raise ValueError("a conversation without messages")
    conversation = Conversation(messages, row.get("tools") or None)
    if not conversation.answers:
        raise ValueError("no message of the assistant to learn")
    return conversation


def _messages(row: Mapping[str, Any]) -> list[Message]:
    if (said := row.get("messages")) is not None:
        return _system(row) + _list(said, "messages", "role", "content")
    if (said := row.get("conversations")) is not None:
        return _system(row) + _list(said, "conversations", "from", "value")
    if row.get("prompt") is not None:
        if row.get("completion") is None:
            raise ValueError("a prompt without a completion")
        prompt, completion = (
            _list(row[key], key, "role", "content")
            if isinstance(row[key], list)
            else [_message(role, row[key], {})]
            for key, role in (("prompt", "user"), ("completion", "assistant"))
        )
        return _system(row) + prompt + completion
    if row.get("instruction") is not None:
        if row.get("output") is None:
            raise ValueError("an instruction without an output")
        asked = _message("user", row["instruction"], {})
        if row.get("input"):
            asked["content"] += "\n\n" + _text(row["input"], "input")
        return [*_system(row), asked, _message("assistant", row["output"], {})]
    found = ", ".join(map(repr, row)) or "nothing"
    raise ValueError(
        "none of messages, conversations, prompt and completion, instruction and output, but "
        + found
    )


def _system(row: Mapping[str, Any]) -> list[Message]:
    return [_message("system", row["system"], {})] if row.get("system") else []


def _list(said: Any, name: str, role_key: str, text_key: str) -> list[Message]:
    if not isinstance(said, Sequence) or isinstance(said, str):
        raise ValueError(f"{name} is {type(said).__name__}, where a list is needed")
    messages = []
    for message in said:
        if not isinstance(message, Mapping):
            raise ValueError(f"a message that is {type(message).__name__}, where fields are needed")
        given = {key: value for key, value in message.items() if value is not None}
        if role_key not in given and "role" in given:
            role_key, text_key = "role", "content"
        if role_key not in given:
            raise ValueError(f"a message without {role_key!r}")
        role, text = given.pop(role_key), given.pop(text_key, "")
        messages.append(_message(role, text, given))
    return messages


def _message(role: Any, content: Any, others: Message) -> Message:
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"unknown role {role!r}; there are {', '.join(ROLES)}")
    text = _text(content, "content")
    if not text and not others.get("tool_calls") and ROLES[role] in ("user", "assistant"):
        raise ValueError(f"an empty text of {role}")
    return {"role": ROLES[role], "content": text, **others}


def _text(content: Any, name: str) -> str:
    """Text, or the text of a list of parts of which every one is text."""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{name} is {type(content).__name__}, where text is needed")
    return content
