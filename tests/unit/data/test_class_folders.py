"""Class folders as data: labels, captions, the train and held-out sides, and errors."""

from __future__ import annotations

from pathlib import Path

from helpers.samples import encode, jpeg, picture, read_all

from clipx.data.folder import FolderSpec


def write_class_folders(place: Path, **images: int) -> Path:
    """Creates one class folder per keyword, with the given number of images."""
    for number, (name, count) in enumerate(images.items()):
        (place / name).mkdir(parents=True)
        for i in range(count):
            (place / name / f"{i:03d}.jpg").write_bytes(jpeg(1000 * number + i))
    return place


def spec(path: Path | str | None, **options: object) -> FolderSpec:
    return FolderSpec(name="mine", path=None if path is None else str(path), **options)  # type: ignore[arg-type]


def test_labels_index_the_sorted_class_folders_and_captions_use_their_names(tmp_path: Path) -> None:
    write_class_folders(tmp_path, zebra=1, black_bear=2)
    data = spec(tmp_path, held_out_share=0.0).open()
    assert [(s.label, s.captions) for s in read_all(data.train)] == [
        (0, ["a photo of a black bear."]),
        (0, ["a photo of a black bear."]),
        (1, ["a photo of a zebra."]),
    ]
    assert data.classes is not None
    assert list(data.classes.names) == ["black bear", "zebra"]
    assert data.held_out is None
    assert data.train.key(2) == str(tmp_path / "zebra" / "000.jpg")


def test_images_of_all_formats_below_a_class_folder_are_found_other_files_skipped(tmp_path: Path) -> None:
    write_class_folders(tmp_path, cat=1)
    (tmp_path / "cat" / "more").mkdir()
    (tmp_path / "cat" / "more" / "a.PNG").write_bytes(encode(picture(9, 9), "PNG"))
    (tmp_path / "cat" / "b.webp").write_bytes(encode(picture(9, 9), "WEBP"))
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / "c.svg").write_text("<svg/>")
    (tmp_path / "names.txt").write_text("no class")
    (tmp_path / ".cache").mkdir()
    data = spec(tmp_path, held_out_share=0.0).open()
    source = data.train
    assert [Path(source.key(i)).name for i in range(sum(source.sizes))] == ["000.jpg", "b.webp", "a.PNG"]
    note = f"{tmp_path}: 1 images are not read, e.g. cat/c.svg: convert them to JPEG, PNG or WebP"
    assert list(data.notes) == [note], "skipped images are logged"


def test_a_share_of_each_class_is_held_out_and_evaluation_sets_stay_whole(tmp_path: Path) -> None:
    write_class_folders(tmp_path, a=10, b=10)
    data = spec(tmp_path, held_out_share=0.2).open()
    assert data.held_out is not None
    assert [s.label for s in read_all(data.held_out)] == [0, 0, 1, 1]
    assert sum(data.train.sizes) == 16
    as_set = spec(tmp_path, held_out_share=0.2).open_for_evaluation().held_out
    assert as_set is not None and sum(as_set.sizes) == 20


def test_a_held_out_folder_without_some_classes_keeps_the_training_labels(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", a=3, b=3, c=3)
    write_class_folders(tmp_path / "test", c=2, b=1)
    data = spec(tmp_path / "train", held_out_path=str(tmp_path / "test")).open()
    assert data.held_out is not None
    assert [s.label for s in read_all(data.held_out)] == [1, 2, 2]
    assert sum(data.train.sizes) == 9


def test_class_names_and_templates_are_read_from_files(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "x", n01=1, n02=1)
    (tmp_path / "names.txt").write_text("tench\ngoldfish\n")
    (tmp_path / "templates.txt").write_text("a {}\nthe {c}\n")
    options = {"classnames": f"{tmp_path}/names.txt", "templates": f"{tmp_path}/templates.txt"}
    source = spec(tmp_path / "x", held_out_share=0.0, **options).open().train
    assert [s.captions for s in read_all(source)] == [["a tench", "the tench"], ["a goldfish", "the goldfish"]]
