"""What overrides are written as is what Hydra reads."""

from random import Random

import pytest

from drivetrain.core.horizon import length_problem
from drivetrain.core.overrides import format_value, parse, parse_each

ODD = "\\'\" ${}[](),:=~+-.#%@|/*?!ab0 19eE\n\t\r_é∑\u2028\x1b"
WORDS = [
    "true",
    "False",
    "NULL",
    "nan",
    "Inf",
    "null",
    "1e3",
    "10",
    "0x1",
    "1_000",
    "",
    " ",
    "~",
    "${a}",
    "a=b",
    "\\",
    "\\'",
    "'\\",
    "None",
]


def random_value(random: Random, depth: int = 0) -> object:
    kind = random.randrange(8 if depth < 2 else 6)
    if kind < 3:
        return "".join(random.choice(ODD) for _ in range(random.randrange(9)))
    if kind < 6:
        return random.choice([None, True, 3, -7, 10**400, 1.5, 1e16, 1e-7, -0.0, float("inf"), *WORDS])
    if kind == 6:
        return [random_value(random, depth + 1) for _ in range(random.randrange(3))]
    return {"".join(random.choices("ab_:= ,{}x", k=3)).strip() + "k": random_value(random, depth + 1) for _ in range(2)}


@pytest.mark.parametrize("word", WORDS)
def test_words_stay_text(word):
    assert parse(f"key={format_value(word)}").value() == word


@pytest.mark.parametrize("cases", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_every_value_is_read_as_it_was_written(cases):
    random = Random(cases)
    for _ in range(cases):
        value = random_value(random)
        read = parse(f"key={format_value(value)}").value()
        assert read == value, (value, format_value(value))
        assert repr(read) == repr(value), (value, format_value(value))  # 1 and true are equal


@pytest.mark.parametrize(
    "length", [10**400, float("inf"), float("nan"), -1, 1.5, 1e300, "9" * 400 + "ep", "1e3ep", "ep", "inf", 10**15 + 1]
)
def test_lengths_that_are_none(length):
    (told,) = length_problem("key", length)
    assert "is no length" in told
    assert len(told) < 200


@pytest.mark.parametrize("length", [0, 0.1, 1, 500, 1e6, "5ep", "0.5ep", 10**15])
def test_lengths(length):
    assert not list(length_problem("key", length))


def test_a_number_of_thousands_of_digits_is_a_problem_and_no_error():
    problems: list[str] = []
    assert [text for text, _ in parse_each(["epochs=3", f"seed={'1' * 5000}"], "key=value", problems)] == ["epochs=3"]
    (problem,) = problems
    assert problem.startswith("seed=11111111111111111111… has a number of 5,000 characters")
