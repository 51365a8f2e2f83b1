# SPDX-License-Identifier: Apache-2.0
"""Every promise of the README has a test that would fail if it were broken.

A promise is a line in bold, a command that a reader may type, or a row of the comparison in which we say yes. Whoever
writes another into the README names here what shows it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.M | re.S)

BOLD = {
    "Train one model on any number of workers, and get the same model: bit for bit, whoever dies on the way.": (
        "test_any_number_of_workers_gives_the_hash_and_losses_of_a_plain_python_run",
        "test_sixty_faults_in_one_run",
    ),
    "Same bits": (
        "test_any_number_of_workers_gives_the_hash_and_losses_of_a_plain_python_run",
        "test_blocks_augmentation_groups_frozen_parameters_clipping_l1_plateau_and_early_stop",
        "test_synchronised_batch_norm",
        "test_workers_are_added_while_others_die",
    ),
    "Every sample exactly once": (
        "test_an_iterable_dataset_with_token_weights_agrees_and_reads_every_sample_once",
        "test_every_sample_is_read_exactly_once_per_epoch",
    ),
    "One sentence for what went wrong": (
        "test_the_last_screen_names_the_worker_the_step_the_cause_and_the_line",
        "test_an_exception_in_one_worker_is_shown_with_the_users_traceback_and_nobody_else_is_blamed",
    ),
    "`unisono hash`": ("test_the_script_in_the_readme_gives_one_hash_by_python_and_on_four_workers",),
}

COMMANDS = {
    "make demo": ("test_the_demo_takes_under_two_minutes_and_shows_one_hash_for_two_and_one_worker",),
    "make demo-kill": ("test_two_of_four_workers_are_killed_and_the_hash_is_that_of_an_undisturbed_run",),
    "make test": ("test_every_make_target_that_is_named_exists",),
    "unisono run examples/01_digits.py --workers 1:4 --faults examples/07_killed.toml": (
        "test_two_of_four_workers_are_killed_and_the_hash_is_that_of_an_undisturbed_run",
    ),
    "unisono scale RUN 6": ("test_a_run_is_scaled_up_and_down_and_stopped_by_command",),
    "unisono stop RUN": ("test_a_run_is_scaled_up_and_down_and_stopped_by_command",),
    "unisono show RUN": (
        "test_the_script_in_the_readme_gives_one_hash_by_python_and_on_four_workers",
        "test_ps_shows_what_runs_now_and_with_a_what_has_ended",
        "test_logs_can_be_followed_until_the_run_has_ended",
    ),
    "unisono run train.py --workers 2:8 --listen 10.0.0.1": ("test_two_hosts_train_one_model_from_the_start",),
    "unisono join 10.0.0.1:38497 --secret HMEW-44H3-AN5V-N47F": (
        "test_a_host_joins_in_the_middle_and_nothing_on_the_wire_can_be_read",
        "test_another_version_of_torch",
    ),
    "unisono run train.py --workers 4 --name mine --checkpoint-every 10m": (
        "test_a_run_that_is_killed_five_times_ends_with_the_bits_of_one_that_was_not",
        "test_everybody_killed_and_gone_on_elsewhere_from_an_encrypted_bucket",
    ),
    "unisono resume mine --workers 2": ("test_everybody_is_killed_and_another_number_goes_on_with_the_same_bits",),
    "unisono checkpoint list mine": (
        "test_a_run_is_found_by_name_folder_or_url",
        "test_verify_says_good_or_damaged",
        "test_export_writes_the_weights_or_everything",
        "test_diff_says_where_the_first_difference_is",
        "test_prune_keeps_what_the_rules_say",
    ),
    "unisono run train.py --workers 4 --compress int8": ("test_a_codec_gives_the_same_bits_on_any_number_of_workers",),
    "unisono run train.py --workers 4 --strategy local --local-steps 16": (
        "test_the_weights_and_losses_are_the_same_on_any_number_of_workers",
    ),
    "unisono bench comm --workers 4": ("test_a_host_is_measured_and_the_slowest_link_named",),
    "unisono run train.py --workers 4 --strategy ps": ("test_without_staleness_servers_give_the_bits_of_all_reduce",),
    "unisono run train.py --workers 4 --strategy ps --staleness inf": (
        "test_with_staleness_the_loss_is_near_the_synchronous_one",
    ),
    "unisono scale RUN --servers 3": (
        "test_one_server_becomes_three_and_one_again_and_the_bits_are_those_of_all_reduce",
        "test_a_loose_run_with_other_servers_loses_no_update",
    ),
    "unisono run train.py --mesh dp=2,fsdp=4": (
        "test_every_mesh_trains_like_one_process",
        "test_the_number_of_replicas_does_not_show_in_the_bits",
        "test_a_replica_with_a_dead_rank_comes_back_as_one",
    ),
    "unisono run train.py --mesh dp=2,tp=2,pp=2": ("test_every_mesh_trains_like_one_process",),
    "unisono run train.py --mesh auto": ("test_what_auto_has_shared_is_trained_like_on_one_process",),
}

ROWS = {
    "same final bits on another number of workers": (
        "test_any_number_of_workers_gives_the_hash_and_losses_of_a_plain_python_run",
    ),
    "evaluation counts every sample once on any worker count": (
        "test_any_number_of_workers_gives_the_hash_and_losses_of_a_plain_python_run",
    ),
    "random state independent of who computes": ("test_noisy_optimizers_lazily_opened_files_and_frozen_dropout",),
    "misspelt options and spec keys refused with a suggestion": (
        "test_a_command_that_does_not_exist_is_corrected",
        "test_a_misspelt_key_in_a_spec_file_is_corrected",
    ),
    "several machines": ("test_two_hosts_train_one_model_from_the_start",),
    "goes on when a worker dies": ("test_each_of_four_is_killed_in_turn",),
    "a killed run goes on bit for bit, on another number of workers": (
        "test_everybody_is_killed_and_another_number_goes_on_with_the_same_bits",
    ),
}


def bold() -> list[str]:
    return [text.strip() for text in re.findall(r"^(?:- )?\*\*(.+?)\*\*", FENCE.sub("", README), re.M)]


def commands() -> list[str]:
    lines = [line.removeprefix("$ ") for block in FENCE.findall(README) for line in block.splitlines()]
    return [line.split(" #")[0].strip() for line in lines if line.startswith(("unisono ", "make "))]


def rows() -> list[str]:
    table = README.split("## Compared with")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [row[0] for row in cells if len(row) > 1 and row[1].startswith("yes")]


def known_tests() -> set[str]:
    found = set()
    for path in TESTS.rglob("test_*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        found |= {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    return found


@pytest.mark.parametrize(
    ("said", "shown"), [(bold, BOLD), (commands, COMMANDS), (rows, ROWS)], ids=["bold", "commands", "rows"]
)
def test_every_promise_of_the_readme_is_named_here_and_no_other(
    said: Callable[[], list[str]], shown: Mapping[str, tuple[str, ...]]
) -> None:
    assert sorted(set(said())) == sorted(shown)


def test_what_shows_a_promise_is_a_test_that_exists() -> None:
    named = {name for table in (BOLD, COMMANDS, ROWS) for names in table.values() for name in names}
    assert sorted(named - known_tests()) == []
