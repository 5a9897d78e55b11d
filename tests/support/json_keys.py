"""The keys of the JSON files that measuring commands write: others read them, so that they change on purpose alone."""

from collections.abc import Iterator
from typing import Any

# Mappings whose keys are names: of metrics, of packages, of settings.
NAMED = ("degradation", "margin", "figures", "memory", "shares", "data")
ENVIRONMENT = "environment"  # run/environment.py's own; tests/run has it

RUN = "seed samples figures censored error facts"
FACTS = "seed set figures seconds_to_target updates_to_target reach peak_mib joules data kind device resumed error fold"
VERDICT = "outcome reason metric runs degradation margin decides effect claims confidence differs"
ROW = (
    "label overrides error ratio samples_per_second step_ms_p50 step_ms_p95 data_wait peak_memory_bytes peaks_bytes compile_s "
    "starts_s start_s first_start_s pays_after first_pays_after run_updates runs_s run_s whole_run global_batch samples device "
    "device_type rates stopped_after out_of_time verdict"
)
COMPARE_SETTINGS = "seeds max_seeds quality_s judge target asks margin rounds block_s quality"
COMPARE = "rows notes overrides settings environment seconds subject target order"
FINDING = "update phase name difference floor ratio differs"

FORECAST = (
    "device source ranks micro_batch micro_batches peak_bytes tensors_bytes memory memory_limit_bytes fits flops "
    "moved_bytes operations step_s compute_s data_wait_s network_s shares timed_share limit updates run_s "
    "samples_per_second data_bytes_per_second largest_micro_batch what_if notes"
)
CERTIFY = "answer bit_for_bit same_in_float64_only first phases lines settings not_looked_into roundoff margin"
BISECT = "good bad outcome unit causes whole rest suspects reason notes changes tried comparisons seconds settings environment"


def paths(found: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Each mapping in the content of a file: where it stands, and its keys."""
    if isinstance(found, dict) and name not in (ENVIRONMENT, *NAMED):
        yield name, " ".join(found)
    values = found.items() if isinstance(found, dict) else [(name, each) for each in found] if isinstance(found, list) else ()
    for key, value in values:
        if key != ENVIRONMENT:
            yield from paths(value, key)


def check(found: Any, **keys: str) -> None:
    """Fail where a mapping of this name has other keys; `top` is the whole file."""
    seen = dict(paths(found, "top"))
    for name, expected in keys.items():
        assert seen.get(name) == expected, name


def check_compare(found: Any, settings: str = "") -> None:
    """The content of compare.json, or of one comparison in another file; with trained variants also what they ended with."""
    check(found, top=COMPARE, settings=COMPARE_SETTINGS + settings, rows=ROW)
    if found["settings"]["quality"]:
        check(found, verdict=VERDICT, runs=RUN, facts=FACTS)
