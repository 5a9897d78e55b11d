"""A recipe's claim is a stranger's text: every kind is read, checked with its line, and written again as it was."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from drivetrain.recipe import claims
from drivetrain.recipe import reader as recipe
from drivetrain.recipe.claims import (
    KINDS,
    Against,
    Claim,
    DataSection,
    DeviceSection,
    Energy,
    Kind,
    Memory,
    Quality,
    Reach,
    Speed,
    Target,
)
from tests.support.refusals import problems_of

HEAD = "defaults:\n  - override /precision: bf16\n  - override /surgery: [channels_last]\n"
GOOD = {
    "speed": "{ratio: 1.91, interval: [1.85, 1.97], against: {precision: fp32, surgery: []}, quality: PASS}",
    "quality": "{metric: accuracy, set: validation, mean: 0.97, n: 3, sd: 0.004, interval: [0.965, 0.975]}",
    "target": "{reach: accuracy>=0.95, reached: 3, n: 3, updates: 300, slowest: 400, seconds: 3.25}",
    "memory": "{peak_mib: 412.5, n: 3}",
    "energy": "{joules: 1500, n: 3}",
    "data": "{hash: deadbeef0123, of: content, samples: 1150}",
    "device": "{kind: cpu, name: 'a chip, 2 threads'}",
    "versions": "{torch: 2.15.0}",
    "seeds": "[1, 2, 3]",
    "measured": '"2026-11-21"',
}
CLAIM = Claim(
    speed=Speed(1.91, (1.85, 1.97), Against({"precision": "fp32", "surgery": []}), "PASS"),
    quality=Quality("accuracy", "validation", 0.97, 3, 0.004, (0.965, 0.975)),
    target=Target("accuracy>=0.95", 3, 3, 300, 400, 3.25),
    memory=Memory(412.5, 3),
    energy=Energy(1500, 3),
    data=DataSection("deadbeef0123", "content", 1150),
    device=DeviceSection("cpu", "a chip, 2 threads"),
    versions={"torch": "2.15.0"},
    seeds=(1, 2, 3),
    measured="2026-11-21",
)


def written(given: dict[str, str] | None = None, head: str = HEAD) -> Path:
    """A recipe file with this claim."""
    file = Path("claimed.yaml")
    parts = GOOD if given is None else given
    file.write_text(head + "claim:\n" + "".join(f"  {key}: {value}\n" for key, value in parts.items()))
    return file


def changed(kind: str, key: str, value: str) -> dict[str, str]:
    """The good claim with another value of one key of a kind; None leaves the key out."""
    import yaml

    found = yaml.safe_load(GOOD[kind]) if GOOD[kind].startswith("{") else {}
    texts = {name: yaml.safe_dump([old], default_flow_style=True).strip()[1:-1] for name, old in found.items()}
    texts[key] = value
    return {**GOOD, kind: "{" + ", ".join(f"{name}: {text}" for name, text in texts.items() if text) + "}"}


# --- reading and writing ---


def test_every_kind_is_read():
    found = recipe.read(written())
    assert found.claim == CLAIM
    assert found.claim.speed.against.lines == {"precision": 5, "surgery": 5}
    assert list(found.claim.kinds()) == list(KINDS) == ["speed", "quality", "target", "memory", "energy"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_may_be_claimed_alone(kind):
    """Without a speed there is no baseline; without several seeds, no interval."""
    file = written({key: GOOD[key] for key in (kind, "device", "versions")}, head="")
    found = recipe.read(file).claim
    assert list(found.kinds()) == [kind]
    assert getattr(found, kind) == getattr(CLAIM, kind)


def test_a_claim_is_written_as_it_is_read():
    odd = replace(
        CLAIM,
        device=DeviceSection("cuda", 'quo"te: #1 {}'),
        versions={"torch": "2.15", "drivetrain": "1e3"},
        speed=Speed(0.5, (0.25, 1.0), Against({"optimizer.eps": 1e-8, "optimizer.betas": [0.9, 0.99], "model.name": "null"})),
        quality=Quality("a: b", "test", -1.5e-7, 1),
        target=Target("loss<=-0.5", 1, 4),
        memory=None,
        energy=None,
        seeds=None,
    )
    for claim in (CLAIM, odd):
        assert not list(claim.problems("claim"))
        Path("again.yaml").write_text(HEAD + claim.text())
        assert recipe.read(Path("again.yaml")).claim == claim
    assert "    n: 3                              # seeds\n" in CLAIM.text()


def test_a_kind_says_itself_in_words():
    assert str(CLAIM) == (
        "1.91 × (1.85 to 1.97) the samples a second of precision=fp32 surgery=[]; quality PASS; "
        "accuracy 0.97 (0.965 to 0.975), validation, 3 runs; accuracy>=0.95 after 300 updates, 3.2 s, 3 of 3 runs; "
        "412 MiB at most, 3 runs; 1,500 J, 3 runs; on a chip, 2 threads with torch 2.15.0, 2026-11-21"
    )


def test_a_new_kind_is_one_class_and_its_field():
    """All else goes by the declared fields: each kind has rules, words and a section of its own."""
    for kind in KINDS:
        value = getattr(CLAIM, kind)
        assert isinstance(value, Kind)
        assert len(claims.rules_of(type(value))) == len(fields(value))


# --- what is wrong ---


@pytest.mark.parametrize(
    ("kind", "key", "value", "told"),
    [
        ("speed", "ratio", "0", "above 0"),
        ("speed", "ratio", ".inf", "above 0"),
        ("speed", "ratio", ".nan", "above 0"),
        ("speed", "ratio", "true", "above 0"),
        ("speed", "ratio", "null", "above 0"),
        ("speed", "ratio", "'2'", "above 0"),
        ("speed", "ratio", "9" * 400, "too large a number"),
        ("speed", "ratio", "2.5", "lies outside claim.speed.interval"),
        ("speed", "ratio", "", "claim.speed has no ratio: samples a second"),
        ("speed", "interval", "[1.97, 1.85]", "[low, high]"),
        ("speed", "interval", "[1.9]", "[low, high]"),
        ("speed", "interval", "[-1, 3]", "above 0"),
        ("speed", "interval", "1.9", "[low, high]"),
        ("speed", "against", "{}", "must be a mapping"),
        ("speed", "against", "fp32", "must be a mapping"),
        ("speed", "against", "", "claim.speed has no against"),
        ("speed", "against", "{trust: [posix]}", "a recipe cannot set 'trust'"),
        ("speed", "against", "{hydra.run.dir: x}", "a recipe cannot set"),
        ("speed", "against", "{model._target_: posix.system}", "never a target"),
        ("speed", "against", "{optimizer.lr: '${oc.env:HOME}'}", "never to the environment"),
        ("speed", "quality", "PASSED", "one of PASS, FAIL, INCONCLUSIVE"),
        ("speed", "quality", "[PASS]", "one of PASS, FAIL, INCONCLUSIVE"),
        ("speed", "ratios", "2", "claim.speed has no 'ratios': did you mean 'ratio'?"),
        ("quality", "metric", "[a]", "a text"),
        ("quality", "set", "train", "one of validation, test"),
        ("quality", "mean", ".nan", "must be a number"),
        ("quality", "mean", "0.9", "lies outside claim.quality.interval"),
        ("quality", "n", "0", "1 or more"),
        ("quality", "n", "2.5", "1 or more"),
        ("quality", "n", "4", "claim.quality.n=4, but claim.seeds are 3"),
        ("quality", "sd", "-1", "0 or more"),
        ("quality", "sd", "", "sd and interval are given if and only if there are several seeds"),
        ("quality", "interval", "", "sd and interval are given if and only if there are several seeds"),
        ("target", "reach", "accuracy", "as accuracy>=0.98"),
        ("target", "reach", "accuracy>0.98", "as accuracy>=0.98"),
        ("target", "reach", "accuracy>=1e999", "as accuracy>=0.98"),
        ("target", "reach", '"\\e[2J>=1"', "all of them printable"),
        ("target", "reached", "4", "is more than claim.target.n=3"),
        ("target", "reached", "1", "a median needs more than half of the seeds"),
        ("target", "slowest", "", "slowest is given if and only if all seeds reached"),
        ("target", "slowest", "0", "1 or more"),
        ("target", "seconds", "-1", "0 or more"),
        ("memory", "peak_mib", "0", "above 0"),
        ("memory", "n", "4", "claim.memory.n=4"),
        ("memory", "peak_mb", "1", "did you mean 'peak_mib'?"),
        ("energy", "joules", "-3", "above 0"),
        ("data", "hash", "'../../etc'", "hex digits"),
        ("data", "hash", "dead", "hex digits"),
        ("data", "of", "''", "a text"),
        ("data", "samples", "0", "1 or more"),
        ("device", "kind", "'CPU 1'", "a device type"),
        ("device", "name", '"\\e[2J"', "a text"),
        ("device", "name", '"a\\nb"', "a text"),
        ("device", "name", "x" * 300, "at most 200"),
        ("device", "name", "", "claim.device has no name"),
    ],
)
def test_what_is_wrong_in_a_kind_is_told_with_its_line(kind, key, value, told):
    file = written(changed(kind, key, value))
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if text.startswith(f"  {kind}: "))
    found = problems_of(recipe.read, file)
    assert any(told in problem for problem in found), found
    for problem in found:
        assert problem.startswith((f"{file}:{line}: ", f"{file}:4: "))
        assert problem.isprintable()
        assert len(problem) < 300


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        *((kind, "3", f"claim.{kind}: must be a mapping of ") for kind in (*KINDS, "data", "device")),
        ("memory", "null", "claim.memory: must be a mapping of peak_mib, n"),
        ("memory", "[1, 2]", "claim.memory: must be a mapping"),
        ("versions", "{torch: 2.15}", "quote what YAML reads as a number"),
        ("versions", "2.15.0", "name → text"),
        ("seeds", "3", "different whole numbers"),
        ("seeds", "[]", "different whole numbers"),
        ("seeds", "[1, 1, 2]", "different whole numbers"),
        ("seeds", "[1, -2, 3]", "different whole numbers"),
        ("seeds", "[1, [2], 3]", "different whole numbers"),
        ("seeds", f"[{', '.join(map(str, range(1200)))}]", "different whole numbers"),
        ("measured", "2026-11-21", "quote it"),
        ("mesured", "x", "did you mean 'measured'?"),
        ("ratio", "1.9", "claim has no 'ratio'"),
        ("x" * 1000, "1", "claim has no 'xxx"),
    ],
)
def test_what_is_wrong_beside_them_is_told_with_its_line(key, value, told):
    file = written({**GOOD, key: value})
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if text.startswith(f"  {key}: "))
    (problem,) = problems_of(recipe.read, file)
    assert told in problem
    assert problem.startswith(f"{file}:{line}: ")
    assert problem.isprintable()
    assert len(problem) < 300


def without(*missing: str) -> dict[str, str]:
    return {key: value for key, value in GOOD.items() if key not in missing}


@pytest.mark.parametrize(
    ("given", "head", "told"),
    [
        (without("device"), HEAD, "claimed.yaml:4: claim has no device: "),
        (without("versions"), HEAD, "claimed.yaml:4: claim has no versions: "),
        (without(*KINDS), HEAD, "claim claims nothing: give one of speed, quality, target, memory, energy"),
        (GOOD, "sweep:\n  precision: [fp32, bf16]\n", "a recipe with sweep: cannot have claim:"),
    ],
)
def test_what_a_claim_needs_is_told(given, head, told):
    (problem,) = problems_of(recipe.read, written(given, head))
    assert told in problem


def test_all_that_is_wrong_is_told_at_once():
    given = {
        "speed": "{ratio: -1, intervall: [1, 2], against: {trust: [a], logger: [b], precision: fp32}}",
        "device": "{kind: cpu, name: 1}",
    }
    told = " ".join(problems_of(recipe.read, written(given)))
    parts = ("claim.speed.ratio=-1", "'interval'?", "claim.device.name=1", "'trust'", "'logger'", "no interval", "no versions")
    for part in parts:
        assert part in told
    assert "claim: must be a mapping of speed" in problems_of(recipe.read, written({}, HEAD + "claim: 2\n#"))[0]


def test_what_was_made_is_held_to_the_same_rules():
    """A claim that is made of a run's files, which are a stranger's too, would be refused by whoever reads it."""
    bad = replace(
        CLAIM, device=DeviceSection("cpu", "\033[2J"), quality=replace(CLAIM.quality, mean=float("nan")), seeds=(1, 1, 2)
    )
    told = list(bad.problems("claim"))
    assert [text.partition("=")[0] for text in told] == [
        "claim.quality.mean",
        "claim.quality.mean",
        "claim.device.name",
        "claim.seeds",
    ]
    assert all(text.isprintable() for text in told)


def test_a_target_is_parsed():
    assert Reach.parse("accuracy>=0.98") == Reach("accuracy", True, 0.98)
    assert Reach.parse("bits_per_byte<=1e-1") == Reach("bits_per_byte", False, 0.1)
    assert [Reach.parse(text) for text in ("accuracy", ">=1", "a>=", "a>=b", "a>=-e", "a=1", "", "a>=1\n")] == [None] * 8
    reach = Reach.parse("loss<=0.5")
    assert (reach.reached(0.5), reach.reached(0.6), str(reach)) == (True, False, "loss<=0.5")
