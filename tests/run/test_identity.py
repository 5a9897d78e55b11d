"""How two configs differ."""

from drivetrain.run.identity import differences


def test_a_run_may_become_longer_and_not_shorter():
    assert differences({"epochs": 5, "updates": None}, {"epochs": 9, "updates": None}, set()) == []
    assert differences({"epochs": 5, "updates": None}, {"epochs": 4, "updates": None}, set()) == ["epochs: 5 → 4"]
    assert differences({"epochs": 5, "updates": None}, {"epochs": 5, "updates": 7}, set()) == ["updates: null → 7"]


def test_a_spoilt_length_is_no_error_of_its_own():
    assert differences({"epochs": "many", "updates": None}, {"epochs": 4, "updates": None}, set()) == ["epochs: many → 4"]
