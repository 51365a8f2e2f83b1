# SPDX-License-Identifier: Apache-2.0
"""A table of 50 million rows on servers, of which a training touches few: memory of all processes, and what travels.

python bench/rows.py  # about two minutes on two cores; --quick only shows that it works

Runs examples/11_embedding_table.py (16 numbers a row, Adam, so 9.6 GB if every row existed) with 2 workers and 2
servers: the table, the same with half the clicks a step, and a table with a tenth of the rows. Memory is what all
processes of the command hold together at most, as the kernel counts it (PSS: a shared page counts once), looked at
twice a second. Touched is what the batches touch: the different rows of each, added up over workers and steps. Goals:
no more than 4 GB, and the same bytes for every touched row in all cases, within a tenth. There is no peer: a table
that lies in every process, as `nn.Embedding` does, would be 9.6 GB in each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure import (
    BENCH,
    METER_S,
    Failed,
    Word,
    clean_up_on_sigterm,
    describe_setting,
    note,
    run,
    save,
    setting,
    table,
    verdict,
)

EXAMPLE = BENCH.parent / "examples" / "11_embedding_table.py"
WORKERS, SERVERS = 2, 2
MOST_GB, WIDEST = 4.0, 1.1  # the goals
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Case:
    rows: int
    clicks: int  # in a step of one worker
    steps: int

    def __str__(self) -> str:
        return f"{self.rows / 1e6:g} million rows, {self.clicks:,} clicks"


CASES = (Case(50_000_000, 8192, 300), Case(50_000_000, 4096, 300), Case(5_000_000, 8192, 300))
QUICK = (Case(500_000, 4096, 20), Case(50_000, 4096, 20))


@dataclass(frozen=True)
class Found:
    seconds: float
    held_bytes: int  # by all processes, the command itself included
    travelled_bytes: int  # to and from workers
    touched: int  # rows, in each batch anew
    different: int  # rows that exist on the servers at the end
    their_bytes: int  # with what the optimizer keeps for them
    elsewhere: float

    @property
    def bytes_a_row(self) -> float:
        return self.travelled_bytes / self.touched


def measure(case: Case) -> Found:
    with tempfile.TemporaryDirectory(prefix="rows-") as name:
        run_dir = Path(name) / "run"
        words: list[Word] = [sys.executable, "-m", "unisono.cli", "run", EXAMPLE, "--run-dir", run_dir]
        words += ["--workers", str(WORKERS), "--strategy", "ps", "--servers", str(SERVERS), "--"]
        words += ["--rows", str(case.rows), "--batch", str(case.clicks), "--steps", str(case.steps)]
        outcome = run(words, TIMEOUT_S, weighs=True)
        processes = json.loads((run_dir / "result.json").read_text())["processes"]

    def all_of(key: str) -> int:
        return sum(process[key] for process in processes)

    return Found(
        seconds=outcome.seconds,
        held_bytes=outcome.held_bytes,
        travelled_bytes=all_of("bytes_sent") + all_of("bytes_received"),
        touched=touched_by(case),
        different=all_of("rows_touched"),
        their_bytes=all_of("held_bytes"),
        elsewhere=outcome.elsewhere,
    )


def touched_by(case: Case) -> int:
    """The example draws its batches from seeds, so here they are again."""
    batches, active = batches_of_example(), max(1, case.rows // 50)
    found = 0
    for rank in range(WORKERS):
        for users, items, _ in batches(active, case.rows, case.clicks, case.steps, rank):
            found += len(users.unique()) + len(items.unique())
    return found


def batches_of_example() -> Callable[..., Iterator[Any]]:
    described = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert described is not None
    assert described.loader is not None
    example = importlib.util.module_from_spec(described)
    described.loader.exec_module(example)
    return example.batches  # type: ignore[no-any-return]


def report(where: dict[str, Any], found: dict[Case, Found], failures: Sequence[str]) -> str:
    header = ["table", "touched", "different rows", "they take, MB", "travelled, MB", "bytes a touched row",
              "all processes, GB", "seconds", "busy elsewhere"]  # fmt: skip
    rows = [
        [
            str(case),
            f"{one.touched:,}",
            f"{one.different:,}",
            f"{one.their_bytes / 1e6:.0f}",
            f"{one.travelled_bytes / 1e6:.0f}",
            f"{one.bytes_a_row:.1f}",
            f"{one.held_bytes / 1e9:.2f}",
            f"{one.seconds:.1f}",
            f"{one.elsewhere:.0%}",
        ]
        for case, one in found.items()
    ]
    facts = [
        f"- {WORKERS} workers and {SERVERS} servers; rows of 16 numbers with Adam; memory looked at every {METER_S} s",
        *(
            f"- {word}: {verdict(value, goal, at_least=False)}, goal at most {goal:g}"
            for word, value, goal in goals(found)
        ),
        *(f"- FAILED: {failure}" for failure in failures),
    ]
    title = f"# A table of which few rows are touched, {where['date'][:10]}"
    return "\n".join([title, "", describe_setting(where), *facts, "", table(header, rows)])


def goals(found: dict[Case, Found]) -> list[tuple[str, float, float]]:
    """(what, how much, at most)"""
    if not found:
        return []
    each = [one.bytes_a_row for one in found.values()]
    most = max(one.held_bytes for one in found.values())
    return [
        ("memory of all processes, GB", most / 1e9, MOST_GB),
        ("bytes a touched row, the most over the least", max(each) / min(each), WIDEST),
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small tables and few steps: does it work at all?")
    options = parser.parse_args(arguments)
    clean_up_on_sigterm()
    where = setting("rows.py", arguments)
    found: dict[Case, Found] = {}
    failures: list[str] = []
    for case in QUICK if options.quick else CASES:
        note(f"{case} ...")
        try:
            found[case] = measure(case)
        except Failed as error:
            failures.append(f"{case}: {error}")
            note(f"{case}: FAILED, {error}")
    text = report(where, found, failures)
    print(text)
    values = [{"case": asdict(case), **asdict(one)} for case, one in found.items()]
    path = save("rows", {"setting": where, "found": values, "failures": failures}, text, options.quick)
    note(f"saved {path.relative_to(BENCH.parent)} and .json")
    are_missed = not options.quick and any(value > most for _, value, most in goals(found))
    return 1 if failures or are_missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
