"""Samples from every kind of source, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gtco.quantization.data import MOST, Samples, Spec, samples_of
from gtco.support.errors import InputError

IMAGE = Spec("image", np.dtype(np.float32), (None, 3, 4, 4))
MASK = Spec("mask", np.dtype(bool), (1, 5))


def images(count: int = 40) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 3, 4, 4)).astype(np.float32)


def masks(count: int = 40) -> np.ndarray:
    return np.random.default_rng(1).random((count, 5)) < 0.5


def stacked(samples: Samples, name: str = "image") -> np.ndarray:
    return np.concatenate([run[name] for run in samples.runs])


def sources(folder: Path) -> dict[str, Any]:
    """The same 40 images in every form."""
    x = images()
    np.save(folder / "all.npy", x)
    np.savez(folder / "all.npz", image=x)
    np.savez(folder / "other.npz", anything=x)
    (folder / "files").mkdir()
    for n in range(0, 40, 8):
        np.save(folder / "files" / f"{n:02}.npy", x[n : n + 8])
    (folder / "files" / "notes.txt").write_text("no samples")
    labelled = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.arange(40))
    return {
        "array": x,
        "tensor": torch.from_numpy(x).requires_grad_(),
        "mapping": {"image": x, "label": np.arange(40)},
        "npy": folder / "all.npy",
        "npz": str(folder / "all.npz"),
        "npz of another name": folder / "other.npz",
        "folder": folder / "files",
        "wide": x.astype(np.float64),
        "one run after the other": x[:, None],
        "list of images": list(x),
        "iterator of batches": iter(np.array_split(x, 7)),
        "iterator of mappings": ({"image": one[None], "label": 3} for one in x),
        "loader with labels": torch.utils.data.DataLoader(labelled, batch_size=16),
        "data set": labelled,
    }


def test_every_source_gives_the_same_samples(tmp_path: Path) -> None:
    for name, source in sources(tmp_path).items():
        found = samples_of(source, [IMAGE])
        np.testing.assert_array_equal(stacked(found), images(), name)
        assert found.runs[0]["image"].dtype == np.float32
        assert (len(found), len(found.held_out), len(found.chosen_by)) == (40, 10, 30)
        assert found.shapes == {"image": (1, 3, 4, 4)}


def test_held_out_samples_choose_nothing() -> None:
    found = samples_of(images(), [IMAGE])
    np.testing.assert_array_equal(
        np.concatenate([r["image"] for r in found.held_out]), images()[3::4]
    )
    assert not {id(r) for r in found.held_out} & {id(r) for r in found.chosen_by}


def test_several_inputs_by_name_and_in_order() -> None:
    both = {"mask": masks(), "image": images()}
    pairs = list(zip(images(), masks(), strict=True))
    for source in (both, pairs):
        found = samples_of(source, [IMAGE, MASK])
        np.testing.assert_array_equal(stacked(found), images())
        np.testing.assert_array_equal(stacked(found, "mask"), masks())


def test_a_fixed_batch_takes_several_samples_a_run() -> None:
    found = samples_of(images(64), [Spec("image", np.dtype(np.float32), (8, 3, 4, 4))])
    assert len(found.runs) == 8 and len(found) == 64
    np.testing.assert_array_equal(stacked(found), images(64))


def test_at_most_so_many_are_taken() -> None:
    """Evenly spaced ones of an array; of an iterator no more are asked for."""
    found = samples_of(images(1000), [IMAGE])
    assert len(found) == MOST
    np.testing.assert_array_equal(found.runs[0]["image"][0], images(1000)[0])
    np.testing.assert_array_equal(found.runs[-1]["image"][0], images(1000)[-1])
    asked = 0

    def endless() -> Any:
        nonlocal asked
        while True:
            asked += 1
            yield np.full((3, 4, 4), asked, np.float32)

    assert len(samples_of(endless(), [IMAGE])) == MOST == asked


def nan(x: np.ndarray, value: float = np.nan) -> np.ndarray:
    x[17, 1, 2, 3] = value
    return x


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (np.zeros((0, 3, 4, 4), np.float32), "no samples: give 32 or more"),
        ([], "no samples"),
        (images(1), "the data has 1 sample: give 32 or more"),
        (images(31), "31 samples: give 32 or more"),
        (np.ones((40, 3, 4, 4), np.float32), "every element of 'image' is 1 in all samples"),
        (np.repeat(images(1), 40, axis=0), "all 40 samples are the same"),
        (nan(images()), "sample 17 has NaN or infinity in 'image'"),
        (nan(images(), -np.inf), "sample 17 has NaN or infinity"),
        (nan(images().astype(np.float64), 1e300), "sample 17 has NaN or infinity"),
        (
            images().transpose(0, 2, 3, 1),
            r"shape \[40, 4, 4, 3\] for the input 'image' float32 \[\?",
        ),
        (images()[..., :3], "shape"),
        (images().reshape(40, -1), r"shape \[40, 48\]"),
        (images().astype(np.uint8), "is uint8 .* after scaling and normalizing"),
        (images() > 0, "is bool"),
        (np.array(["a"] * 40), "<U1"),
        (images().astype(complex), "complex128"),
        (
            {"picture": images(), "label": masks()},
            "no array for the input 'image'; it has 'picture'",
        ),
        ([images(1), images(1)[..., :2]] * 20, "item 1 of the data has the shape"),
        (17, "data is a int: give the path"),
        (b"abc", "data is a bytes"),
    ],
)
def test_wrong_samples(data: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        samples_of(data, [IMAGE])


def test_wrong_samples_of_several_inputs() -> None:
    specs = [IMAGE, MASK]
    with pytest.raises(InputError, match="40 for 'image', 39 for 'mask'"):
        samples_of({"image": images(), "mask": masks(39)}, specs)
    with pytest.raises(InputError, match=r"is one array, and the model takes 'image' .*'mask'"):
        samples_of(images(), specs)
    with pytest.raises(InputError, match="item 0 of the data has 1 values"):
        samples_of([(images(1),)] * 40, specs)
    with pytest.raises(InputError, match="no inputs"):
        samples_of(images(), [])


def test_samples_of_several_sizes() -> None:
    free = Spec("image", np.dtype(np.float32), (None, 3, None, None))
    mixed = [images(1), images(1)[..., :2]] * 20
    with pytest.raises(InputError, match=r"sample 1 has the shape \[1, 3, 4, 2\]"):
        samples_of(mixed, [free])


def test_no_samples_of_a_fixed_batch() -> None:
    with pytest.raises(InputError, match="the data has no samples: give 32 or more"):
        samples_of(images(0), [Spec("image", np.dtype(np.float32), (1, 3, 4, 4))])


class Broken:
    """A data set of which an item cannot be read."""

    def __init__(self, length: int = 40) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> np.ndarray:
        if number == 33:
            raise KeyError("image_33.png")
        return images(1)


def loader(error: Exception) -> Any:
    yield from images(3)
    raise error


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (loader(ValueError("no JPEG")), "item 3 of the data cannot be read: ValueError: no JPEG"),
        (loader(OSError("disk gone")), "item 3 of the data cannot be read: OSError: disk gone"),
        (loader(RuntimeError()), "item 3 of the data cannot be read: RuntimeError$"),
        (Broken(), "item 33 of the data cannot be read: KeyError: 'image_33.png'"),
        (Broken(-1), "item 0 of the data cannot be read: ValueError"),
        (torch.from_numpy(images()).to("meta"), "the data cannot be read: NotImplementedError"),
        (torch.from_numpy(images()).to_sparse(), "the data cannot be read: TypeError"),
        ({"image": [[1, 2], [3]]}, "the data cannot be read: ValueError"),
    ],
)
def test_what_the_code_of_the_data_raises(data: Any, said: str) -> None:
    """It is not a fault of gtco, and the cause has the traceback."""
    with pytest.raises(InputError, match=said) as raised:
        samples_of(data, [IMAGE])
    assert raised.value.__cause__ is not None


def test_too_few_for_the_batch() -> None:
    with pytest.raises(InputError, match="48 samples, which are 3 runs of 16: give 64 or more"):
        samples_of(images(48), [Spec("image", np.dtype(np.float32), (16, 3, 4, 4))])
    with pytest.raises(InputError, match="first axis counts samples, 16 a run"):
        samples_of(images(40), [Spec("image", np.dtype(np.float32), (16, 3, 4, 4))])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"PK\x03\x04 and no more")
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([{}], object), allow_pickle=True)
    (tmp_path / "empty").mkdir()
    for path, said in {
        tmp_path / "none.npz": "No such file",
        tmp_path / "images.png": "give a .npz, a .npy or a folder",
        broken: "cannot read samples from",
        objects: "cannot read samples from",
        tmp_path / "empty": "has no .npy and no .npz file",
    }.items():
        with pytest.raises(InputError, match=said):
            samples_of(path, [IMAGE])


SCALE = Spec("scale", np.dtype(np.float32), ())


@pytest.mark.parametrize("form", ["mapping", "list"])
def test_an_input_that_is_a_number_has_one_a_run(form: str) -> None:
    x, scales = images(), np.linspace(0, 1, 40, dtype=np.float64)
    data: Any = {"image": x, "scale": scales}
    if form == "list":
        data = [{"image": one[None], "scale": n} for one, n in zip(x, scales, strict=True)]
    found = samples_of(data, [IMAGE, SCALE])
    assert all(run["scale"].shape == () for run in found.runs)
    assert [run["scale"] for run in found.runs] == list(scales.astype(np.float32))


def test_an_input_without_samples_does_not_count() -> None:
    """Its first axis is of something else, such as tokens."""
    specs = [Spec("x", np.dtype(np.float32), (1, 16)), Spec("t", np.dtype(np.float32), (77, 16))]

    def given(count: int) -> dict[str, np.ndarray]:
        numbers = np.arange(count, dtype=np.float64)[:, None]
        return {"x": np.ones(16) * numbers, "t": np.ones((77, 16)) * numbers[:, None]}

    assert len(samples_of(given(64), specs).runs) == 64
    with pytest.raises(InputError, match="12 samples: give 32 or more"):
        samples_of(given(12), specs)


def test_integers_that_the_input_does_not_hold() -> None:
    data = np.random.default_rng(0).integers(-300, 600, (32, 4))
    with pytest.raises(InputError, match="which holds 0 to 255"):
        samples_of(data, [Spec("x", np.dtype(np.uint8), (1, 4))])
