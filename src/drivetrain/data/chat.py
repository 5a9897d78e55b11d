"""Conversations as text, by a tokenizer's chat template, and which parts of it are answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from drivetrain.core.errors import DataError

Messages = Sequence[Mapping[str, Any]]  # each with `role` and `content`, as chat templates take them
ANSWERS = "assistant"  # the role whose messages are answers
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")  # the names of tokens that templates write
# Where a tokenizer has no template: each message below its role, and its own end of text after an answer.
DEFAULT = (
    "{{ bos_token }}{% for message in messages %}{{ '### ' + message.role + '\\n' + message.content }}"
    "{{ (eos_token or '<|end|>') if message.role == 'assistant' else '' }}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template (jinja, run in a sandbox by transformers), with the special tokens that it writes by name."""

    text: str = DEFAULT
    special: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ChatTemplate:
        """Return the template in a tokenizer's settings; else the default."""
        named = {name: settings.get(name) for name in SPECIAL}
        special = {name: value["content"] if isinstance(value, Mapping) else value for name, value in named.items() if value}
        text = settings.get("chat_template")
        if isinstance(text, list):  # several by name
            text = next((each["template"] for each in text if each.get("name") == "default"), None)
        return cls(text or DEFAULT, special)

    def prompt(self, messages: Messages) -> str:
        """Return the text of messages, up to where an answer begins. Raises DataError."""
        return self._rendered(messages, asks=True)[0]

    def conversation(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the spans of its answers, each with what the template writes after it.

        The template's marks of answers, {% generation %}, say where they are; else they are what an answer adds to the text
        of the messages before it. Raises DataError.
        """
        text, marked = self._rendered(messages)
        if self._marks:
            return text, marked
        spans = []
        for n, message in enumerate(messages):
            if message.get("role") == ANSWERS:
                before, after = self.prompt(messages[:n]), self._rendered(messages[: n + 1])[0]
                if not (text.startswith(after) and after.startswith(before)):
                    raise DataError(
                        "the chat template does not keep its beginning as a conversation goes on, so where answers are cannot "
                        "be told: mark them in the template, with {% generation %} … {% endgeneration %}"
                    )
                spans.append((len(before), len(after)))
        return text, spans

    @cached_property
    def ends(self) -> list[str]:
        """The texts that end an answer: what the template writes there, and the end of a text."""
        text, spans = self.conversation([{"role": "user", "content": "question"}, {"role": ANSWERS, "content": "answer"}])
        after = text[: spans[-1][1]].rpartition("answer")[2].strip() if spans else ""
        return [end for end in dict.fromkeys([after, self.special.get("eos_token", "")]) if end]

    @property
    def _marks(self) -> bool:
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None

    def _rendered(self, messages: Messages, asks: bool = False) -> tuple[str, list[tuple[int, int]]]:
        import jinja2
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        marks = self._marks and not asks
        try:
            about = {"chat_template": self.text, "add_generation_prompt": asks, "return_assistant_tokens_mask": marks}
            texts, spans = render([list(messages)], **about, **self.special)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"the chat template refuses these messages: {error}") from None
        return texts[0], spans[0] if marks else []


def messages_of(entry: Mapping[str, Any], keys: Mapping[str, str], asks: bool = False) -> Messages:
    """Return the messages of a row: those under its key `messages`, or its prompt and its completion.

    Where it `asks` for an answer, an answer at its end is left out. Raises DataError.
    """
    if keys["messages"] in entry:
        found = entry[keys["messages"]]
    elif keys["prompt"] in entry:
        found = _turn(entry[keys["prompt"]], "user")
        if not asks:
            if keys["completion"] not in entry:
                raise DataError(f"it has a '{keys['prompt']}' and no '{keys['completion']}' (data.completion)")
            found = [*found, *_turn(entry[keys["completion"]], ANSWERS)]
    else:
        raise DataError(
            f"it has neither '{keys['messages']}' nor '{keys['prompt']}' and '{keys['completion']}', but {', '.join(entry)}: set "
            "data.messages, or data.prompt and data.completion, to its keys"
        )
    good = isinstance(found, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in found)
    if not (good and found and all(isinstance(message.get("content") or "", str) for message in found)):
        raise DataError('messages are a list of objects with two texts, such as {"role": "user", "content": "…"}')
    if asks and found[-1]["role"] == ANSWERS:
        found = found[:-1]
    if not asks and not any(message["role"] == ANSWERS for message in found):
        raise DataError(f"none of its messages is an answer, of the role '{ANSWERS}'")
    return list(found)


def _turn(given: object, role: str) -> Any:
    return [{"role": role, "content": given}] if isinstance(given, str) else given
