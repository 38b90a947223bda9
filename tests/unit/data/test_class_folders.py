"""Class folders as data: labels, captions and the held-out side."""

from __future__ import annotations

from pathlib import Path

from helpers.samples import jpeg, read_all

from clipx.data.folder import FolderSpec


def write_class_folders(place: Path, **images: int) -> Path:
    """Creates one class folder per keyword, with the given number of images."""
    for number, (name, count) in enumerate(images.items()):
        (place / name).mkdir(parents=True)
        for i in range(count):
            (place / name / f"{i:03d}.jpg").write_bytes(jpeg(1000 * number + i))
    return place


def test_labels_index_the_sorted_class_folders_and_captions_use_their_names(tmp_path: Path) -> None:
    write_class_folders(tmp_path, zebra=1, black_bear=2)
    data = FolderSpec(name="mine", path=str(tmp_path), held_out_share=0.0).open()
    assert [(s.label, s.captions) for s in read_all(data.train)] == [
        (0, ["a photo of a black bear."]),
        (0, ["a photo of a black bear."]),
        (1, ["a photo of a zebra."]),
    ]
    assert data.classes is not None
    assert list(data.classes.names) == ["black bear", "zebra"]
    assert data.held_out is None
    assert data.train.key(2) == str(tmp_path / "zebra" / "000.jpg")


def test_class_folders_that_are_numbers_have_the_labels_of_imagenetv2(tmp_path: Path) -> None:
    for i in range(12):
        write_class_folders(tmp_path, **{str(i): 1})
    data = FolderSpec(name="v2", path=str(tmp_path), held_out_share=0.0).open()
    assert [(Path(data.train.key(i)).parent.name, data.train.read(i).label) for i in range(12)] == [
        (str(i), i) for i in range(12)
    ]


def test_a_held_out_folder_without_some_classes_keeps_the_training_labels(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", a=3, b=3, c=3)
    write_class_folders(tmp_path / "test", c=2, b=1)
    data = FolderSpec(name="mine", path=f"{tmp_path}/train", held_out_path=f"{tmp_path}/test").open()
    assert data.held_out is not None
    assert [s.label for s in read_all(data.held_out)] == [1, 2, 2]
    assert sum(data.train.sizes) == 9
