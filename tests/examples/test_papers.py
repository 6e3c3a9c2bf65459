"""The papers' claims that hold, in the small settings of their scripts."""

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "examples" / "papers"

HOLD = {
    "a_measure_dynamics": [
        "timescales far below 1 are slower at equal cost",
        "a pull towards the data helps where modes hardly exchange particles",
        "the pull slows convergence elsewhere",
        "score matching does not tell mode weights",
    ],
    "a_duality": [
        "the optimal values of both problems agree",
        "the optimal measures agree",
        "the coupled flow ends at both",
    ],
    "a_chaos": ["particles and neurons approach the measure dynamics"],
    "a_spheres": [
        "timescales far below 1, maximum likelihood with persistent chains, are slower",
        "more observations help",
        "restarts at every step fit too, as score matching",
    ],
    "a_dual_vs_primal": [
        "dual training reaches a given fit with fewer gradients than maximum likelihood with many moves",
    ],
    "a_gaussian_base": ["F1 energies with a Gaussian base train on R^d"],
    "a_lazy": [
        "learned features fit a teacher of few directions better than fixed ones",
        "without noise the flow fits the sampling noise of the data",
    ],
    "a_score_flow": [
        "the direct flow descends its loss",
        "restarts at every step turn dual SGDA into that flow",
    ],
    "a_deep": [
        "the scheme carries over to deep energies",
        "timescales far below 1 are slower for deep energies too",
    ],
    "b_st_jem": [
        "it is no worse a classifier than cross-entropy",
        "on other modalities and architectures too",
    ],
    "b_denominator": [
        "with a sampler that fails JEM blows up, ST-JEM ignores its negatives",
        "the observation in the denominator is what makes it stable",
    ],
    "b_mutual_information": [
        "the term raises the mutual information of the model",
        "eq. 13 pushes p(y) towards uniform where classes are unbalanced",
    ],
    "b_shared_optimum": [
        "eq. 21: both have one optimum where each observation occurs equally often",
        "not where observations repeat",
        "the optimum of eq. 20 is then the square root of the data's frequencies, normalised",
    ],
    # ST-JEM's own claims need the whole setting's epochs
    "b_applications": ["JEM, where it does not diverge, has the better density"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", HOLD)
def test_claims_that_hold(script, monkeypatch, tmp_path):
    """10 to 110 s each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for shared in ("common", "classifiers"):
        monkeypatch.delitem(sys.modules, shared, raising=False)
    verdicts = importlib.import_module(script).main(small=True)
    outcomes = {verdict.claim: verdict.outcome for verdict in verdicts}
    assert {claim: outcomes[claim] for claim in HOLD[script]} == dict.fromkeys(HOLD[script], "holds")
    assert (tmp_path / f"{script}.png").stat().st_size > 10_000
