# SPDX-License-Identifier: Apache-2.0
"""The built-in data sources without a network: digits, Python's own source, idx files in a folder, lazy names."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import pickle
import random
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, default_collate

import unisono.data
from unisono.core.errors import SetupError
from unisono.data import TextWindows, digits, mnist, python_source, python_text
from unisono.data.digits import scaled

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def small_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = ((20, 28, 28), (20,), (10, 28, 28), (10,))
    return {
        name: rng.integers(0, 256 if len(shape) == 3 else 10, shape) for name, shape in zip(NAMES, shapes, strict=True)
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, array in small_arrays().items():
        (tmp_path / name).write_bytes(idx(array))
    return tmp_path


def bits(parts: tuple[TensorDataset, TensorDataset]) -> str:
    state = hashlib.sha256()
    for part in parts:
        for tensor in part.tensors:
            state.update(tensor.contiguous().numpy().tobytes())
    return state.hexdigest()


# Digits


def test_digits_have_the_shapes_and_types_of_mnist() -> None:
    train, test = digits()
    for part, count in ((train, 1438), (test, 359)):
        images, labels = part.tensors
        assert images.shape == (count, 1, 28, 28)
        assert images.dtype == torch.float32
        assert labels.shape == (count,)
        assert labels.dtype == torch.int64
        assert set(labels.tolist()) == set(range(10))


def test_digits_are_the_same_bits_on_every_machine() -> None:
    assert bits(digits()) == "5bd7769c8a3859ea15bb806684eed04a3dec6fee2b9a3d3c2db0a500173d4ed7"


def test_digits_do_not_depend_on_threads_or_on_global_random_state() -> None:
    threads = torch.get_num_threads()
    seen = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            torch.manual_seed(number)
            np.random.seed(number)
            random.seed(number)
            seen.append(bits(digits()))
    finally:
        torch.set_num_threads(threads)
    assert seen[0] == seen[1]


def test_digits_leave_global_random_state_alone() -> None:
    before = torch.get_rng_state(), pickle.dumps(np.random.get_state()), random.getstate()
    digits()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (pickle.dumps(np.random.get_state()), random.getstate())


def test_another_seed_tests_on_other_digits() -> None:
    assert bits(digits(seed=1)) != bits(digits(seed=0))


def test_every_digit_is_in_exactly_one_part() -> None:
    train, test = digits(size=8)
    levels = [torch.unique(part.tensors[0]) for part in (train, test)]
    assert all(len(level) == 17 for level in levels)  # the originals are 0..16: nothing was smeared at their own size

    def rows(part: TensorDataset) -> list[bytes]:
        images, labels = part.tensors
        ranks = torch.searchsorted(levels[0], images).to(torch.uint8)
        return [image.numpy().tobytes() + bytes([int(label)]) for image, label in zip(ranks, labels, strict=True)]

    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    original = [row.astype(np.uint8).tobytes() + bytes([int(label)]) for row, label in zip(pixels, labels, strict=True)]
    assert sorted(rows(train) + rows(test)) == sorted(original)


def test_digits_are_scaled_bilinearly_into_the_inner_20_by_20() -> None:
    pixels = np.random.default_rng(0).integers(0, 17, (5, 8, 8))
    ours = torch.from_numpy(scaled(pixels, 28)).double() / 255
    theirs = functional.interpolate(
        torch.from_numpy(pixels)[:, None].double() / 16, size=(20, 20), mode="bilinear", align_corners=False
    )
    torch.testing.assert_close(ours, functional.pad(theirs, (4, 4, 4, 4))[:, 0], rtol=0, atol=0.5 / 255 + 1e-9)


@pytest.mark.parametrize("size", [8, 9, 12, 16, 28, 31, 64])
def test_digits_come_in_the_size_that_was_asked_for(size: int) -> None:
    train, test = digits(size=size)
    assert train.tensors[0].shape[1:] == test.tensors[0].shape[1:] == (1, size, size)


def test_training_digits_have_mean_zero_and_deviation_one() -> None:
    images = digits()[0].tensors[0].double()
    assert abs(images.mean().item()) < 1e-6
    assert abs(images.std(unbiased=False).item() - 1) < 1e-6


def test_digits_can_be_told_apart_by_their_labels() -> None:
    (images, labels), (test_images, test_labels) = (part.tensors for part in digits())
    means = torch.stack([images[labels == label].mean(0).flatten() for label in range(10)])
    guesses = torch.cdist(test_images.flatten(1), means).argmin(1)
    assert (guesses == test_labels).double().mean() > 0.8


def test_digits_without_scikit_learn_name_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # how Python itself spells "cannot be imported"
    with pytest.raises(SetupError) as caught:
        digits()
    assert 'pip install "unisono[demo]"' in str(caught.value)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.2, 3.0, 1e-9])
def test_a_split_that_leaves_a_part_empty_is_refused(fraction: float) -> None:
    with pytest.raises(SetupError, match="leaves nothing to"):
        digits(test_fraction=fraction)


def test_digits_smaller_than_the_originals_are_refused() -> None:
    with pytest.raises(SetupError, match="size=7"):
        digits(size=7)


# Text


def test_python_source_is_python_and_always_the_same() -> None:
    text = python_source(300_000)
    assert text == python_source(300_000)
    assert len(text) == 300_000
    assert b"\nimport " in text
    assert b"\ndef " in text


def test_less_python_source_is_the_beginning_of_more() -> None:
    assert python_source(400_000).startswith(python_source(150_000))


def test_all_python_source_has_the_library_but_not_its_tests_tables_and_local_settings() -> None:
    text, root = python_source(), Path(sysconfig.get_path("stdlib"))
    settings = list(root.glob("_sysconfigdata*.py"))
    assert settings
    for wanted in ("argparse.py", "json/decoder.py", "asyncio/base_events.py"):
        assert (root / wanted).read_bytes() in text
    for unwanted in (root / "encodings" / "cp437.py", Path(pytest.__file__), *settings):
        assert unwanted.read_bytes() not in text


@given(
    text=st.binary(min_size=1, max_size=60),
    length=st.integers(1, 12),
    stride=st.one_of(st.none(), st.integers(1, 12)),
)
def test_windows_are_slices_of_the_text_and_targets_are_shifted_by_one(
    text: bytes, length: int, stride: int | None
) -> None:
    step = length if stride is None else stride
    expected = []
    for start in range(0, len(text), step):
        if start + length + 1 <= len(text):
            expected.append((list(text[start : start + length]), list(text[start + 1 : start + length + 1])))
    if not expected:
        with pytest.raises(SetupError, match="too short"):
            TextWindows(text, length, stride)
        return
    windows = TextWindows(text, length, stride)
    assert len(windows) == len(expected)
    assert [(x.tolist(), y.tolist()) for x, y in map(windows.__getitem__, range(len(windows)))] == expected
    ids = [len(windows) - 1, *range(len(windows))]
    assert [(x.tolist(), y.tolist()) for x, y in windows.__getitems__(ids)] == [expected[i] for i in ids]


def test_windows_hold_token_numbers_that_an_embedding_takes() -> None:
    inputs, targets = TextWindows(bytes(range(256)), 255)[0]
    assert inputs.dtype == targets.dtype == torch.int64
    assert int(targets.max()) == TextWindows.vocabulary - 1


def test_windows_are_batched_by_torch_as_they_are() -> None:
    windows = TextWindows(bytes(range(100)), 9)
    inputs, targets = next(iter(DataLoader(windows, batch_size=4)))
    assert inputs.shape == targets.shape == (4, 9)
    one_by_one = default_collate([windows[i] for i in range(4)])
    assert torch.equal(inputs, one_by_one[0])
    assert torch.equal(targets, one_by_one[1])


def test_changing_inputs_in_place_changes_neither_targets_nor_the_text() -> None:
    windows = TextWindows(b"abcdefgh", 3)
    for inputs, targets in (windows[0], windows.__getitems__([0])[0]):
        inputs.zero_()
        assert bytes(targets.tolist()) == b"bcd"
    assert bytes(windows[0][0].tolist()) == b"abc"


def test_windows_count_from_the_end_and_stop_where_they_end() -> None:
    windows = TextWindows(b"abcdefgh", 2)
    assert torch.equal(windows[-1][0], windows[len(windows) - 1][0])
    for index in (len(windows), -len(windows) - 1):
        with pytest.raises(IndexError):
            windows[index]
        with pytest.raises(IndexError):
            windows.__getitems__([index])
    assert len([*windows]) == 3  # type: ignore[misc]  # iteration by index, as Python does it for any sequence


def test_windows_travel_to_loader_processes() -> None:
    windows = TextWindows(b"abcdefgh", 2)
    again = pickle.loads(pickle.dumps(windows))
    assert len(again) == len(windows)
    assert torch.equal(again[1][1], windows[1][1])


def test_a_text_too_short_for_one_window_says_how_long_it_must_be() -> None:
    with pytest.raises(SetupError, match="it has 8 bytes, a window needs 9"):
        TextWindows(b"12345678", 8)


@pytest.mark.parametrize(("length", "stride"), [(0, None), (-1, None), (4, 0)])
def test_windows_without_extent_are_refused(length: int, stride: int | None) -> None:
    with pytest.raises(SetupError, match="1 or more"):
        TextWindows(b"12345678", length, stride)


def test_the_test_part_of_python_text_is_the_tail_of_the_source() -> None:
    train, test = python_text(length=64, max_bytes=100_000, test_fraction=0.1)
    assert bytes(train.tokens.tolist()) + bytes(test.tokens.tolist()) == python_source(100_000)
    assert len(test.tokens) == 10_000
    assert train[0][0].shape == (64,)


@pytest.mark.parametrize("options", [{"max_bytes": 1000}, {"test_fraction": 0.0}, {"max_bytes": 0}])
def test_python_text_that_has_no_window_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(SetupError):
        python_text(**options)  # type: ignore[arg-type]


# MNIST from a folder


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_of_idx_files_is_read_plain_or_compressed(folder: Path, packed: bool) -> None:
    if packed:
        for name in NAMES:
            (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
            (folder / name).unlink()
    train, test = mnist(folder)
    arrays = list(small_arrays().values())
    assert train.tensors[1].tolist() == arrays[1].tolist()
    assert test.tensors[1].tolist() == arrays[3].tolist()
    mean, deviation = arrays[0].mean(), arrays[0].std()
    for part, pixels in ((train, arrays[0]), (test, arrays[2])):
        expected = torch.from_numpy((pixels - mean) / deviation).float()[:, None]
        torch.testing.assert_close(part.tensors[0], expected, rtol=0, atol=1e-6)


def test_one_network_takes_mnist_and_digits_alike(folder: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 26 * 26, 10))
    for train, test in (mnist(str(folder)), digits()):
        for part in (train, test):
            images, labels = part[:4]
            assert torch.isfinite(functional.cross_entropy(network(images), labels))


def test_a_gz_that_a_browser_unpacked_is_still_read(folder: Path) -> None:
    for name in NAMES:
        (folder / name).rename(folder / f"{name}.gz")
    assert len(mnist(folder)[0]) == 20


def test_a_missing_file_is_named_with_what_was_looked_for(folder: Path) -> None:
    (folder / NAMES[1]).unlink()
    with pytest.raises(SetupError) as caught:
        mnist(folder)
    text = str(caught.value)
    assert f"{folder} lacks {NAMES[1]}" in text
    assert f"{NAMES[1]}.gz" in text


def test_a_folder_that_does_not_exist_is_an_error_and_never_a_fallback(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="is not a folder"):
        mnist(tmp_path / "nowhere")


GOOD_LABELS = idx(np.arange(10).repeat(2))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "starts with nothing"),
        (b"\x80\x04\x95" + GOOD_LABELS, "starts with 80 04 95 00"),  # how a pickle begins
        (idx(np.zeros((20, 28, 28))), "starts with 00 00 08 03, not 00 00 08 01"),
        (GOOD_LABELS[:6], "inside its header"),
        (GOOD_LABELS[:-1], "promises 20 bytes, it holds 19"),
        (GOOD_LABELS + b"\0", "promises 20 bytes, it holds more"),
        (struct.pack(">4BI", 0, 0, 8, 1, 2**32 - 1), "promises 4,294,967,295 bytes, it holds 0"),
        (gzip.compress(GOOD_LABELS)[:-10], "damaged or cut short"),
        (gzip.compress(GOOD_LABELS)[:-8] + bytes(8), "damaged or cut short"),
        (idx(np.arange(10)), "20 images, and there are 10 labels"),
        (idx(np.full(20, 10)), "one of its labels is 10"),
    ],
    ids=lambda value: value if isinstance(value, str) else "idx",
)
def test_a_damaged_idx_file_is_named_with_what_is_wrong(folder: Path, content: bytes, why: str) -> None:
    (folder / NAMES[1]).write_bytes(content)
    with pytest.raises(SetupError) as caught:
        mnist(folder)
    text = str(caught.value)
    assert why in text
    assert str(folder / "train-") in text
    assert "get that file again" in text


def test_images_of_another_size_are_refused(folder: Path) -> None:
    (folder / NAMES[0]).write_bytes(idx(np.zeros((20, 32, 32))))
    with pytest.raises(SetupError, match="32 x 32, not 28 x 28"):
        mnist(folder)


def test_images_that_are_all_one_colour_are_refused(folder: Path) -> None:
    (folder / NAMES[0]).write_bytes(idx(np.zeros((20, 28, 28))))
    with pytest.raises(SetupError, match="all their pixels are equal"):
        mnist(folder)


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_checksums_verify_the_files_of_a_folder(folder: Path, algorithm: str) -> None:
    sums = {name: hashlib.new(algorithm, (folder / name).read_bytes()).hexdigest() for name in NAMES}
    assert len(mnist(folder, checksums=sums)[0]) == 20
    changed = idx(np.zeros(20))
    (folder / NAMES[1]).write_bytes(changed)
    with pytest.raises(SetupError) as caught:
        mnist(folder, checksums=sums)
    text = str(caught.value)
    for part in (str(folder / NAMES[1]), sums[NAMES[1]], hashlib.new(algorithm, changed).hexdigest()):
        assert part in text


@pytest.mark.parametrize(
    ("checksums", "why"),
    [
        ({"train-image-idx3-ubyte": "0" * 32}, "did you mean 'train-images-idx3-ubyte'"),
        ({NAMES[0]: "0" * 31}, "neither an MD5"),
        ({NAMES[0]: "g" * 32}, "neither an MD5"),
        ({}, "no entry for train-images-idx3-ubyte"),
    ],
)
def test_checksums_that_cannot_verify_are_refused(folder: Path, checksums: dict[str, str], why: str) -> None:
    with pytest.raises(SetupError) as caught:
        mnist(folder, checksums=checksums)
    assert why in str(caught.value)


def test_a_cache_for_a_folder_is_refused_rather_than_ignored(folder: Path) -> None:
    with pytest.raises(SetupError, match="cannot take effect"):
        mnist(folder, cache=folder)


@pytest.mark.parametrize("address", ["s3://bucket/mnist", "http://", "ftp://host/mnist"])
def test_an_address_that_cannot_be_fetched_from_is_refused(address: str) -> None:
    with pytest.raises(SetupError, match="not an address that can be fetched from"):
        mnist(address)


# Names


def test_the_data_package_and_the_order_of_samples_load_without_torch() -> None:
    code = "import sys, unisono.data, unisono.data.order; print('torch' in sys.modules, dir(unisono.data))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False")
    for name in unisono.data.__all__:
        assert f"'{name}'" in done.stdout


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_a_source_stays_a_function_when_the_file_of_its_name_is_imported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = getattr(unisono.data, name)
    monkeypatch.delitem(sys.modules, f"unisono.data.{name}")  # as in a process that imports the file for the first time
    module = importlib.import_module(f"unisono.data.{name}")
    assert getattr(unisono.data, name) is before
    assert callable(before)
    assert callable(getattr(module, name))


def test_a_name_that_is_no_source_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'digit'"):
        unisono.data.digit  # type: ignore[attr-defined]  # noqa: B018
