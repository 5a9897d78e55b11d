"""Texts to tokens: the bytes of UTF-8, or byte pairs by the tokenizers library."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from drivetrain.core.errors import UserError
from drivetrain.core.files import parse_json
from drivetrain.core.lazy import torch
from drivetrain.core.typed import fits

LISTS = ("vocab", "merges")  # of a model of byte pairs; the rest are settings
SWITCHES = dict[str, bool | None]


class Tokenizer(Protocol):
    """Turns texts into tokens, numbers from 0 to `size` − 1."""

    size: int

    def token_bytes(self) -> torch.Tensor | None:
        """Return the bytes of text that each token stands for (size,); None: a token is a byte."""

    def __call__(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """Return each text's tokens, int (length,)."""

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text that tokens stand for."""

    def to_json(self) -> str:
        """Return the tokenizer as text, to be kept with the run."""


class Bytes:
    """A token for each byte of a text's UTF-8."""

    size = 256

    def token_bytes(self) -> torch.Tensor | None:
        return None

    def __call__(self, texts: Sequence[str]) -> list[torch.Tensor]:
        encoded = [text.encode() for text in texts]
        all_bytes = torch.frombuffer(bytearray(b"".join(encoded) + b"."), dtype=torch.uint8)[:-1]  # torch takes no empty buffer
        return list(all_bytes.split([len(content) for content in encoded]))

    def text(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def to_json(self) -> str:
        return '{"model": {"type": "bytes"}}\n'


class BytePairs:
    """A tokenizer of the tokenizers library (Hugging Face), which its file, tokenizer.json, describes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.size: int = tokenizer.get_vocab_size()

    def __call__(self, texts: Sequence[str]) -> list[torch.Tensor]:
        try:
            with _errors_of_the_library():
                encoded = [text.ids for text in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        except ValueError as error:
            raise UserError(f"the tokenizer cannot encode a text: {error}") from None
        tokens = torch.tensor(list(itertools.chain.from_iterable(encoded)), dtype=torch.int32)
        return list(tokens.split([len(text) for text in encoded]))

    def token_bytes(self) -> torch.Tensor | None:
        texts = (self.tokenizer.decode([token]) for token in range(self.size))
        if self.tokenizer.decoder is None or "ByteLevel" not in type(self.tokenizer.decoder).__name__:
            return torch.tensor([max(1, len(text.encode())) for text in texts])
        # A byte-level token is written with one character for each of its bytes.
        return torch.tensor([len(self.tokenizer.id_to_token(token)) for token in range(self.size)])

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    def to_json(self) -> str:
        return str(self.tokenizer.to_str())

    @classmethod
    def trained(cls, texts: Iterable[str], size: int) -> BytePairs:
        """Return a byte-level BPE tokenizer of at most `size` tokens, trained on texts: the same texts give the same one."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()  # all bytes: no text has a token that is not known
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def loaded(cls, path: Path) -> BytePairs:
        """Return the tokenizer of a file, such as tokenizer.json. Raises UserError."""
        from tokenizers import Tokenizer

        try:
            with _errors_of_the_library():
                return cls(Tokenizer.from_file(str(path)))
        except ValueError as error:
            raise UserError(f"data.tokenizer_file={path} is no tokenizer of the tokenizers library: {error}") from None


def from_json(text: str, own_file: Path | None = None) -> Tokenizer:
    """Return the tokenizer that `to_json` wrote. Raises ValueError for one with parts that drivetrain does not train.

    A run may come from a stranger, and some parts of the library take any time and memory, or crash. A text with such parts is
    read only where the operator's own file of a tokenizer has the same content.
    """
    if text == Bytes().to_json():
        return Bytes()
    if own_file is not None and own_file.is_file() and (own := BytePairs.loaded(own_file)).to_json() == text:
        return own
    if (wrong := _foreign_part(parse_json(text))) is not None:
        raise ValueError(f"its {wrong} is none that drivetrain trains: give the file that it was by data.tokenizer_file")
    from tokenizers import Tokenizer

    with _errors_of_the_library():
        return BytePairs(Tokenizer.from_str(text))


def _foreign_part(content: Any) -> str | None:
    """The first part of a file of the tokenizers library that is not as `BytePairs.trained` makes it."""
    if not isinstance(content, dict):
        return "content"
    good = {name: not part for name, part in content.items() if name != "version"}  # most are null
    good |= {name: _is_plain(content.get(name), "ByteLevel") for name in ("pre_tokenizer", "decoder")}
    good["model"] = _is_byte_pairs(content.get("model"))
    return next((name for name, is_good in good.items() if not is_good), None)


def _is_byte_pairs(model: Any) -> bool:
    if not isinstance(model, dict):
        return False
    tokens: Any = model.get("vocab")
    if not (fits(tokens, dict[str, int]) and sorted(tokens.values()) == list(range(len(tokens)))):
        return False
    return isinstance(model.get("merges"), list) and _is_plain({k: v for k, v in model.items() if k not in LISTS}, "BPE")


def _is_plain(part: Any, kind: str) -> bool:
    """Whether it is this part, and each of its settings is on, off or null."""
    return isinstance(part, dict) and part.get("type") == kind and fits({k: v for k, v in part.items() if k != "type"}, SWITCHES)


@contextlib.contextmanager
def _errors_of_the_library() -> Iterator[None]:
    """Raise ValueError for what the library raises: plain Exceptions, and PanicException, which is none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(next(iter(str(error).splitlines()), type(error).__name__)) from None
