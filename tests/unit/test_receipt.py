# SPDX-License-Identifier: Apache-2.0
"""Receipts: what is in them, that no byte of them changes unseen, who signed them, and that no run fails over one."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from receipted_runs import SPEC, a_run, configured, finished, receipt_of, written
from synthetic_runs import Run
from typer.testing import CliRunner

from unisono.cli.receipt import app
from unisono.core import events, signing
from unisono.core.errors import ReceiptDamaged, UnisonoError, UsageError
from unisono.core.receipt import code_digest, read_receipt, seal, unseal
from unisono.core.receipt_gathering import Sample, code_read, gather, write_receipt
from unisono.core.run_dir import RunDir


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(signing.VARIABLE, raising=False)


# --- what is in it


def test_a_receipt_says_what_went_in_and_what_came_out() -> None:
    found = receipt_of(a_run())
    assert (found.name, found.run["args"], found.job["seed"]) == ("digits", ["--lr", "0.1"], 3)
    assert found.code.files == {"train.py": "aa" * 32, "model.py": "bb" * 32}
    assert found.code.sha256 == code_digest({"model.py": "bb" * 32, "train.py": "aa" * 32})
    assert found.fingerprint["torch"] == "2.13.0"
    assert set(found.versions) == {"python", "torch", "unisono"}
    assert (found.result.steps, found.result.weights_sha256) == (40, "ab" * 32)
    assert found.started.startswith("1970-01-12T13:46:40")
    assert found.losses.every == 1
    assert [float.fromhex(loss) for _, loss in found.losses.rows] == [1.0 / step for step in range(1, 41)]


def test_every_change_of_membership_and_every_checkpoint_is_in_it() -> None:
    run = a_run()
    for digest in ("11" * 32, "11" * 32, "22" * 32):  # one is told twice, by two workers
        run.say(
            events.CheckpointSaved, step=40, bytes=1, bytes_written=1, seconds=1.0, stall_s=0.0, digest=digest,
            writers=[0], url="s3://name:secret@host/place",
        )  # fmt: skip
    run.lose(1, "died", "killed by SIGKILL").replace(1, 2)
    found = receipt_of(run)
    assert [(row.generation, row.members, row.because) for row in found.membership] == [
        (1, [0, 1], "the run starts"),
        (2, [0], "killed by SIGKILL"),
        (3, [0, 2], "worker 2 joined"),
    ]
    assert [row.step for row in found.membership] == [0, 40, 63]
    assert [row.sha256 for row in found.checkpoints] == ["11" * 32, "22" * 32]
    assert "secret" not in seal(found, None).decode()


def test_each_start_of_a_resumed_run_is_in_it_with_the_code_it_had() -> None:
    run = a_run(steps=10)
    again = Run(microbatches=4, now=100.0, step=10, written=run.written).start(4)
    again.say(events.CodeRead, files={"train.py": "cc" * 32})
    again.say(events.Resumed, step=8, digest="dd" * 32, differs=["epochs 1 -> 2"])
    again.say(events.Configured, **configured())
    found = receipt_of(again.train(10))
    assert [start.workers for start in found.starts] == [2, 4]
    assert [start.code for start in found.starts] == [
        code_digest({"train.py": "aa" * 32, "model.py": "bb" * 32}),
        code_digest({"train.py": "cc" * 32}),
    ]
    assert found.code.files == {"train.py": "cc" * 32}
    assert [(row.step, row.checkpoint, row.differs) for row in found.resumes] == [(8, "dd" * 32, ["epochs 1 -> 2"])]
    assert [row.generation for row in found.membership] == [1, 1]
    assert [step for step, _ in found.losses.rows] == list(range(1, 21))


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"data": "1500/abcdefabcdef"}, ("probed samples", "abcdefabcdef", 1500)),
        ({"data": "1500/abcdefabcdef", "hash_": "99" * 32}, ("hash", "99" * 32, 1500)),
        ({"data": "-1/000000000000"}, ("nothing", "", None)),
    ],
)
def test_what_is_known_of_the_data_is_said_together_with_how_it_is_known(told: Any, expected: tuple[Any, ...]) -> None:
    found = receipt_of(a_run(**told)).data
    assert (found.by, found.digest, found.samples) == expected


def test_a_script_that_is_edited_while_it_runs_is_recorded_as_it_was_and_named() -> None:
    Path("train.py").write_text("import model\n")
    Path("model.py").write_text("x = 1\n")
    files = code_read("train.py").files
    assert files == {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in ("train.py", "model.py")}
    run = a_run(files=files)
    assert receipt_of(run).code.changed == []
    Path("model.py").write_text("x = 2\n")
    found = receipt_of(a_run(files=files))
    assert (found.code.files, found.code.changed) == (files, ["model.py"])


def test_a_script_that_cannot_be_read_is_no_reason_to_fail() -> None:
    Path("train.py").mkdir()
    assert code_read("train.py").files == {}
    assert code_read("").files == {}
    assert receipt_of(a_run(files={})).code.sha256 == ""


def test_passwords_and_tokens_in_addresses_stay_at_home() -> None:
    for address in ("s3://me:secret@host/bucket", "abfs://box/path?sig=secret"):
        found = gather(finished(a_run()), SPEC.model_copy(update={"checkpoint_to": address}))
        assert found is not None
        assert "secret" not in seal(found, None).decode()
        assert found.run["checkpoint_to"] in ("s3://host/bucket", "abfs://box/path")


def test_a_run_without_a_result_has_no_receipt() -> None:
    run = a_run()
    assert gather(written(run), SPEC) is None
    assert write_receipt(written(run), SPEC) == []
    assert not Path("runs/digits/receipt.json").exists()


def test_what_an_earlier_start_came_to_is_not_the_receipt_of_one_that_failed() -> None:
    run = a_run()
    run.finish()
    again = Run(microbatches=4, written=run.written, step=40).start(2).train(3)
    again.fail("UNI-2001", "gone")
    assert gather(written(again), SPEC) is None


# --- its size


@given(count=st.integers(1, 5000), most=st.integers(2, 64))
def test_losses_are_thinned_evenly_and_the_first_and_the_last_are_kept(count: int, most: int) -> None:
    sample = Sample(most=most)
    for step in range(1, count + 1):
        sample.take(step, step / 7)
    losses = sample.finish(most)
    steps = [step for step, _ in losses.rows]
    assert steps[0] == 1
    assert steps[-1] == count
    assert len(steps) <= most + 1
    assert set(steps) >= set(range(1, count + 1, losses.every))
    assert count < most or losses.every < 4 * count / most + 1
    assert all(float.fromhex(text) == step / 7 for step, text in losses.rows)


def test_a_loss_that_is_not_a_number_is_kept_as_such() -> None:
    sample = Sample()
    sample.take(1, None)
    assert sample.finish(10).rows == [(1, "nan")]


def test_the_receipt_of_a_long_and_stormy_run_stays_below_a_hundred_kilobytes() -> None:
    run = a_run(steps=6000)
    for number in range(2, 300):
        run.train(1).form([0, number], f"worker {number} joined", 0.01)
    found = receipt_of(run)
    assert len(seal(found, None)) < 100_000
    assert len(found.membership) == 299
    assert found.losses.rows[-1][0] == 6298
    assert found.losses.every == 8  # and not 4: the changes take their room first


# --- no byte changes unseen


@pytest.fixture
def sealed() -> bytes:
    return seal(receipt_of(a_run(steps=4)), signing.make_key())


def test_a_receipt_is_plain_json_whose_hash_any_tool_can_check(sealed: bytes) -> None:
    document = json.loads(sealed)
    body = sealed.partition(b"\n")[2]
    assert hashlib.sha256(body).hexdigest() == document["sha256"]
    key = signing.own_key()
    assert key is not None
    assert document["signed_by"]["public_key"] == key.public.hex()
    assert signing.is_signed(body, bytes.fromhex(document["signature"]), key.public)
    assert max(map(len, sealed.splitlines())) < 300


def test_it_comes_back_as_it_went_in(sealed: bytes) -> None:
    Path("r.json").write_bytes(sealed)
    opened = read_receipt(Path("r.json"))
    key = signing.own_key()
    assert key is not None
    assert opened.signer == key.public
    assert opened.receipt.model_copy(update={"signed_by": None}) == receipt_of(a_run(steps=4))


@pytest.mark.parametrize("change", [0x01, 0x20, 0x80])
def test_every_single_changed_byte_is_found(sealed: bytes, change: int) -> None:
    for place in range(len(sealed)):
        damaged = bytearray(sealed)
        damaged[place] ^= change
        with pytest.raises(ReceiptDamaged):
            unseal(bytes(damaged), "it")


def test_a_byte_too_few_or_too_many_is_found(sealed: bytes) -> None:
    for damaged in (sealed[:-1], sealed[1:], sealed + b"\n", b" " + sealed, sealed.replace(b"\n", b"\r\n"), b""):
        with pytest.raises(ReceiptDamaged):
            unseal(damaged, "it")


def forged(sealed: bytes, old: bytes, new: bytes) -> bytes:
    """With another content and the right hash for it."""
    head, _, body = sealed.partition(b"\n")
    assert body.count(old) == 1
    body = body.replace(old, new)
    return head.replace(head[11:75], hashlib.sha256(body).hexdigest().encode()) + b"\n" + body


def test_a_change_with_a_new_hash_is_found_by_the_signature(sealed: bytes) -> None:
    with pytest.raises(ReceiptDamaged, match="not signed by key"):
        unseal(forged(sealed, b'"steps": 4', b'"steps": 5'), "it")
    with pytest.raises(ReceiptDamaged, match="not signed by key"):
        unseal(forged(sealed, b'"key_id": "', b'"key_id": "0'), "it")


def test_a_receipt_is_signed_or_not_but_never_half(sealed: bytes) -> None:
    with pytest.raises(ReceiptDamaged, match="half signed"):
        unseal(re.sub(rb'(?<="signature":")[0-9a-f]+', b"", sealed), "it")
    assert unseal(seal(receipt_of(a_run()), None), "it").signer is None


def test_a_later_version_is_not_called_damaged(sealed: bytes) -> None:
    with pytest.raises(ReceiptDamaged, match="later version"):
        unseal(forged(sealed, b'"version": 1', b'"version": 2'), "it")


def stamped(body: bytes) -> bytes:
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'","signature":"",\n' + body


@given(body=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@example(b"}")
@example(b'"version": 1}')
@example(b'"format": "unisono receipt", "version": 1, "name": 5}')
@example(b'"a": ' + b"[" * 5_000)
@example(b'"version": ' + b"9" * 5000 + b"}")
def test_whatever_lies_behind_a_right_hash_is_a_receipt_or_damaged(body: bytes) -> None:
    with pytest.raises(ReceiptDamaged):
        unseal(stamped(body), "it")


# --- the key


def test_the_key_is_made_once_and_is_nobody_elses_to_read() -> None:
    assert signing.own_key() is None
    made = signing.make_key()
    path = signing.key_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [item.name for item in path.parent.iterdir()] == ["signing.key"]
    assert signing.make_key().public == made.public  # whoever comes second takes the first one's
    again = signing.own_key()
    assert again is not None
    assert again.public == made.public
    assert made.public.hex() not in repr(made)


def test_the_variable_names_another_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usual = signing.make_key()
    monkeypatch.setenv(signing.VARIABLE, str(tmp_path / "team.key"))
    assert signing.own_key() is None
    other = signing.make_key()
    assert other.public != usual.public
    assert (tmp_path / "team.key").exists()


def test_a_public_key_is_given_as_digits_or_as_a_file() -> None:
    from cryptography.hazmat.primitives import serialization

    key = signing.make_key()
    Path("digits.txt").write_text(key.public.hex() + "\n")
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    Path("key.pem").write_bytes(key.private.public_key().public_bytes(encoding, form))
    for text in (key.public.hex(), key.public.hex().upper(), "digits.txt", "key.pem"):
        assert signing.read_public(text) == key.public
    Path("nonsense").write_text("nonsense")
    for text in ("nonsense", "nowhere", key.public.hex()[:-1], str(signing.key_path()), "a\0b"):
        with pytest.raises(UsageError, match="public key"):
            signing.read_public(text)


# --- no run fails over it


def notices(run_dir: RunDir, lost: tuple[str, ...] = ()) -> list[str]:
    return [notice.code for notice in write_receipt(run_dir, SPEC, lost)]


def test_the_first_receipt_makes_a_key_and_says_so_and_later_ones_say_nothing() -> None:
    run_dir = finished(a_run())
    assert notices(run_dir) == ["signing-key"]
    assert notices(run_dir) == []
    key = signing.own_key()
    assert key is not None
    assert read_receipt(run_dir.receipt).signer == key.public


@pytest.mark.parametrize("text", ["", "no key", "-----BEGIN PRIVATE KEY-----\nMC4=\n-----END PRIVATE KEY-----\n"])
def test_without_a_usable_key_the_receipt_is_written_unsigned(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if text:
        Path("my.key").write_text(text)
        monkeypatch.setenv(signing.VARIABLE, "my.key")
    else:
        Path("config").write_text("a file where the folder should be")
    run_dir = finished(a_run())
    assert notices(run_dir) == ["receipt-unsigned"]
    assert read_receipt(run_dir.receipt).signer is None


def test_a_user_without_a_home_gets_an_unsigned_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", "/proc/nowhere")
    assert notices(finished(a_run())) == ["receipt-unsigned"]


def test_a_full_disk_becomes_a_notice() -> None:
    run_dir = finished(a_run())
    scratch = run_dir.receipt.with_name("receipt.json.tmp")
    scratch.symlink_to("/dev/full")
    (notice,) = [notice for notice in write_receipt(run_dir, SPEC) if notice.code != "signing-key"]
    assert notice.code == "no-receipt"
    assert "No space left" in notice.text
    assert not run_dir.receipt.exists()


def test_events_that_are_lost_or_damaged_become_a_notice() -> None:
    run_dir = finished(a_run())
    assert notices(run_dir, ("events.jsonl",)) == ["no-receipt"]
    run = a_run()
    run.say(events.RunFinished, result={"steps": "many"})
    assert notices(written(run)) == ["no-receipt"]
    assert notices(RunDir(Path("nowhere"))) == ["no-receipt"]


# --- the command


def unisono(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, arguments)
    if isinstance(done.exception, UnisonoError):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


def test_verify_names_the_signer_and_knows_whom_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = finished(a_run())
    notices(run_dir)
    for name in ("digits", "runs/digits", "runs/digits/receipt.json"):
        assert "which is yours" in unisono("verify", name)
    mine = unisono("key").strip()
    assert "as you asked" in unisono("verify", "digits", "--key", mine)
    monkeypatch.setenv(signing.VARIABLE, "other.key")
    assert unisono("key").strip() != mine
    assert "cannot say" in unisono("verify", "digits")
    assert "not by" in unisono("verify", "digits", "--key", unisono("key").strip(), code=1)


def test_verify_tells_unsigned_damaged_and_missing_receipts_apart() -> None:
    run_dir = finished(a_run())
    with pytest.raises(UsageError, match="has no receipt"):
        unisono("verify", "digits")
    with pytest.raises(UsageError, match="cannot read the receipt"):
        unisono("verify", "gone.json")
    run_dir.receipt.write_bytes(seal(receipt_of(a_run()), None))
    assert "not signed" in unisono("verify", "digits", code=1)
    run_dir.receipt.write_bytes(run_dir.receipt.read_bytes()[:-2])
    with pytest.raises(ReceiptDamaged) as damaged:
        unisono("verify", "digits")
    assert damaged.value.exit_code == 32


def test_a_key_that_cannot_be_made_is_said() -> None:
    Path("config").write_text("a file where the folder should be")
    with pytest.raises(UsageError, match="no signing key"):
        unisono("key")
