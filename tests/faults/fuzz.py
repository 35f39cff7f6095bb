"""Thousands of odd configurations and damaged files: `python -m tests.faults.fuzz --cases 5000`.

    python -m tests.faults.fuzz --cases 5000 --seed 7

The cases of `test_bad_config.py` and `test_bad_files.py`, as many as wanted. Ends with how many of each
kind there were and what came of them; a case that fails is said, and the others go on.
"""

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import hypothesis
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.text.rows import read_json_lines, read_parquet
from tests.faults import test_bad_config as configs
from tests.faults import test_bad_files as files

SHARES = {
    "settings": 0.40, "sizes": 0.20, "command lines": 0.04, "JSON lines": 0.12, "Parquet": 0.12,
    "safetensors": 0.10, "tokenizers": 0.02,
}  # fmt: skip
"""Of all cases. Command lines and tokenizers take the longest."""


def kinds(folder):
    """How cases of each kind are drawn, and what checks one."""
    contents = files.tokenizer_in(folder / "tokenizer")
    broken = st.sampled_from(sorted(contents)).flatmap(
        lambda file: st.tuples(st.just(file), files.damaged(contents[file]))
    )
    rows = {"jsonl": read_json_lines, "parquet": read_parquet}

    def of_rows(kind):
        return lambda case: files.check_rows(folder / f"a.{kind}", rows[kind], *case)

    return {
        "settings": (configs.odd_settings(), lambda case: configs.check_plan_or_error(*case)),
        "sizes": (configs.odd_sizes(), lambda case: configs.check_plan_or_error(*case)),
        "command lines": (configs.odd_words(), configs.check_command),
        "JSON lines": (st.tuples(files.damaged(files.LINES), files.LIMITS), of_rows("jsonl")),
        "Parquet": (st.tuples(files.damaged(files.parquet()), files.LIMITS), of_rows("parquet")),
        "safetensors": (
            files.damaged(files.weights()),
            lambda content: files.check_safetensors(folder, content),
        ),
        "tokenizers": (broken, lambda case: files.check_tokenizer(contents, *case)),
    }


def fuzz(strategy, check, cases, seed):
    """So many cases of one kind; returns what came of them, and the failures."""
    came, failures = Counter(), []

    @hypothesis.seed(seed)
    @settings(configs.many(cases), database=None)
    @given(strategy)
    def one(case):
        try:
            came[check(case)] += 1
        except Exception as error:
            came["failure"] += 1
            failures.append(f"{type(error).__name__}: {error}"[:1000])

    one()
    return came, failures


def main():
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=None, help="default: another one every time")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    total, bad = Counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer").mkdir()
        os.chdir(folder)
        for kind, (strategy, check) in kinds(Path(folder)).items():
            came, failures = fuzz(strategy, check, round(options.cases * SHARES[kind]), seed)
            words = ", ".join(f"{number} {what}" for what, number in came.most_common())
            print("\n".join([f"{kind:14} {came.total():5}: {words}", *failures]), flush=True)
            total += came
            bad += len(failures)
        os.chdir("/")
    words = ", ".join(f"{number} {what}" for what, number in total.most_common())
    print(f"{total.total()} cases: {words}")
    return 1 if bad else 0


if __name__ == "__main__":
    import tests.conftest  # noqa: F401 - the environment of tests

    sys.exit(main())
