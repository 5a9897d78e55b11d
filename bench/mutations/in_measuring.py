# ruff: noqa: E501
"""Faults of measuring: intervals, verdicts, early stopping, the doctor, certify, bisect, claims."""

from __future__ import annotations

from bench.mutations.fault import Fault

INTERVALS = "tests/measure/test_intervals.py"
VERDICTS = "tests/measure/benchmark/test_verdicts.py"
STOPPING = "tests/measure/benchmark/test_stopping.py"
WHOLE_RUN = "tests/measure/benchmark/test_whole_run.py"
SEARCH = "tests/measure/bisect/test_search.py"
THRESHOLDS = "tests/measure/profile/test_thresholds.py"
ATTRIBUTION = "tests/measure/profile/test_attribution.py"
USE = "tests/measure/profile/test_utilization.py"
JUDGE = "tests/measure/certify/test_judge.py tests/measure/certify/test_certify.py"
VERIFY = "tests/measure/claims/test_verify.py tests/measure/claims/test_claims.py"

FAULTS = (
    Fault("interval: the cut is one too far in", "measure/intervals.py", "return k - 1 if k else None", "return k if k else None", INTERVALS),
    Fault("interval: one-sided", "measure/intervals.py", "_wilcoxon_cut(n, (1 - confidence) / 2)", "_wilcoxon_cut(n, 1 - confidence)", INTERVALS),
    Fault("interval: pairs without those with themselves", "measure/intervals.py", "for j in range(i, n))", "for j in range(i + 1, n))", INTERVALS),
    Fault("interval: the deviation of the whole population", "measure/intervals.py", "statistics.stdev(values) if", "statistics.pstdev(values) if", INTERVALS),
    Fault("interval: one degree of freedom too many", "measure/intervals.py", "(1 - confidence) / 2, n - 1))", "(1 - confidence) / 2, n))", INTERVALS),
    Fault("interval: it differs where 1 lies inside", "measure/intervals.py", "return self.low > 1 or self.high < 1", "return self.middle > 1 or self.middle < 1", INTERVALS),
    Fault("verdict: one deviation", "measure/benchmark/noninferiority.py", "MARGIN_DEVIATIONS = 2.0", "MARGIN_DEVIATIONS = 1.0", VERDICTS),
    Fault("verdict: the floor is of the metric's square", "measure/benchmark/noninferiority.py", "MARGIN_FLOOR * abs(sum(before) / len(before))", "MARGIN_FLOOR * abs(sum(before))", VERDICTS),
    Fault("verdict: the smaller margin", "measure/benchmark/noninferiority.py", "self.margin = max(MARGIN_DEVIATIONS * deviation(before)", "self.margin = min(MARGIN_DEVIATIONS * deviation(before)", VERDICTS),
    Fault("verdict: the margin is the arm's own deviation", "measure/benchmark/noninferiority.py", "MARGIN_DEVIATIONS * deviation(before)", "MARGIN_DEVIATIONS * deviation(after)", VERDICTS),
    Fault("verdict: higher is worse", "measure/benchmark/noninferiority.py", "[figure.sign * (a - b) for a, b", "[figure.sign * (b - a) for a, b", VERDICTS),
    Fault("verdict: by the estimate, not by the interval", "measure/benchmark/noninferiority.py", "return float(t.cdf(statistic, n - 1)), float(t.sf(statistic, n - 1))", "return (0.0, 1.0) if beyond <= 0 else (1.0, 0.0)", VERDICTS),
    Fault("verdict: one good figure is enough for a PASS", "measure/benchmark/noninferiority.py", "passing = {n: max(e.p_pass", "passing = {n: min(e.p_pass", VERDICTS),
    Fault("verdict: no Bonferroni", "measure/benchmark/noninferiority.py", "min(1.0, len(a) * min(a))", "min(a)", VERDICTS),
    Fault("verdict: no Holm", "measure/benchmark/noninferiority.py", "level / (len(self.verdicts) - decided)", "level", VERDICTS),
    Fault("verdict: every look has the whole level", "measure/benchmark/noninferiority.py", "level = spending(share) - self.spent", "level = spending(share)", VERDICTS),
    Fault("verdict: a target never reached may PASS", "measure/benchmark/noninferiority.py", "self.censored = sum(self.reached) < len(runs) + len(base)", "self.censored = self.reached[1] < len(base)", VERDICTS),
    Fault("verdict: a failed run is left out", "measure/benchmark/noninferiority.py", "    if failed := next((run for run in runs if run.error), None):\n        return FAIL", "    if failed := next((run for run in runs if run.error and not run.figures.get('x', 1)), None):\n        return FAIL", VERDICTS),
    Fault("early stop: rounds of the baseline that the arm did not have", "measure/benchmark/row.py", "ratio(row.rates, base_rates[: len(row.rates)])", "ratio(row.rates, base_rates[-len(row.rates) :])", STOPPING),
    Fault("early stop: after too few rounds", "measure/benchmark/stopping.py", "if rounds >= MIN_ROUNDS:", "if rounds >= 2:", STOPPING),
    Fault("early stop: while the interval is wide", "measure/benchmark/stopping.py", "found.high < found.low * (1 + WIDTH) ** 2", "found.high < found.low * (1 + WIDTH) ** 20", STOPPING),
    Fault("early stop: half of the rounds are enough", "measure/benchmark/stopping.py", "return slower >= len(pairs) / 2 + 1", "return slower >= len(pairs) / 2", STOPPING + " tests/measure/tune/test_tune.py"),
    Fault("early stop: the baseline is dropped", "measure/benchmark/stopping.py", "yield from (arm for arm in arms[1:] if _is_slower(arm, arms[0], 1.0) or", "yield from (arm for arm in arms if _is_slower(arm, arms[0], 1.0) or", STOPPING + " tests/measure/tune/test_tune.py"),
    Fault("compare: pays after its own start alone", "measure/benchmark/whole_run.py", "mine - theirs for mine, theirs in zip(starts, base", "mine for mine, theirs in zip(starts, base", WHOLE_RUN),
    Fault("compare: a first start, which compiles, counts as a usual one", "measure/benchmark/whole_run.py", "    first, *later = starts\n    return [statistics.median(later), *later] if later else [first]", "    return list(starts)", WHOLE_RUN),
    Fault("compare: the whole run without its start", "core/cost.py", "return self.start + steps * self.step", "return steps * self.step", WHOLE_RUN),
    Fault("compare: waiting is the mean of shares", "measure/benchmark/row.py", "/ sum(b.seconds for b in arm.blocks)", "/ len(arm.blocks)", STOPPING),
    Fault("doctor: waits are told from two per cent on", "measure/profile/diagnose.py", "MIN_WAIT, MIN_SAVING, MIN_LINE, MIN_KNOWN = 0.2, 0.1, 0.1, 0.05", "MIN_WAIT, MIN_SAVING, MIN_LINE, MIN_KNOWN = 0.02, 0.1, 0.1, 0.05", THRESHOLDS),
    Fault("doctor: saving is told late", "measure/profile/diagnose.py", "    if share > MIN_SAVING:\n", "    if share > 3 * MIN_SAVING:\n", THRESHOLDS),
    Fault("doctor: the save at the epoch's end is forgotten", "measure/profile/diagnose.py", "saves = 1 + (profile.updates // every_updates if every_updates else 0)", "saves = profile.updates // every_updates if every_updates else 0", THRESHOLDS),
    Fault("doctor: every evaluation counts", "measure/profile/diagnose.py", "profile.evaluation_s / evaluate_every\n", "profile.evaluation_s\n", THRESHOLDS),
    Fault("doctor: a loop of few operations", "measure/profile/diagnose.py", "line.small_operations >= LOOP_OPERATIONS and", "line.small_operations >= 1 and", THRESHOLDS),
    Fault("doctor: a line counts twice", "measure/profile/diagnose.py", "            spread[line.function].append(line)\n", "            spread[line.function] += [line, line]\n", THRESHOLDS),
    Fault("doctor: small batches are not seen", "measure/profile/diagnose.py", "profile.larger_batch > UNFILLED", "profile.larger_batch > 4 * UNFILLED", THRESHOLDS),
    Fault("doctor: the gain of a larger batch is the whole time", "measure/profile/diagnose.py", "(1 - 1 / profile.larger_batch) / 2", "1 / profile.larger_batch", THRESHOLDS),
    Fault("doctor: ranks are compared with nothing", "measure/profile/diagnose.py", "if lost > MIN_WAIT * total:", "if lost > MIN_WAIT:", THRESHOLDS),
    Fault("doctor: reading in a host costs a CPU its line", "measure/profile/diagnose.py", 'max(0.0 if profile.device == "cpu" else line.share, HOST_READ_SHARE)', "max(line.share, HOST_READ_SHARE)", THRESHOLDS),
    Fault("doctor: threads are told late", "measure/profile/diagnose.py", "if used is None or used.share < MIN_LINE:", "if used is None or used.share < 5 * MIN_LINE:", THRESHOLDS),
    Fault("use: what overlaps counts twice", "measure/profile/utilization.py", "total += max(0.0, stop - max(start, end))", "total += max(0.0, stop - start)", USE),
    Fault("use: a profile's own waiting counts", "measure/profile/utilization.py", "if e.name in SYNCHRONIZING and e.time_range.end < end)", "if e.name in SYNCHRONIZING)", USE),
    Fault("use: copies are computing", "measure/profile/utilization.py", '_union_us(e for e in on_device if not e.name.startswith("Memcpy")) / whole_us', "_union_us(on_device) / whole_us", USE),
    Fault("certify: everything is rounding", "measure/certify/judge.py", "MARGIN = 8.0", "MARGIN = 1e9", JUDGE),
    Fault("certify: the smallest floor of all updates", "measure/certify/judge.py", "max(own.get((before, phase, name), 0.0) for before in range(at + 2))", "min(own.get((before, phase, name), 0.0) for before in range(at + 2))", JUDGE),
    Fault("certify: rounding without a bound is trusted", "measure/certify/judge.py", "if distance <= TRUSTED * rounding))", "))", JUDGE, "shadow"),
    Fault("certify: the last difference is named", "measure/certify/judge.py", "first = min(different, key=", "first = max(different, key=", JUDGE),
    Fault("certify: a layer inside decides", "measure/certify/judge.py", "decides = key[1] not in INSIDE or not key[2] or", "decides = True or", JUDGE),
    Fault("certify: coarser formats are exact", "measure/certify/judge.py", "CLOSE if coarser and not bit_for_bit else EXACT", "CLOSE if coarser and bit_for_bit else EXACT", JUDGE),
    Fault("certify: ranks count their samples again", "measure/certify/plan.py", "weights[-1] += request.weight / ranks", "weights[-1] += request.weight", JUDGE),
    Fault("certify: what only fills up counts as a sample", "measure/certify/plan.py", "        if request.weight:\n            indices", "        if True:\n            indices", JUDGE),
    Fault("bisect: the wrong half", "measure/bisect/search.py", "                bad, high = half, found.effect.middle if", "                good, high = half, found.effect.middle if", SEARCH),
    Fault("bisect: an effect of the other sign is none", "measure/bisect/search.py", "(found.middle - self.middle) * (self.high - self.low) > 0", "found.middle > self.middle", SEARCH),
    Fault("bisect: what diverges is good", "measure/bisect/search.py", "            return found.diverged\n", "            return False\n", SEARCH),
    Fault("bisect: the rest is not searched", "measure/bisect/search.py", "if not self._answer(answer.rest, question):\n                return", "if self._answer(answer.rest, question):\n                return", SEARCH),
    Fault("bisect: causes are not made smallest", "measure/bisect/search.py", "        return self._minimal(cause)\n", "        return Cause(tuple(sorted(cause)), self.tried[cause].effect)\n", SEARCH),
    Fault("bisect: an interval over the middle decides", "measure/bisect/search.py", "return not found.low <= self.middle <= found.high", "return True", SEARCH),
    Fault("bisect: a small difference is one", "measure/bisect/search.py", "return max(abs(found.low), abs(found.high)) < self.measurer.margin", "return min(abs(found.low), abs(found.high)) < self.measurer.margin", SEARCH),
    Fault("bisect: changes that need each other are tried alone", "measure/bisect/changes.py", "steps = itertools.chain(itertools.combinations(waiting, 1), itertools.combinations(waiting, 2))", "steps = iter(itertools.combinations(waiting, 1))", "tests/measure/bisect/test_changes.py"),
    Fault("verify: by the high end of a claim's interval", "measure/claims/verify.py", "row.ratio.high < (1 - TOLERANCE) * speed.interval[0]", "row.ratio.high < (1 - TOLERANCE) * speed.interval[1]", "tests/measure/claims/test_claims.py", "the_judgement"),
    Fault("verify: no tolerance", "measure/claims/verify.py", "row.ratio.high < (1 - TOLERANCE) * speed.interval[0]", "row.ratio.high < speed.interval[0]", "tests/measure/claims/test_claims.py", "the_judgement"),
    Fault("verify: an interval over 1 is faster", "measure/claims/verify.py", "if speed.interval[0] > 1 >= row.ratio.low:", "if speed.interval[0] > 1 >= row.ratio.high:", "tests/measure/claims/test_claims.py", "the_judgement"),
    Fault("verify: spreads are not pooled", "measure/claims/kinds.py", "math.sqrt(squares / freedom * (1 / claimed.n + 1 / again.n))", "math.sqrt(squares / freedom)", "tests/measure/claims/test_verify.py"),
    Fault("verify: one degree of freedom too many", "measure/claims/kinds.py", "freedom = claimed.n + again.n - 2", "freedom = claimed.n + again.n - 1", "tests/measure/claims/test_verify.py"),
    Fault("verify: lower is always better", "measure/claims/kinds.py", "-apart if better(0.0, 1.0) == 1.0 else apart", "apart", "tests/measure/claims/test_verify.py"),
    Fault("verify: the smallest memory counts", "measure/claims/kinds.py", "Memory(rounded(max(peaks)), len(peaks))", "Memory(rounded(min(peaks)), len(peaks))", "tests/measure/claims/test_verify.py"),
    Fault("verify: Fisher's test without its own case", "measure/claims/kinds.py", "for k in range(reached + 1))", "for k in range(reached))", "tests/measure/claims/test_verify.py"),
    Fault("effects: the strictest claim of several", "measure/effects.py", "weakest = max((effect for _, effect in found), key=STRICTNESS.index", "weakest = min((effect for _, effect in found), key=STRICTNESS.index", VERDICTS),
)  # fmt: skip
