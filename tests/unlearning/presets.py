"""The three algorithms by their options, so that one test can run them all."""

from __future__ import annotations

from dataclasses import replace

from expunge.unlearning.hf_kcu import hf_kcu
from expunge.unlearning.hf_kcu_options import HfKcuOptions
from expunge.unlearning.hf_kcu_paper import hf_kcu_paper
from expunge.unlearning.hf_kcu_paper_options import HfKcuPaperOptions
from expunge.unlearning.recovery import Recovery
from expunge.unlearning.retrace import retrace, retrace_krylov
from expunge.unlearning.retrace_options import RetraceKrylovOptions, RetraceOptions

PAPER, CORRECTED, KRYLOV, RETRACE = HfKcuPaperOptions(), HfKcuOptions(), RetraceKrylovOptions(), RetraceOptions()
_FUNCTIONS = {
    HfKcuPaperOptions: ("hf-kcu-paper", hf_kcu_paper),
    HfKcuOptions: ("hf-kcu", hf_kcu),
    RetraceKrylovOptions: ("retrace-krylov", retrace_krylov),
    RetraceOptions: ("retrace", retrace),
}


def forgotten(engine, state, request, options):
    """Run the algorithm that these are the options of."""
    return _FUNCTIONS[type(options)][1](engine, state, request, options)


def label(options) -> str:
    """The algorithm's name."""
    return _FUNCTIONS[type(options)][0] + ("+recovery" if options.recovery else "")


def recovering(options, recovery: Recovery | None = None):
    """The same with a recovery round afterwards."""
    return replace(options, recovery=recovery or Recovery())
