"""Text to tokens: each document once, in order, ended; the same files from any number of workers."""

import json
import multiprocessing
import os
import platform
from pathlib import Path

import pytest

from megazero.data import IndexedDataset
from megazero.data.stdlib import build_python_stdlib, stdlib_files
from megazero.data.tokenize import Piece, _in_order, cut_into_pieces, find_files, tokenize_files

EOD = 256


def texts_of(prefix: Path) -> list[str]:
    dataset = IndexedDataset(prefix)
    assert all(sequence[-1] == EOD for sequence in dataset)
    return [bytes(sequence[:-1].tolist()).decode() for sequence in dataset]


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def test_every_document_is_written_once_in_order_and_ended(tmp_path):
    tree = tmp_path / "tree"
    (tree / "b").mkdir(parents=True)
    (tree / ".hidden").mkdir()
    (tree / ".hidden" / "no.txt").write_text("no")
    (tree / "b" / "z.txt").write_bytes("é\r\n".encode())
    (tree / "a.py").write_text("first")
    (tree / "empty.txt").write_text("")
    lines = write_jsonl(tmp_path / "lines.jsonl", ["one", "", "zwei\nlines"])
    summary = tokenize_files([lines, tree], tmp_path / "out", "byte")
    assert texts_of(tmp_path / "out") == ["one", "zwei\nlines", "first", "é\r\n"]
    assert (summary.documents, summary.tokens) == (4, 3 + 10 + 5 + 4 + 4)
    assert summary.bytes == lines.stat().st_size + 4 + 5
    assert summary.seconds >= 0


def test_a_last_line_without_newline_and_blank_lines_are_read(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "a"}\n\n  \n{"body": "b"}')
    tokenize_files([path], tmp_path / "out", "byte", jsonl_key="body")
    assert texts_of(tmp_path / "out") == ["a", "b"]


@pytest.mark.parametrize("piece_bytes", [1, 7, 16, 17, 18, 1000])
def test_every_line_belongs_to_one_piece_wherever_the_cuts_fall(tmp_path, monkeypatch, piece_bytes):
    texts = [str(i) * (i % 5) + "." for i in range(20)]
    path = write_jsonl(tmp_path / "x.jsonl", texts)
    pieces = cut_into_pieces([path], piece_bytes)
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert pieces[-1].stop == path.stat().st_size
    monkeypatch.setattr("megazero.data.tokenize.cut_into_pieces", lambda files: pieces)
    tokenize_files([path], tmp_path / "out", "byte")
    assert texts_of(tmp_path / "out") == texts


def test_three_workers_write_the_same_bytes_as_one(tmp_path, monkeypatch):
    inputs = [write_jsonl(tmp_path / "x.jsonl", [f"line {i}" * (i % 7) for i in range(300)])]
    inputs += [tmp_path / f"{i}.txt" for i in range(20)]
    for path in inputs[1:]:
        path.write_text(path.name * 50)
    monkeypatch.setattr("megazero.data.tokenize.cut_into_pieces", lambda files: cut_into_pieces(files, 500))
    progress = []
    for workers in (1, 3):
        tokenize_files(
            inputs, tmp_path / f"out{workers}", "byte", workers=workers, on_progress=lambda *p: progress.append(p)
        )
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out1{suffix}").read_bytes() == (tmp_path / f"out3{suffix}").read_bytes()
    total = sum(path.stat().st_size for path in inputs)
    half = len(progress) // 2
    assert progress[:half] == progress[half:] == sorted(progress[:half])
    assert progress[-1] == (total, total)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{text", r"x\.jsonl:3: not a line of JSON"),
        ('{"body": "x"}', r"x\.jsonl:3: no 'text' in it, found the keys \['body'\]; .*jsonl_key"),
        ('["x"]', r"x\.jsonl:3: no 'text' in it, found a list"),
        ('{"text": 5}', r"x\.jsonl:3: 'text' must be a string, found a int"),
        ('{"text": "\\ud800"}', r"x\.jsonl:3: text that UTF-8 cannot hold"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [4, 1000])
def test_a_bad_line_is_named_by_file_and_line_and_nothing_is_left(tmp_path, monkeypatch, line, message, piece_bytes):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "a"}}\n\n{line}\n{{"text": "b"}}\n')
    monkeypatch.setattr("megazero.data.tokenize.cut_into_pieces", lambda files: cut_into_pieces(files, piece_bytes))
    with pytest.raises(ValueError, match=message):
        tokenize_files([path], tmp_path / "out", "byte")
    assert os.listdir(tmp_path) == ["x.jsonl"]


def test_a_bad_line_is_named_from_a_worker_process_too(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:2: not a line of JSON"):
        tokenize_files([path], tmp_path / "out", "byte", workers=2)
    assert os.listdir(tmp_path) == ["x.jsonl"]


def _die(piece: Piece) -> None:
    os._exit(1)


def test_a_worker_that_dies_is_an_error_and_no_hang():
    with pytest.raises(RuntimeError, match="one of 2 tokenizing processes died"):
        list(_in_order(_die, [Piece("x", 0, 1)] * 20, workers=2))


def test_inputs_that_hold_no_text_are_refused(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("")
    with pytest.raises(ValueError, match=r"image\.png: not a UTF-8 text file"):
        tokenize_files([tmp_path / "image.png"], tmp_path / "out", "byte")
    with pytest.raises(FileNotFoundError, match="no files to tokenize"):
        tokenize_files([tmp_path / "empty"], tmp_path / "out", "byte")
    with pytest.raises(FileNotFoundError, match=r"no file or directory .*absent"):
        find_files([tmp_path / "absent"])
    with pytest.raises(ValueError, match="no text in"):
        tokenize_files([tmp_path / "blank.txt"], tmp_path / "out", "byte")
    with pytest.raises(ValueError, match="workers=0"):
        tokenize_files([tmp_path / "image.png"], tmp_path / "out", "byte", workers=0)
    assert not list(tmp_path.glob("out*"))


def test_the_standard_library_comes_without_suites_and_installed_packages():
    files = stdlib_files()
    names = {path.name for path in files}
    assert {"argparse.py", "os.py", "decoder.py"} <= names
    folders = {part for path in files for part in path.relative_to(Path(os.__file__).parent).parts[:-1]}
    assert not folders & {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    assert files == sorted(files, key=lambda path: path.parts)


def _build_when_all_are_ready(cache_dir: Path, barrier, results) -> None:
    from megazero.data import tokenize

    built = []
    inner = tokenize.tokenize_files
    tokenize.tokenize_files = lambda *args, **options: built.append(1) or inner(*args, **options)
    barrier.wait(timeout=20)
    results.put((str(build_python_stdlib(cache_dir, "byte")), len(built)))


def test_of_many_processes_that_want_the_standard_library_one_builds_it(tmp_path):
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(5), fork.Queue()
    processes = [fork.Process(target=_build_when_all_are_ready, args=(tmp_path, barrier, results)) for _ in range(5)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(timeout=20)
    prefix = tmp_path / f"python-stdlib-{platform.python_version()}-byte"
    assert {answer for answer, _ in answers} == {str(prefix)}
    assert sum(built for _, built in answers) == 1
    assert Path(os.__file__).read_text() in texts_of(prefix)


def test_a_damaged_cache_is_built_again_and_a_whole_one_is_kept(tmp_path, monkeypatch):
    some = stdlib_files()[:5]
    bad = tmp_path / "latin.py"
    bad.write_bytes(b"# \xe9")
    monkeypatch.setattr("megazero.data.stdlib.stdlib_files", lambda: [*some, bad])
    prefix = build_python_stdlib(tmp_path, "byte")
    whole = Path(f"{prefix}.bin").read_bytes()
    assert texts_of(prefix) == [text for path in some if (text := path.read_text())]
    Path(f"{prefix}.bin").write_bytes(whole[:-1])
    assert build_python_stdlib(tmp_path, "byte") == prefix
    assert Path(f"{prefix}.bin").read_bytes() == whole
    monkeypatch.setattr("megazero.data.tokenize.tokenize_files", None)  # a call would fail
    assert build_python_stdlib(tmp_path, "byte") == prefix
