"""Conversations whose answers are learnt: JSON lines, or sets that Hugging Face's `datasets` saved to disk; chat templates."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.forking import answer_of, limit_memory
from drivetrain.core.options.allowed import ColumnName
from drivetrain.core.options.option import Count, RunSpec, needs_extra
from drivetrain.data.base import Splits
from drivetrain.data.huggingface import load_from_disk
from drivetrain.data.jsonl import Jsonl, Known, TextLine
from drivetrain.data.text import BEGIN, Conversations
from drivetrain.data.tokenizer import SETTINGS, Some, Tokenizer
from drivetrain.data.untrusted import as_kept

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

MOST_TEMPLATE = 2**16  # characters of a chat template
TEMPLATE_S, MOST_MEMORY = 10.0, 1 << 30  # seconds and bytes for its first two messages

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Instructions(Jsonl):
    """Conversations whose answers the model learns: `messages`, or a prompt and its completion.

    They become text by the chat template of the model's own tokenizer, or else by drivetrain's. Only the tokens of answers are
    targets. A longer conversation is cut at `length` tokens; one that has no answer left is left out. Without `path` there are
    the conversations that ship: numbers in words.
    """

    reads_what = "a file with a conversation on each line, or a folder that save_to_disk of Hugging Face's datasets wrote"
    has_prompts = ships = True
    least_token = BEGIN  # bytes have complements too
    each_token_counts = False

    text: str = field(init=False, default="messages")
    label: str | None = field(init=False, default=None)
    _template: ChatTemplate | None = field(init=False, default=None)
    messages: ColumnName = "messages"
    prompt: ColumnName = "prompt"
    completion: ColumnName = "completion"
    length: Count = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = self.messages
        self._keys = {"messages": self.messages, "prompt": self.prompt, "completion": self.completion}

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        yield from needs_extra("jinja2", "transformers", "data=instructions")
        yield from needs_extra("transformers", "transformers", "data=instructions")
        if any(path and Path(path).is_dir() for path in (self.path, *self.places("test").values())):
            yield from needs_extra("datasets", "datasets", "data=instructions of a folder")
        if "tokens" not in run.loss.takes:
            yield f"{run.named('data')} is for learning answers: set task=instruction, which sets model and loss"

    def exists(self, path: Path) -> bool:
        return path.is_file() or path.is_dir()

    def encode(self, text: str, data: Splits) -> torch.Tensor:
        """Return the tokens of a prompt, up to where its answer begins. Raises DataError."""
        return self._prompt([{"role": "user", "content": text}], data)

    def answer_texts(self, data: Splits) -> tuple[Callable[[Sequence[int]], str], Sequence[str]]:
        return self.kept_tokenizer(data).written, self._kept_template(data).ends

    def _encode_line(self, line: bytes, source: str, number: int, data: Splits, _: slice) -> torch.Tensor:
        entry = self._object(line, source, number, [])
        with _said_of(f"{source}:{number}"):
            return self._prompt(messages_of(entry, self._keys, asks=True), data).unsqueeze(0)

    def _prompt(self, messages: Messages, data: Splits) -> torch.Tensor:
        (tokens,) = self.kept_tokenizer(data)([self._kept_template(data).prompt(messages)])
        if len(tokens) > self.length:
            raise DataError(f"the prompt has {len(tokens)} tokens, and the run has data.length={self.length}: shorten it")
        return tokens.long()

    def _chat(self) -> ChatTemplate:
        """The template: that of the model's own tokenizer, where the data takes that, else drivetrain's."""
        if self._template is None:
            found = ChatTemplate() if self._model is None else ChatTemplate.of(self._model.tokenizer_files()[1])
            if found.text != DEFAULT:  # a stranger's: it may loop for days
                from transformers.utils import chat_template_utils  # noqa: F401 - its import takes longer than a template may

                answer_of(found.try_once, "the chat template of the model's folder", TEMPLATE_S)
            self._template = found
        return self._template

    def _kept_template(self, data: Splits) -> ChatTemplate:
        """The run's template. Raises UserError where it is not that of training any more."""
        template = self._chat()
        with as_kept(SETTINGS):
            if self._model is not None and json.loads(data.files[SETTINGS]).get("chat_template") != template.text:
                raise ValueError(f"its chat template is not that of model.name={self._model.name}, which it was trained with")
        return template

    # --- what is read ---

    def _files(self, path: Path) -> list[Path]:
        return [] if self.path is None else sorted(path.glob("*.arrow")) if path.is_dir() else [path]

    def _about(self) -> dict[str, object]:
        template = self._chat()
        return {**super()._about(), **self._keys, "template": template.text, "special": dict(template.special)}

    def _read(self, path: Path) -> Iterator[TextLine]:
        if self.path is None:
            yield from (self._conversation({self.messages: talk}, "") for talk in exercises())
            return
        if not path.is_dir():
            yield from super()._read(path)
            return
        rows = load_from_disk("data.path", str(path))
        if isinstance(rows, dict):
            raise UserError(
                f"{path} has several splits: set data.path to one, such as {path / next(iter(rows))}, and data.test too"
            )
        for number, row in enumerate(rows.with_format(None), 1):
            yield self._conversation(row, f"{path}, row {number}")

    def _line(self, content: bytes, source: str, number: int) -> TextLine:
        return self._conversation(self._object(content, source, number, []), f"{source}:{number}")

    def _conversation(self, entry: Mapping[str, object], where: str) -> TextLine:
        with _said_of(where):
            text, answers = self._chat().conversation(messages_of(entry, self._keys))
        return TextLine(text, "", answers=answers)

    def _tokens(self, tokenizer: Tokenizer, lines: Sequence[TextLine]) -> Iterator[torch.Tensor]:
        """Yield each conversation's tokens, with one more than are read of it where it is longer.

        A token that is no target is stored as its complement, ~token. Of a conversation without a target nothing is stored.
        """
        for line, (tokens, starts) in zip(lines, tokenizer.located([line.text for line in lines]), strict=True):
            answers = torch.zeros_like(tokens, dtype=torch.bool)
            for begin, end in line.answers:
                answers |= (starts >= begin) & (starts < end)
            stored = torch.where(answers, tokens, ~tokens)[: self.length + 2]
            yield stored if (stored[1 : self.length + 1] >= 0).any() else stored[:0]

    def source(self, known: Known, part: Some) -> Conversations:
        return Conversations(part.documents, self.length, packing=self._packs(), which=part.which)

    def load(self, device: torch.device) -> Splits:
        data = super().load(device)
        train = data.train
        assert isinstance(train, Conversations)
        sizes = train.documents.sizes[train.which]
        if not len(train):
            raise UserError(f"{self.path}: no answer begins within data.length={self.length} tokens: set it to more")
        if cut := int((sizes > self.length + 1).sum()) + int((sizes == 0).sum()):
            logger.info(
                "%d of %d training conversations are longer than data.length=%d tokens, and are cut; %d of them have no answer "
                "left, and are left out",
                cut, len(sizes), self.length, int((sizes == 0).sum()),
            )  # fmt: skip
        if SETTINGS not in data.files:
            return data
        settings = json.dumps({**json.loads(data.files[SETTINGS]), "chat_template": self._chat().text})
        return replace(data, files={**data.files, SETTINGS: settings})


def exercises() -> Iterator[Sequence[dict[str, str]]]:
    """Yield the conversations that ship: the numbers below 1,000, asked for and written in words."""
    for n in range(1000):
        asked = ("Write {} in words.", "What is {} in words?", "Spell {} out, please.")[n % 3].format(n)
        yield [{"role": "user", "content": asked}, {"role": "assistant", "content": f"{in_words(n)}."}]


def in_words(n: int) -> str:
    """Return the words of a number below 1,000."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")
    return f"{ONES[n // 100]} hundred" + (f" and {in_words(n % 100)}" if n % 100 else "")


@contextmanager
def _said_of(where: str) -> Iterator[None]:
    """Add the row number to a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


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
        try:
            named = {name: settings.get(name) for name in SPECIAL}
            special = {name: value["content"] if isinstance(value, Mapping) else value for name, value in named.items() if value}
            text = settings.get("chat_template")
            if isinstance(text, list):  # several by name
                text = next((each["template"] for each in text if each.get("name") == "default"), None)
            found = cls(text or DEFAULT, special)
            "".join([found.text, *special.values()])  # they are texts
        except (AttributeError, KeyError, TypeError):
            raise UserError("the tokenizer_config.json of the model's folder is none that transformers writes") from None
        if len(found.text) > MOST_TEMPLATE:
            raise UserError(f"the chat template has {len(found.text):,} characters: it may have {MOST_TEMPLATE:,}")
        return found

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

    def try_once(self, answer: Callable[[bool], None]) -> None:
        """Write two messages, and answer. For a separate process with limited memory."""
        limit_memory(MOST_MEMORY)
        with suppress(DataError):
            self.prompt([{"role": "user", "content": "question"}, {"role": ANSWERS, "content": "answer"}])
        answer(True)

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
        except (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
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
