# SPDX-License-Identifier: Apache-2.0
"""`unisono.kvstore` and `unisono.ps` on real processes: scripts without a Trainer, with servers of their own."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from multiproc.running import Finished, run_command, run_python, run_unisono, start_unisono
from multiproc.scripts import SMALL
from unisono.checkpoint.listing import list_steps, read_manifest
from unisono.checkpoint.manifest import CHUNKS
from unisono.checkpoint.store import open_store
from unisono.comm.asking import HEADER_BYTES
from unisono.core import events
from unisono.core.run_dir import RunDir

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "11_embedding_table.py"
SERVERS = ("--strategy", "ps", "--servers")
SHORT_S = 40

# Sums whose bits show the order of additions, a large value that is cut over all servers, an optimizer; what was seen
# is printed by every worker. It ends without a close().
SUMS = """
import hashlib, torch, unisono

kv = unisono.kvstore("dist_sync")
torch.manual_seed(7)
pushed = torch.randn(3, 3, 400_000)  # by step and worker
kv.init(["big", "small"], [torch.zeros(400_000), torch.zeros(5, 2)])
digest = hashlib.sha256()
for step in range(3):
    mine = pushed[step, kv.rank]
    kv.push("small", mine[:10].view(5, 2))
    digest.update(kv.pushpull("big", mine).numpy().tobytes())
    digest.update(kv.pull("small").numpy().tobytes())
    digest.update(kv.row_sparse_pull("small", torch.tensor([4, 1])).numpy().tobytes())
    if step == 1:
        kv.set_optimizer("SGD", lr=0.5, momentum=0.9)
kv.barrier()
print("sums", kv.rank, "of", kv.num_workers, digest.hexdigest())
"""


def said(finished: Finished, workers: int) -> list[str]:
    found = [re.findall(r"^sums (\d) of (\d) (\w{64})$", finished.log(worker), re.M) for worker in range(workers)]
    assert [[row[:2] for row in rows] for rows in found] == [[(str(n), str(workers))] for n in range(workers)]
    return [rows[0][2] for rows in found]


# --- values


def test_a_synchronous_store_gives_the_same_bits_with_any_number_of_servers(tmp_path: Path) -> None:
    seen = set()
    for servers in (1, 2, 3):
        finished = run_unisono(SUMS, tmp_path, *SERVERS, str(servers), workers=2, timeout_s=SHORT_S)
        seen |= set(said(finished, 2))
        assert finished.result is not None
        assert (finished.result["workers"], finished.result["servers"]) == (2, servers)
        assert [event.exit_code for event in finished.events_of(events.WorkerExited)] == [0] * (2 + servers)
        assert finished.run_dir is not None
        logs = {path.stem for path in RunDir(finished.run_dir).logs.iterdir() if path.read_text()}
        assert logs == {"worker-0", "worker-1"}, "a server has said something"
    assert len(seen) == 1


def test_a_script_by_itself_has_the_values_in_its_own_process_and_so_has_a_local_store(tmp_path: Path) -> None:
    threads = "\nimport threading\nprint(*(thread.name for thread in threading.enumerate()))\n"
    script = SUMS + "kv.close()\n" + SUMS.replace("dist_sync", "local") + threads
    alone = run_python(script, tmp_path, timeout_s=SHORT_S)
    assert len(found := re.findall(r"^sums 0 of 1 (\w{64})$", alone.output, re.M)) == 2
    assert found[0] == found[1]
    assert "unisono-answers" not in alone.output
    assert alone.result is not None
    assert alone.result["metrics"] == {"MB_sent": 0.0, "MB_received": 0.0}


def test_an_asynchronous_store_loses_no_push_and_a_worker_may_take_long_after_the_other_has_closed(
    tmp_path: Path,
) -> None:
    script = """
    import time, torch, unisono
    kv = unisono.kvstore("dist_async")
    kv.init("w", torch.zeros(4))
    kv.set_optimizer("SGD", lr=1.0)
    for _ in range(20 * (1 + kv.rank)):
        kv.push("w", torch.ones(4))
    if kv.rank == 0:
        kv.close()
    else:
        while (found := kv.pull("w").unique().tolist()) != [-60.0]:
            time.sleep(0.01)
        time.sleep(3.5)  # longer than --hang-after, with nobody who waits for an answer
        print("found", found)
    """
    finished = run_unisono(script, tmp_path, *SERVERS, "2", "--hang-after", "2", workers=2, timeout_s=SHORT_S)
    assert "found [-60.0]" in finished.log(1)


# --- tables

TABLE = """
import torch, unisono
from torch import nn

ROWS = 2_000_000
with unisono.ps.connect() as servers:
    table = servers.embedding("users", rows=ROWS, width=8, optimizer=unisono.ps.Adam(lr=0.1))
    small = servers.table("small", rows=300, width=8, optimizer=unisono.ps.SGD(lr=0.1), initial=unisono.ps.Zeros())

    def moved(used, ids):
        before = used.bytes_sent + used.bytes_received
        used.push(ids, torch.zeros(len(ids), 8))
        used.pull(ids)
        return used.bytes_sent + used.bytes_received - before

    if servers.rank == 0:
        every = torch.arange(300)
        print("moved", *(moved(table.table, every[:n]) for n in (0, 100, 200)), moved(small, every[:100]))
    servers.barrier()
    known = torch.randint(ROWS, (400,), generator=torch.Generator().manual_seed(0))
    signs = torch.sign(torch.randn(400, generator=torch.Generator().manual_seed(1)))
    losses = []
    for step in range(60):
        chosen = torch.randint(400, (64,), generator=torch.Generator().manual_seed(2 * step + servers.rank))
        loss = nn.functional.softplus(-table(known[chosen]).sum(1) * signs[chosen]).mean()
        loss.backward()
        table.push_gradients()
        losses.append(loss.item())
    print("losses", servers.rank, servers.workers, sum(losses[:10]) / 10, sum(losses[-10:]) / 10)
print("rows", sum(each.rows_touched for each in servers.processes))
"""


def test_a_table_learns_and_moves_bytes_by_rows_touched_and_not_by_rows(tmp_path: Path) -> None:
    finished = run_unisono(TABLE, tmp_path, *SERVERS, "2", workers=2, timeout_s=SHORT_S)
    for worker in range(2):
        first, last = map(float, re.findall(rf"losses {worker} 2 (\S+) (\S+)", finished.log(worker))[0])
        assert first > 0.4
        assert last < first / 2
        assert 600 < int(re.findall(r"rows (\d+)", finished.log(worker))[0]) <= 700
    nothing, hundred, twice, other = map(int, re.findall(r"moved (.+)", finished.log())[0].split())
    row = 2 * (4 + 8 * 4)  # a place and eight numbers, there and back
    assert nothing == 2 * 2 * HEADER_BYTES, "every server counts the pushes"
    assert hundred == 100 * row + 2 * nothing
    assert twice == 200 * row + 2 * nothing
    assert other == hundred, "a large table moves more than a small one"
    assert finished.result is not None
    servers = [each for each in finished.result["processes"] if each["role"].startswith("server")]
    rows = [each["rows_touched"] for each in servers]
    assert sum(rows) > 600
    assert max(rows) < 1.3 * min(rows)
    assert [each["held_bytes"] for each in servers] != [0, 0]


def test_the_example_learns_on_workers_that_serve_each_other_and_tells_what_it_took(tmp_path: Path) -> None:
    finished = run_unisono(EXAMPLE, tmp_path, *SERVERS, "0", workers=2, script_args=("--steps", "80"))
    losses = [float(text) for text in re.findall(r"loss (\S+)", finished.log())]
    assert losses[-1] < 0.6 * losses[0]
    for worker in range(2):
        assert re.search(rf"^worker {worker} +\d+ MB +[1-9]\S* MB", finished.log(), re.M), finished.log()
    assert re.search(r"memory of all processes .*; 1,500 of 50,500 rows were touched", finished.log())


# --- losses and mistakes

ENDLESS = """
import time, torch, unisono
kv = unisono.kvstore("dist_sync")
kv.init("w", torch.zeros(3))
while True:
    kv.push("w", torch.ones(3))
    kv.pull("w")
    if kv.rank == 0:
        open("going", "w").close()
    time.sleep(0.01)
"""


@pytest.mark.parametrize("lost", [2, 0], ids=["server", "worker"])
def test_a_lost_process_ends_the_run_with_one_sentence(lost: int, tmp_path: Path) -> None:
    with start_unisono(ENDLESS, tmp_path, *SERVERS, "1", workers=2) as run:
        run.until((tmp_path / "going").exists, "pushes")
        os.kill(run.worker_pid(lost), signal.SIGKILL)
        finished = run.wait(SHORT_S, expect=22)
    assert finished.output.count("UNI-") == 1, finished.output
    for words in (f"worker {lost} was lost, and this run cannot go on", "not elastic", "start it again"):
        assert words in finished.output, finished.output
    assert "Traceback" not in finished.output


@pytest.mark.parametrize(
    ("text", "options", "code", "says"),
    [
        ("with unisono.ps.connect() as servers:\n    1 / 0", (*SERVERS, "1"), 10, ["ZeroDivisionError"]),
        (
            "kv = unisono.kvstore()\nkv.init(1, torch.zeros(1))\nfor _ in range(3 + kv.rank):\n"
            "    kv.push(1, torch.ones(1))\n    kv.pull(1)",
            (*SERVERS, "1"), 11, ["worker 0 has finished, and others wait for a push of it", "dist_async"],
        ),
    ],
    ids=["an error of the script", "uneven pushes"],
)  # fmt: skip
def test_a_mistake_ends_the_run_with_the_reason(
    text: str, options: tuple[str, ...], code: int, says: list[str], tmp_path: Path
) -> None:
    finished = run_unisono(SMALL + text + "\n", tmp_path, *options, workers=2, timeout_s=SHORT_S, expect=code)
    assert finished.output.count("UNI-") == 1, finished.output
    for words in says:
        assert words in finished.output, finished.output


SAVED = """
import sys, torch, unisono

kv = unisono.kvstore("dist_sync")
kv.init(["big", "small"], [torch.zeros(400_000), torch.zeros(5, 2)])
kv.set_optimizer("Adam", lr=0.1)
first, last = map(int, sys.argv[1:])
if first:
    kv.load("saved")
for step in range(first, last):
    torch.manual_seed(step)
    share = 1.0 if kv.num_workers == 1 else 0.5
    kv.push(["big", "small"], [share * torch.randn(400_000), share * torch.randn(5, 2)])
    kv.save("saved", step + 1)
big, small = kv.pull(["big", "small"])
print("came to", float(big.double().sum()), float(small.double().sum()))
"""


def test_a_store_is_saved_and_taken_up_by_other_workers_and_servers(tmp_path: Path) -> None:
    run_unisono(SAVED, tmp_path, *SERVERS, "2", workers=2, script_args=("0", "3"), timeout_s=SHORT_S)
    resumed = run_python(SAVED, tmp_path, "3", "4")
    (tmp_path / "other").mkdir()
    whole = run_python(SAVED, tmp_path / "other", "0", "4")
    sums = [re.findall(r"came to (\S+) (\S+)", finished.output)[-1] for finished in (resumed, whole)]
    assert [float(each) for each in sums[0]] == pytest.approx([float(each) for each in sums[1]], rel=1e-4)
    listed = run_command(tmp_path, "checkpoint", "list", "saved").output
    assert all(f"{step}" in listed for step in (1, 2, 3, 4)), listed


# With one worker a table has the same bits every time, whatever its servers. The script dies where it is told to.
TABLES = """
import os, sys, torch, unisono

first, last, dies = map(int, sys.argv[1:])
with unisono.ps.connect() as servers:
    users = servers.table("users", rows=3_000_000, width=4, optimizer=unisono.ps.Adam(lr=0.1))
    words = servers.table("words", rows=50, width=2, optimizer=unisono.ps.SGD(lr=0.1, momentum=0.9))
    if first:
        servers.load("saved")
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for table in (users, words):
            ids = torch.randint(table.spec.rows, (40,), generator=generator)
            gradients = torch.randn(40, table.spec.width, generator=generator)
            if servers.rank == 0:
                table.push(ids, gradients)
        if step + 1 == dies:
            from unisono.train import door_saving
            door_saving.commit = lambda *_: os.kill(os.getpid(), 9)  # all is written, and nothing said of it
        servers.save("saved", step + 1)
    if servers.rank == 0:
        seeded = [torch.Generator().manual_seed(step) for step in range(5)]
        known = torch.cat([torch.randint(3_000_000, (40,), generator=each) for each in seeded])
        print("came to", float(users.pull(known).double().sum()), float(words.pull(torch.arange(50)).double().sum()))
"""


def came_to(said: str) -> tuple[str, str]:
    (found,) = re.findall(r"came to (\S+) (\S+)", said)
    return found  # type: ignore[no-any-return]


def test_a_worker_that_dies_in_a_save_leaves_the_checkpoint_before_for_other_workers_and_servers(
    tmp_path: Path,
) -> None:
    lost = run_unisono(TABLES, tmp_path, *SERVERS, "2", workers=2, script_args=("0", "5", "3"), expect=22)
    assert lost.output.count("UNI-") == 1, lost.output
    assert "worker 0 was lost, and this run cannot go on" in lost.output
    store = open_store(str(tmp_path / "saved"))
    named = {chunk.key for step in (1, 2) for chunk in read_manifest(store, step).chunks.values()}
    assert list_steps(store) == [1, 2]
    assert {entry.key for entry in store.list(CHUNKS)} > named, "it died before it had written anything"
    resumed = run_unisono(TABLES, tmp_path, *SERVERS, "3", workers=1, script_args=("2", "5", "0"))
    (tmp_path / "other").mkdir()
    whole = run_python(TABLES, tmp_path / "other", "0", "5", "0")
    assert came_to(resumed.log()) == came_to(whole.output)


def test_tables_of_another_shape_are_refused_in_one_sentence(tmp_path: Path) -> None:
    run_python(TABLES, tmp_path, "0", "1", "0")
    other = TABLES.replace("rows=50, width=2", "rows=50, width=3")
    refused = run_unisono(other, tmp_path, *SERVERS, "1", workers=2, script_args=("1", "2", "0"), expect=None)
    assert refused.exit_code != 0
    assert refused.output.count("UNI-") == 1, refused.output
    assert "'words' is another table: width is 3 here and was 2" in refused.output
