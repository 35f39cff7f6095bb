"""A conversation in tokens, and which of them the assistant wrote.

Three ways, the first that the tokenizer allows:

1. *marks*: the tokenizer's template marks what the assistant writes with `{% generation %}`.
2. *prefixes*: the answer to a prompt is what the template adds to it: the conversation up to the
   answer minus the conversation before it with the generation prompt. This needs the one to begin
   with the other, which is checked for every answer. A template that rewrites earlier turns (by
   dropping their thoughts, say) makes of one conversation several documents, one an answer, each as
   the model meets it when it answers.
3. *plain*: each turn is its role's name, a line break, its text, and the id that closes documents.
   Text cannot pretend to be a turn, since that id is no text. For bytes, and by `plain`.

Only what the assistant writes is learnt, with the token that closes its turn.
"""

import hashlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import jinja2
import numpy as np
from numpy.typing import NDArray

from recipes.chat.conversation import Conversation, Message
from recipes.task import DataError
from recipes.text.tokenizers import FolderTokenizer, Tokenizer

PLAIN = "plain"
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
)  # fmt: skip
"""What a template may raise for a conversation that it was not written for."""

Tokens = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Token ids, and for each whether the assistant wrote it."""


class Template(Protocol):
    """Turns conversations into tokens."""

    fingerprint: str
    """Equal fingerprints mean equal tokens from equal conversations."""

    def tokens(self, conversation: Conversation) -> Iterator[Tokens]:
        """One document, or one an answer. Raises `ValueError` that says what cannot be."""
        ...


class PlainTemplate:
    """See the third way above."""

    fingerprint = "plain 1"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def tokens(self, conversation: Conversation) -> Iterator[Tokens]:
        """See `Template`."""
        texts = []
        for message in conversation.messages:
            if message.get("tool_calls"):
                raise ValueError("tool calls, which the plain template cannot show")
            texts += [f"{message['role']}\n".encode(), message["content"].encode()]
        encoded = [np.asarray(ids, dtype=np.int64) for ids in self.tokenizer.encode(texts)]
        ids, learnt = [], []
        for number, message in enumerate(conversation.messages):
            head, text = encoded[2 * number : 2 * number + 2]
            turn = np.append(text, self.tokenizer.end)
            ids += [head, turn]
            learnt += [
                np.zeros(len(head), bool),
                np.full(len(turn), message["role"] == "assistant"),
            ]
        yield np.concatenate(ids), np.concatenate(learnt)


class JinjaTemplate:
    """The first and the second way: a template of a transformers tokenizer."""

    def __init__(self, tokenizer: FolderTokenizer, template: str) -> None:
        self.hf: Any = tokenizer.hf
        self.template = template
        if not self.hf.is_fast:
            raise DataError(
                f"data.tokenizer={tokenizer.path} does not say where its tokens lie in the text: set "
                "data.tokenizer to one with a tokenizer.json, or data.chat_template=plain"
            )
        self.fingerprint = f"jinja 1 {hashlib.blake2b(template.encode()).hexdigest()}"

    def tokens(self, conversation: Conversation) -> Iterator[Tokens]:
        """See `Template`."""
        if MARK.search(self.template):
            yield self._marked(conversation)
            return
        answers = conversation.answers
        ends = [self._render(conversation, answer + 1) for answer in answers]
        spans = []
        for answer, upto in zip(answers, ends, strict=True):
            prompt = self._render(conversation, answer, add_generation_prompt=True)
            if not upto.startswith(prompt) or upto == prompt:
                raise ValueError(
                    f"message {answer + 1} does not begin with the chat template's generation prompt, "
                    "so what the assistant writes cannot be told: mark it with {% generation %} in a "
                    "template of your own (data.chat_template=FILE)"
                )
            spans.append((len(prompt), len(upto)))
        whole = ends[-1]
        prefixes = all(whole.startswith(end) for end in ends)
        ordered = all(a[1] <= b[0] for a, b in pairwise(spans))
        if prefixes and ordered:
            yield self._spanned(whole, spans)
        else:  # earlier turns are rewritten
            for text, span in zip(ends, spans, strict=True):
                yield self._spanned(text, [span])

    def _marked(self, conversation: Conversation) -> Tokens:
        try:
            found = self.hf.apply_chat_template(
                conversation.messages,
                tools=conversation.tools,
                chat_template=self.template,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template refuses it ({error})") from error
        ids, learnt = (
            np.asarray(found["input_ids"]),
            np.asarray(found["assistant_masks"], dtype=bool),
        )
        if not learnt.any():
            raise ValueError("the chat template marks nothing of it with {% generation %}")
        return ids, learnt

    def _render(self, conversation: Conversation, upto: int, **keywords: Any) -> str:
        messages: list[Message] = conversation.messages[:upto]
        try:
            text = self.hf.apply_chat_template(
                messages,
                tools=conversation.tools,
                chat_template=self.template,
                tokenize=False,
                **keywords,
            )
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template refuses it ({error})") from error
        return str(text)

    def _spanned(self, text: str, spans: list[tuple[int, int]]) -> Tokens:
        """Tokens of `text`; those that begin in a span are learnt, so none has a prompt's text."""
        found = self.hf(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = np.asarray([begin for begin, _ in found["offset_mapping"]], dtype=np.int64)
        learnt = np.zeros(len(begins), bool)
        for first, last in spans:
            learnt |= (begins >= first) & (begins < last)
        if not learnt.any():
            raise ValueError("no token begins in the assistant's text")
        return np.asarray(found["input_ids"], dtype=np.int64), learnt


def load_template(tokenizer: Tokenizer, wanted: str | None) -> Template:
    """The template that `data.chat_template` means. Raises `DataError` if there is none."""
    if wanted == PLAIN or (wanted is None and not isinstance(tokenizer, FolderTokenizer)):
        return PlainTemplate(tokenizer)
    if not isinstance(tokenizer, FolderTokenizer):
        raise DataError(
            f"data.chat_template={wanted} needs a tokenizer: set data.tokenizer, or "
            "data.chat_template=plain"
        )
    if wanted is None:
        try:
            return JinjaTemplate(tokenizer, tokenizer.hf.get_chat_template())
        except ValueError as error:
            raise DataError(
                f"data.tokenizer={tokenizer.path} has no chat template: set data.chat_template to a "
                "file with one, or to plain"
            ) from error
    try:
        text = Path(wanted).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template={wanted} cannot be read ({error}): set it to a file with a Jinja "
            "template, or to plain"
        ) from error
    tokenizer.hf.chat_template = text  # so that the tokenizer of an export carries it
    return JinjaTemplate(tokenizer, text)
