"""Hydra reads an override as the value that was written."""

import os
import shlex
from random import Random

import pytest
from hydra.errors import HydraException

from drivetrain.core.options.horizon import length_problem
from drivetrain.core.options.overrides import format_value, parse, parse_each, redact

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


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("output_dir=/tmp/jörg", "/tmp/jörg"),
        ("recipe=ré.yaml", "ré.yaml"),
        ("data.path=C:/Übung 2/é.csv", "C:/Übung 2/é.csv"),
        ("data.columns=[größe, b,'ä,b']", ["größe", "b", "ä,b"]),
        ('x="ö"', "ö"),
        ("x='it\\'s ö'", "it's ö"),
        ("x={a: ö, b: 1}", {"a": "ö", "b": 1}),
        ("x={a: http://ö}", None),
        ("+x=日本語", "日本語"),
        ("x=~/ö", os.path.expanduser("~/ö")),
        ("x='${a}ö'", "${a}ö"),
    ],
)
def test_letters_beyond_ascii_need_no_quotes(written, value):
    if value is None:  # a mapping's text with a colon has quotes of its own
        with pytest.raises(HydraException):
            parse(written)
    else:
        assert parse(written).value() == value


def test_letters_beyond_ascii_in_a_sweep():
    assert [str(getattr(v, "text", v)) for v in parse("x=ä,b,'c,ö'").sweep_iterator()] == ["ä", "b", "c,ö"]
    assert [str(getattr(v, "text", v)) for v in parse("x=choice(ä, b)").sweep_iterator()] == ["ä", "b"]


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


@pytest.mark.parametrize("key", ["logger.wandb.api_key", "my.Token", "password", "logger.mlflow.client_secret"])
def test_the_value_of_a_secret_is_not_written(key):
    assert redact(f"{key}=hunter2") == f"{key}=<redacted>"
    assert redact("data.tokens=true") == "data.tokens=true"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("x=[ä\\,b(]", "is not of the form key=value: put texts with letters such as ä in quotes"),
        *((f"key={value}", "more than 8 deep")
          for value in ("[" * 2000 + "]" * 2000, "{a: " * 300 + "1" + "}" * 300, "[1,[[[[[[[[2]]]]]]]]]", "'[]'," + "f(" * 9)),
        ("model.target=" + "a." * 50_000 + "b",
         f"{'model.target=' + 'a.' * 13}a… has 100,014 characters: no override may have more than 32,768"),
    ],
    ids=range(6),
)  # fmt: skip
def test_what_cannot_be_parsed_is_refused(word, said):
    problems: list[str] = []
    assert list(parse_each([word], "key=value", problems)) == []
    assert said in problems[0]


def test_brackets_in_quotes_are_text():
    problems: list[str] = []
    ((_, parsed),) = parse_each([r"""key=["[[[[[[[[[[[","a\"[[[[[[[[[", '((((((((((']"""], "key=value", problems)
    assert parsed.value() == ["[[[[[[[[[[[", 'a"[[[[[[[[[', "(((((((((("]


@pytest.mark.parametrize(
    "word",
    [
        "model.unfreeze={'*bias': 1}", 'model.unfreeze={"*bias": 1}', "model.unfreeze={'a b': {'c': 'x'}}",
        "data.path=a-{000..009}.tar",
        """data.path=it's-{000..009}.tar""",
    ],
)  # fmt: skip
def test_what_a_refusal_of_braces_says_to_type_is_taken(word):
    problems = []
    assert not [*parse_each([word], "key=value", problems)]
    _, _, said = problems[0].rpartition(", as ")
    (typed,) = shlex.split(said)
    ((_, parsed),) = parse_each([typed], "key=value", problems[:0])
    assert parsed.key_or_group == word.partition("=")[0]
