# SPDX-License-Identifier: Apache-2.0
"""What is left of a run after a violent death? SIGKILL of any of its processes, at random moments, many times.

python bench/deaths.py                             # 50 deaths, about ten minutes on two cores
python bench/deaths.py --deaths 6 --victims loader agent --seed 7

After each death: no process, temporary directory, socket, shared memory or port of the run may be left within 10 s, and
the same command, started at once, must work. Goal: all of them. The deaths are those of tests/chaos/violence.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from measure import BENCH, clean_up_on_sigterm, describe_setting, median, note, save, setting, table

sys.path.insert(0, str(BENCH.parent / "tests"))
from chaos.violence import CLEAN_WITHIN_S, VICTIMS, Death, die, draw, mark_everything

ALL_DEATHS = 50  # fewer are not kept


def one_death(death: Death) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ud-", ignore_cleanup_errors=True) as folder:
        try:
            outcome = asdict(die(death, Path(folder)))
        except (
            pytest.fail.Exception,
            subprocess.TimeoutExpired,
        ) as error:  # it took too long to come to the death, or to its end
            outcome = {"clean_s": None, "again_s": None, "exit_code": None, "wrong": [str(error)[:4000]]}
    return asdict(death) | outcome


def deaths_table(results: Sequence[dict[str, Any]]) -> str:
    rows = []
    for victim in [*dict.fromkeys(result["victim"] for result in results), "all"]:
        chosen = [result for result in results if victim in (result["victim"], "all")]
        clean = [result["clean_s"] for result in chosen if result["clean_s"] is not None]
        again = [result["again_s"] for result in chosen if result["again_s"] is not None]
        rows.append(
            [
                victim,
                str(len(chosen)),
                str(len(clean)),
                f"{max(clean):.1f}" if clean else "–",
                str(len(again)),
                f"{median(again):.1f}" if again else "–",
                str(sum(not result["wrong"] for result in chosen)),
            ]
        )
    header = ("killed", "deaths", "nothing left", "after at most s", "worked again", "first step after s", "all right")
    return table(header, rows)


def report(where: dict[str, Any], results: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    wrong = [result for result in results if result["wrong"]]
    lines = [
        f"# Violent deaths, {where['date'][:10]}",
        "",
        describe_setting(where),
        f"- method: seed {options.seed}; SIGKILL in the middle of the training or during the start, in turns; two "
        "workers with a loader process each; an agent joins over loopback",
        f"- nothing may be left {CLEAN_WITHIN_S:g} s after the end of the command; the same command must work at once",
        "",
        deaths_table(results),
        "",
        f"All right: {len(results) - len(wrong)} of {len(results)}; goal all.",
    ]
    for result in wrong:
        lines += [
            "",
            f"Wrong: {_named(result)}",
            "",
            *(f"    {line}" for text in result["wrong"] for line in text.splitlines()),
        ]
    return "\n".join(lines)


def _named(result: dict[str, Any]) -> str:
    return str(Death(*(result[name] for name in ("number", "victim", "after_s", "after_steps"))))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=ALL_DEATHS)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS), metavar="VICTIM")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one of each: does it work at all?")
    options = parser.parse_args(arguments)
    options.deaths = len(options.victims) if options.quick else options.deaths
    return options


def main(arguments: Sequence[str]) -> int:
    clean_up_on_sigterm()
    mark_everything()
    options = parse(arguments)
    where = setting("deaths.py", arguments)
    results = []
    for number in range(options.deaths):
        death = draw(number, options.seed, tuple(options.victims))
        result = one_death(death)
        results.append(result)
        outcome = (
            f"WRONG: {'; '.join(result['wrong'])}" if result["wrong"] else f"clean after {result['clean_s']:.1f} s"
        )
        note(f"{number + 1}/{options.deaths}  {death}: {outcome}")
    text = report(where, results, options)
    part = options.deaths < ALL_DEATHS or set(options.victims) != set(VICTIMS)
    path = save("deaths", {"setting": where, "deaths": results}, text, quick=part)
    print(text)
    note(f"saved {path} and .json")
    return 1 if any(result["wrong"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
