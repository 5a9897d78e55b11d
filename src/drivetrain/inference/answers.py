"""A language model's answers to prompts: greedy or sampled, a block of prompts at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.core.errors import UserError
from drivetrain.core.step import rng
from drivetrain.data import Data
from drivetrain.inference.inputs import PredictedSample
from drivetrain.inference.predict import NO_ANSWER, Outputs

STREAM = 15  # key of the random numbers for sampling answers


@dataclass
class Answers(Outputs):
    """Writes answers. An answer depends on its prompt, the prompt's number and the seed, not on the division into blocks."""

    most: int = 256  # tokens of an answer
    temperature: float = 0.0  # 0: the likeliest token each time
    stops: Sequence[str] = ()  # texts before which an answer ends, in addition to the ends learnt in training
    seed: int = 0
    _first: int = 0  # number of the next block's first prompt

    def __post_init__(self) -> None:
        if not hasattr(self.loaded.model, "generate"):
            raise UserError(
                f"{type(self.loaded.model).__name__} has no method `generate`, which writes answers: train model=transformers"
            )
        self._texts, ends = Data.of(self.loaded.run).answer_texts(self.loaded.data)
        self._stops = [*ends, *self.stops]
        self._positions: int | None = getattr(self.loaded.model.config, "max_position_embeddings", None)

    def columns(self) -> Sequence[str]:
        """The answer alone."""
        return ["answer"]

    def predict(self, batch: Sequence[PredictedSample]) -> None:
        """Yield the answers to the prompts of a batch, or the reasons for missing ones."""
        for sample in batch:
            sample.error = sample.error or self._problem(sample.x)
        able = {number: sample for number, sample in enumerate(batch, self._first) if sample.error is None}
        self._first += len(batch)
        if able:
            answers = self._written([sample.x for sample in able.values()], torch.tensor([*able]))
            for sample, answer in zip(able.values(), answers, strict=True):
                sample.row, sample.error = ({"answer": answer}, None) if answer is not None else ({}, NO_ANSWER)

    def _problem(self, prompt: torch.Tensor) -> str | None:
        left = self.most if self._positions is None else self._positions - len(prompt)
        if left >= self.most:
            return None
        if left > 0:
            return f"the prompt has {len(prompt)} of the model's {self._positions} positions: give --max-tokens {left} or less"
        return f"the prompt has {len(prompt)} tokens, and the model {self._positions} positions: shorten it"

    def _written(self, prompts: Sequence[torch.Tensor], numbers: torch.Tensor) -> list[str | None]:
        """The answers to left-padded prompts; None if the model's outputs are not numbers."""
        from transformers import GenerationConfig

        device, longest = self.loaded.device, max(map(len, prompts))
        ids, mask = (torch.zeros(len(prompts), longest, dtype=torch.int64, device=device) for _ in range(2))
        for row, real, prompt in zip(ids, mask, prompts, strict=True):
            row[longest - len(prompt) :], real[longest - len(prompt) :] = prompt.to(device), 1
        drawing = Drawing(self.temperature, self.seed, numbers.to(device), longest)
        ending = Ending(self._texts, self._stops, longest, len(prompts))
        config = GenerationConfig(max_new_tokens=self.most, do_sample=False, use_cache=True, pad_token_id=0)
        with self.loaded.computing():
            out: Any = self.loaded.model.generate(  # type: ignore[operator]
                ids, attention_mask=mask, generation_config=config, logits_processor=[drawing], stopping_criteria=[ending]
            )
        are_finite = drawing.are_finite.tolist()
        return [self._cut(self._texts(row.tolist())) if n else None for n, row in zip(are_finite, out[:, longest:], strict=True)]

    def _cut(self, text: str) -> str:
        return text[: min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=len(text))]


@dataclass
class Drawing:
    """Adds noise to logits, so that their maximum is a sample at a temperature: a function of (seed, prompt, token)."""

    temperature: float
    seed: int
    numbers: torch.Tensor  # (n,) the prompts' numbers
    begin: int  # the length of the prompts

    def __post_init__(self) -> None:
        self.are_finite = torch.ones_like(self.numbers, dtype=torch.bool)  # (n,) True if all chosen logits were finite

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.are_finite &= logits.amax(1).isfinite()
        if not self.temperature:
            return logits
        keys = rng.keys(self.seed, ids.shape[1] - self.begin, self.numbers, STREAM).unsqueeze(1)
        each = rng.uniform(self.seed, 0, keys + torch.arange(logits.shape[1], device=logits.device), STREAM)
        noise = -(-each.clamp(min=2.0**-25).log()).log()  # Gumbel noise: the largest sum is a sample from the softmax
        return logits.float() / self.temperature + noise


@dataclass
class Ending:
    """The end of each row's answer: a row ends once it contains one of the stop texts."""

    texts: Callable[[Sequence[int]], str]  # of tokens
    stops: Sequence[str]
    begin: int
    count: int

    def __post_init__(self) -> None:
        self.ended = [False] * self.count
        self.looked_at = max((len(stop.encode()) for stop in self.stops), default=0) + 4  # tokens: each is a byte or more

    def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        for n, row in enumerate(ids[:, max(self.begin, ids.shape[1] - self.looked_at) :].tolist()):
            self.ended[n] = self.ended[n] or any(stop in self.texts(row) for stop in self.stops)
        return torch.tensor(self.ended, device=ids.device)
