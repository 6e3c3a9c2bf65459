"""Contests: contenders do the same work in turn, and the ratios of their times are printed.

    pip install -e '.[examples,test,peers]'
    pytest -n 0 benchmarks/speed

A turn runs every contender once, so that what else the machine does falls on all of them; a ratio is of two times of the
same turn. `--turns` says how many turns, `-k` which contests.
"""

import functools
import os
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

os.environ["XLA_FLAGS"] = ""  # the tests' own would slow it down


class Contest(NamedTuple):
    """Contenders at the same work.

    Attributes
    ----------
    contenders
        By name, what makes the work ready: returns a function that does it, waits until it is done and returns how much
        was done. The first is this library.
    unit
        Of what is counted.
    targets
        For a contender, the least ratio of its time to the library's that is aimed at.
    """

    contenders: dict[str, Callable[[], Callable[[], float]]]
    unit: str
    targets: dict[str, float]


def pytest_addoption(parser):
    parser.addoption("--turns", type=int, default=15, help="turns of each contest")


def pytest_configure(config):
    config.option.benchmark_quiet = True  # its table has a line for each turn


def pytest_generate_tests(metafunc):
    if "contender" in metafunc.fixturenames:
        contests = metafunc.module.CONTESTS
        turns = range(metafunc.config.getoption("turns"))
        cases = [(name, turn, who) for name in contests for turn in turns for who in contests[name].contenders]
        metafunc.parametrize(("contest", "turn", "contender"), cases, ids=[f"{n}-{who}-{t}" for n, t, who in cases])


@functools.cache
def prepared(make: Callable) -> Callable:
    """Ready, compiled and warm."""
    work = make()
    work()
    return work


@pytest.fixture
def race(request, benchmark):
    def run(contest: Contest, name: str, contender: str):
        work = prepared(contest.contenders[contender])
        benchmark.group = name
        benchmark.extra_info.update(contender=contender, unit=contest.unit, target=contest.targets.get(contender))
        benchmark.extra_info["amount"] = benchmark.pedantic(work)

    return run


def pytest_terminal_summary(terminalreporter, config):
    contests = defaultdict(lambda: defaultdict(list))
    about = {}
    for run in config._benchmarksession.benchmarks:
        info = run.extra_info
        contests[run.group][info["contender"]].append(1e3 * run.stats.median / info["amount"])
        about[run.group, info["contender"]] = info
    for name, times in contests.items():
        ours = np.array(next(iter(times.values())))
        unit = next(info["unit"] for (group, _), info in about.items() if group == name)
        terminalreporter.section(name)
        terminalreporter.line(
            f"{'':28} {'ms per ' + unit:>24} {'quartiles':>19} {'ratio':>7} {'quartiles':>15} {'target':>7}"
        )
        for who, spent in times.items():
            if len(spent) != len(ours):
                continue  # failed in some turn, and says so itself
            ratios, target = np.array(spent) / ours, about[name, who]["target"]
            low, median, high = np.percentile(spent, (25, 50, 75))
            below, ratio, above = np.percentile(ratios, (25, 50, 75))
            goal = "" if target is None else f"{target:g}"
            terminalreporter.line(
                f"{who:28} {median:24.4g} {f'{low:.4g} - {high:.4g}':>19} {ratio:7.2f} {f'{below:.2f} - {above:.2f}':>15} {goal:>7}"
            )
