"""Former names are refused, and the answer gives the present one."""

import pytest

from drivetrain.config import catalog
from drivetrain.config.renamed import RENAMED
from drivetrain.core.errors import UserError
from drivetrain.launch.job import prepare


@pytest.mark.parametrize(("former", "present"), RENAMED.items())
def test_a_former_name_leads_to_the_present_one(former, present):
    override = former if "=" in former else f"{former}=1"
    with pytest.raises(UserError) as refused:
        prepare([override])
    assert any(override in problem and f"it is called {present} now" in problem for problem in refused.value.problems)


@pytest.mark.parametrize("name", [name for pair in RENAMED.items() for name in pair])
def test_present_names_exist_and_former_ones_do_not(name):
    group, _, rest = name.replace("=", ".").partition(".")
    options = catalog.options()[group]
    known = options if "=" in name else {key for option in options for key in catalog.option_keys(group, option)}
    assert (rest in known) == (name in RENAMED.values())


def test_a_former_key_of_another_option():
    """The option that has the present key is named, too; a misspelt option does not hide it."""
    with pytest.raises(UserError, match="now, and batch=accumulate"):
        prepare(["batch.steps=2"])
    with pytest.raises(UserError, match=r"it is called batch\.accumulation_steps now"):
        prepare(["batch=acumulate", "batch.steps=2"])
