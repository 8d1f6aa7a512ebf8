"""Draws runs in which features meet, and checks what must hold of each.

A case is drawn by its seed: notation of the ramp, data, model, optimizer, rate, evaluation,
checkpoints, phases, devices and more (joints.yml, joint_cases.py), and one check (joint_checks.py).
What trains is compared with its plan, and its export with transformers; then it is killed and
continued on other devices, moved to other devices, its ramp written in another notation, branched,
given to maxramp.suggest, or made wrong. What is refused is refused in one line before step 0.

A failure is made simpler as long as the same does not hold, and printed as a command.

python benchmarks/joints.py [--seed N] [--count M] [--check NAME] [--choice FEATURE=NAME]
                            [--tries N] [--folder DIR] [--case JSON]
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import shutil
import sys
import tempfile
import time
import traceback

if __name__ == "__main__":  # and not in the processes that are forked from it
    root = pathlib.Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root), str(root / "tests"), str(root / "tests" / "huggingface")]
    from joint_cases import Case, draw_cases, simpler
    from joint_checks import CHECKS, TRAINING, as_planned, frozen_stay, opens
    from joint_runs import Failed, Missing, Refused, Runs, World


def run_case(case: Case, world: World, folder: pathlib.Path) -> tuple[str, str]:
    """Runs a case and its checks.

    Returns:
      The fault in a few words, and all that is known about it; "" and "" if all checks hold;
      "refused" and why, if the case is; "skipped" and what it needs that is not installed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    runs, shape = Runs(case, world, folder), case.shapes[0]
    try:
        if case.check in TRAINING:
            runs.train("whole", shape)
            as_planned(runs, "whole", shape)
            if case.has("trains") not in ("all", "decay"):
                frozen_stay(runs, "whole")
            if case.has("end") == "export":
                opens(runs, "whole")
        CHECKS[case.check](runs)
    except Failed as error:
        return error.what, error.text
    except Refused as error:
        return "skipped" if "pip install" in str(error) else "refused", str(error)
    except (Missing, ImportError) as error:
        return "skipped", str(error)
    except Exception as error:
        return f"{type(error).__name__} in the check", traceback.format_exc()
    return "", ""


def make_simpler(case: Case, what: str, world: World, folder: pathlib.Path, tries: int) -> Case:
    """Drops features from a failing case while the same check fails, in at most `tries` runs."""
    candidates = simpler(case)
    while tries and (candidate := next(candidates, None)):
        if candidate.is_valid:
            tries -= 1
            if run_case(candidate, world, folder)[0] == what:
                case, candidates = candidate, simpler(candidate)
    return case


class Session:
    """Cases that are run one after the other, and what became of them."""

    def __init__(self, folder: pathlib.Path, tries: int):
        self.world, self.failures, self.counts = World(folder / "world"), [], collections.Counter()
        self._folder, self._tries = folder, tries

    def judge(self, case: Case) -> None:
        """Runs a case, says what became of it, and makes a failure simpler."""
        began = time.monotonic()
        what, text = run_case(case, self.world, self._folder / "runs")
        outcome = what if what in ("", "refused", "skipped") else "failed"
        self.counts[outcome] += 1
        line = f"{self.counts.total():>4} {time.monotonic() - began:>5.1f} s  {case.check:<9}"
        line += what or "holds"
        if outcome in ("refused", "skipped"):
            line += f": {text[:300]}"
        print(line, flush=True)
        if outcome == "failed":
            print(f"{text}\nas drawn: {_command(case)}", flush=True)
            case = make_simpler(case, what, self.world, self._folder / "simpler", self._tries)
            print(f"{what}: {_command(case)}", flush=True)
            self.failures.append(f"{what}: {_command(case)}")


def _command(case: Case) -> str:
    return f"python benchmarks/joints.py --case '{case.to_json()}'"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20, help="cases")
    parser.add_argument("--check", action="append", help="only cases of this check, of these")
    parser.add_argument("--choice", action="append", help="only cases with it, FEATURE=NAME")
    parser.add_argument("--tries", type=int, default=12, help="to make a failure simpler")
    parser.add_argument("--folder", type=pathlib.Path, help="keeps the data and the last runs")
    parser.add_argument("--case", help="this one alone, as a failure prints it")
    options = parser.parse_args()
    session = Session(
        options.folder or pathlib.Path(tempfile.mkdtemp(prefix="joints")), options.tries
    )
    one = [Case.from_json(options.case)] if options.case else []
    try:
        for case in one or draw_cases(
            *(options.seed, options.count, options.check or (), options.choice or ())
        ):
            session.judge(case)
    finally:
        session.world.close()
    counts = session.counts
    skipped = counts.pop("skipped", 0)
    print(
        f"{counts.total()} cases: {counts['']} hold, {counts['refused']} are refused, in one line"
        + (f"; {skipped} more need what is not installed" if skipped else "")
    )
    print(f"{counts['failed']} failed", *session.failures, sep="\n")
    return 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main())
