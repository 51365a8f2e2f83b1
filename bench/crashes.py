# SPDX-License-Identifier: Apache-2.0
"""Is there always a checkpoint? A process that saves without end is killed, or its disk fails, at random moments.

python bench/crashes.py                              # 200 kills and 120 disks that fail: about two minutes on two cores
python bench/crashes.py --kills 40 --faults 0 --seed 7

After each of them another process must find a complete checkpoint, every bit of which is right, no older than the last
one that was committed, must be able to save at once, and find no rubble left after that. Goal: all of them. The moments
are those of tests/chaos/crashing.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import BENCH, clean_up_on_sigterm, describe_setting, median, note, save, setting, table

sys.path.insert(0, str(BENCH.parent / "tests"))
from chaos.crashing import FAILING, FULL, KILL, STYLES, Moment, Outcome, in_a_process

ALL_KILLS, ALL_FAULTS = 200, 120  # fewer are not kept
NAMES = {
    KILL: "SIGKILL",
    FULL: "disk full",
    "create": "EIO when a file is made",
    "write": "EIO when it is written",
    "fsync": "EIO when it is synced",
    "rename": "EIO when it is renamed",
    "list": "EIO when a folder is listed",
    "delete": "EIO when a file is removed",
}
Result = tuple[Moment, Outcome]


def strike_all(moments: int, seed: int, ends: Sequence[str]) -> list[Result]:
    """All to one directory, with a line for each."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="uc-") as folder:
        for moment, outcome in in_a_process(Path(folder), moments, seed, STYLES, ends) if moments else ():
            results.append((moment, outcome))
            said = f"WRONG: {'; '.join(outcome.wrong)}" if outcome.wrong else outcome.interrupted
            note(f"{len(results)}/{moments}  {moment}: {said}")
    return results


def is_right(outcome: Outcome) -> bool:
    return not outcome.wrong and outcome.found >= outcome.committed and not outcome.unnamed_bytes


def ends_table(results: Sequence[Result]) -> str:
    rows = []
    for end, style in dict.fromkeys((moment.end, moment.style) for moment, _ in results):
        chosen = [outcome for moment, outcome in results if (moment.end, moment.style) == (end, style)]
        rows.append(
            [
                f"{NAMES[end]}, {style}",
                str(len(chosen)),
                str(sum(outcome.found >= outcome.committed for outcome in chosen)),
                str(sum(outcome.found > outcome.committed for outcome in chosen)),
                f"{1e3 * median([outcome.again_s for outcome in chosen]):.0f}",
                f"{1e3 * max(outcome.again_s for outcome in chosen):.0f}",
                f"{max(outcome.unnamed_bytes for outcome in chosen) / 1e6:.1f}",
                str(sum(map(is_right, chosen))),
            ]
        )
    header = (
        "how it ended", "moments", "none lost", "one more than told", "next start ms", "at most ms", "rubble MB",
        "all right",
    )  # fmt: skip
    return table(header, rows)


def phases_table(results: Sequence[Result]) -> str:
    """Where in a save the kills came."""
    kills = [(moment, outcome) for moment, outcome in results if moment.end == KILL]
    found = {style: Counter(o.interrupted for moment, o in kills if moment.style == style) for style in STYLES}
    phases = sorted({outcome.interrupted for _, outcome in kills})
    return table(
        ("the kill came", *STYLES), [[phase, *(str(found[style][phase]) for style in STYLES)] for phase in phases]
    )


def report(where: dict[str, Any], results: Sequence[Result], seed: int) -> str:
    wrong = [(moment, outcome) for moment, outcome in results if not is_right(outcome)]
    size = max((outcome.checkpoint_bytes for _, outcome in results), default=0)
    lines = [
        f"# Crashes during saves, {where['date'][:10]}",
        "",
        describe_setting(where),
        f"- method: seed {seed}; checkpoints of {size / 1e6:.1f} MB, two writers, the last two are kept; a save is "
        "waited for (synchronous) or runs beside steps that change the state (asynchronous)",
        "- EIO comes from the kernel, by a seccomp filter; the full disk is a tmpfs that is filled to the last page",
        "",
        ends_table(results),
        "",
        phases_table(results),
        "",
        f"All right: {len(results) - len(wrong)} of {len(results)}; goal all.",
    ]
    for moment, outcome in wrong:
        lines += ["", f"Wrong: {moment}", "", *(f"    {line}" for text in outcome.wrong for line in text.splitlines())]
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=ALL_KILLS)
    parser.add_argument("--faults", type=int, default=ALL_FAULTS, help="of the disk, of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few of each: does it work at all?")
    options = parser.parse_args(arguments)
    if options.quick:
        options.kills, options.faults = 10, len(FAILING) * len(STYLES)
    return options


def main(arguments: Sequence[str]) -> int:
    clean_up_on_sigterm()
    options = parse(arguments)
    where = setting("crashes.py", arguments)
    full = options.faults // (len(FAILING) + 1)
    results = strike_all(options.kills, options.seed, [KILL])
    results += strike_all(options.faults - full, options.seed, FAILING)
    results += strike_all(full, options.seed, [FULL])
    text = report(where, results, options.seed)
    part = options.kills < ALL_KILLS or options.faults < ALL_FAULTS
    rows = [{"moment": asdict(moment), "outcome": asdict(outcome)} for moment, outcome in results]
    path = save("crashes", {"setting": where, "moments": rows}, text, quick=part)
    print(text)
    note(f"saved {path} and .json")
    return 0 if all(is_right(outcome) for _, outcome in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
