"""Text to tokens: each document once, in order, ended; nothing is left out in silence, and nothing done is done again."""

import errno
import gzip
import json
import os
import platform
import re
import resource
import signal
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from harness import killed, run_world
from quickstart import ONE_STAGE, QUICKSTART
from tokenizer_files import write_tokenizer
from typer.testing import CliRunner

from megazero.cli.commands import app
from megazero.data import IndexedDataset, corpus
from megazero.data.corpus import build_python_stdlib, stdlib_files
from megazero.data.tokenizer import load_tokenizer
from megazero.data.writer import IndexedWriter
from megazero.formats import tokenize
from megazero.formats.documents import cut_files, find_files
from megazero.formats.tokenize import _over_processes, tokenize_files
from megazero.formats.train_tokenizer import train_tokenizer

EOD = 256


@pytest.fixture
def shard_bytes(monkeypatch):
    """Sets the bytes of input in a shard."""

    def set_bytes(size: int) -> None:
        inner = cut_files
        monkeypatch.setattr(tokenize, "cut_files", lambda files, _: inner(files, size))
        monkeypatch.setattr(tokenize, "_SHARD_BITS", (0, 0))

    return set_bytes


def texts_of(prefix: Path) -> list[str]:
    dataset = IndexedDataset(prefix)
    assert all(sequence[-1] == EOD for sequence in dataset)
    return [bytes(sequence[:-1].tolist()).decode() for sequence in dataset]


@contextmanager
def _full_disk(left: int):
    """A disk on which no file grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"byte_fallback": True},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True},
        {"user_defined_symbols": ["<sep>", "qu"], "add_dummy_prefix": False, "remove_extra_whitespaces": False},
    ],
)
def test_a_bpe_of_sentencepiece_gives_its_own_ids_and_other_models_are_refused(tmp_path, options):
    sentencepiece = pytest.importorskip("sentencepiece")
    pages = [page.read_text() for page in sorted(Path("docs").glob("*.md"))[:8]]
    texts = [*pages, "  two  spaces\t\n", "\ufb01 日本語 😀 e\u0301 1,000.00", "</s> <sep> \u2581 quick"]
    source, model, out = write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "m.model", tmp_path / "out"

    def tokenized(*words):
        command = ["data", "tokenize", str(source), "--out", str(out), "--tokenizer", str(model), *words]
        return CliRunner().invoke(app, command)

    def run(disk=1 << 40, **training):
        lines = iter("\n".join(pages).splitlines())
        prefix = str(model.with_suffix(""))
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_prefix=prefix, minloglevel=2, **{"vocab_size": 700} | options | training
        )
        with _full_disk(disk):
            return tokenized("--overwrite")

    assert "No such file or directory" in tokenized().output
    assert f"File too large: '{out}.tokenizer.json'" in run(3000, model_type="bpe").output.replace("\n", "")
    assert run(model_type="bpe").exit_code == 0
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    written = [document[:-1].tolist() for document in IndexedDataset(out)]
    assert written == theirs.encode(texts)
    ours = load_tokenizer(f"{out}.tokenizer.json")
    assert [ours.decode(ids).replace("<unk>", " \u2047 ") for ids in written] == theirs.decode(written)
    before = Path(f"{out}.tokenizer.json").read_bytes()
    assert run(model_type="bpe", vocab_size=600).exit_code == 0
    assert Path(f"{out}.tokenizer.json").read_bytes() != before
    Path(f"{out}.tokenizer.json").unlink()
    assert "exists; name another output, or replace it" in tokenized().output
    assert not Path(f"{out}.tokenizer.json").exists()
    model.write_bytes(model.read_bytes()[:-5])
    assert "is not a SentencePiece model, or it is damaged; use the tokenizer.json" in tokenized("--overwrite").output
    assert "is no BPE model: of spellings with equal scores" in run(model_type="unigram").output
    no_spaces = {
        "user_defined_symbols": ["qu"],
        "remove_extra_whitespaces": True,
    }  # the library removes those beside "qu"
    assert "SentencePiece gives" in run(model_type="bpe", **no_spaces).output


def test_every_document_is_written_once_in_order_and_ended(tmp_path):
    tree = tmp_path / "tree"
    (tree / "b").mkdir(parents=True)
    (tree / ".hidden").mkdir()
    (tree / ".hidden" / "no.txt").write_text("no")
    (tree / "b" / "z.txt").write_bytes("é\r\n".encode())
    (tree / "a.py").write_text("first")
    (tree / "empty.txt").write_text("")
    lines = write_jsonl(tmp_path / "lines.jsonl", ["one", "", "zwei\nlines"])
    (tree / "linked").symlink_to(tree / "b")
    summary = tokenize_files([lines, tree], tmp_path / "out", "byte", skip_bad=True)
    assert texts_of(tmp_path / "out") == ["one", "zwei\nlines", "first", "é\r\n"]
    assert (summary.documents, summary.tokens) == (4, 3 + 10 + 5 + 4 + 4)
    assert summary.bytes == lines.stat().st_size + 4 + 5
    assert summary.seconds >= 0
    assert summary.notes == (
        "left out 1 files or directories that cannot be read:\n"
        f"  {tree / 'linked'}: a link to a directory, which is not followed; name it as an input to read it",
        f"left out 2 empty documents:\n  {lines}:2: empty\n  {tree / 'empty.txt'}: empty",
        "left out 1 names that start with a dot",
    )
    assert sorted(os.listdir(tmp_path)) == ["lines.jsonl", "out.bin", "out.identity.json", "out.idx", "tree"]


@pytest.mark.parametrize("range_bytes", [1, 7, 16, 17, 18, 1000])
def test_every_line_belongs_to_one_piece_wherever_the_cuts_fall(tmp_path, shard_bytes, range_bytes):
    texts = [str(i) * (i % 5) + "." for i in range(10)]
    path = write_jsonl(tmp_path / "x.jsonl", texts)
    ranges, _ = cut_files([path], range_bytes)
    assert [file_range.start for file_range in ranges[1:]] == [file_range.stop for file_range in ranges[:-1]]
    assert ranges[-1].stop == path.stat().st_size
    shard_bytes(range_bytes)
    tokenize_files([path], tmp_path / "out", "byte")
    assert texts_of(tmp_path / "out") == texts


def test_three_workers_write_the_same_bytes_as_one(tmp_path, shard_bytes):
    inputs = [write_jsonl(tmp_path / "x.jsonl", [f"line {i}" * (i % 7) for i in range(300)])]
    inputs += [tmp_path / f"{i}.txt" for i in range(20)]
    for path in inputs[1:]:
        path.write_text(path.name * 50)
    shard_bytes(500)
    total = sum(path.stat().st_size for path in inputs)
    for workers in (1, 3):
        done = []
        say = lambda *progress, done=done: done.append(progress)  # noqa: E731
        tokenize_files(inputs, tmp_path / f"out{workers}", "byte", workers=workers, on_progress=say)
        assert done == sorted(done)
        assert done[-1] == (total, total)
    for suffix in (".bin", ".idx", ".identity.json"):
        assert (tmp_path / f"out1{suffix}").read_bytes() == (tmp_path / f"out3{suffix}").read_bytes()


def test_a_folder_stands_for_its_texts_and_not_for_pairs_that_were_written_there(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "model.bin").write_text("a file that is no pair")
    tokenize_files([tmp_path / "a.txt"], tmp_path / "first", "byte")
    (tmp_path / "other.tokenizing").mkdir()
    (tmp_path / "other.tokenizing" / "shard.json").write_text("{}")
    assert tokenize_files([tmp_path], tmp_path / "second", "byte").documents == 2


@pytest.mark.parametrize(("out", "better"), [("new/", "new/corpus"), ("c.bin", "c"), ("c.idx", "c")])
def test_a_prefix_that_is_none_is_refused_with_one_that_is(tmp_path, out, better):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=rf"write {tmp_path}/{better}$"):
        tokenize_files([tmp_path / "a.txt"], f"{tmp_path}/{out}", "byte")
    assert os.listdir(tmp_path) == ["a.txt"]


def write_parquet(path: Path, texts: list[str], **options) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'megazero[data]'")
    import pyarrow

    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, path, **{"row_group_size": 7, **options})
    return path


def write_packed(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content[:90]) + gzip.compress(content[90:]))  # two members, as from `cat`
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'megazero[data]'")
        pack = partial(pyarrow.compress, codec="zstd", asbytes=True)
        path.write_bytes(pack(content[:90]) + pack(content[90:]))
    return path


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".txt.gz", ".TXT.zst"])
def test_every_format_gives_the_tokens_of_its_plain_text(tmp_path, shard_bytes, kind):
    texts = [f"document {i} é\n" * (i % 9 + 1) for i in range(40)]
    whole = kind.lower().startswith(".txt")
    plain = write_jsonl(tmp_path / "plain.jsonl", ["".join(texts)] if whole else texts)
    if kind == ".parquet":
        path = write_parquet(tmp_path / f"x{kind}", texts)
    elif kind == ".arrow":
        datasets = pytest.importorskip("datasets", reason="needs datasets")
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "set")
        (path,) = (tmp_path / "set").glob("*.arrow")
    else:
        path = write_packed(tmp_path / f"x{kind}", "".join(texts).encode() if whole else plain.read_bytes())
    tokenize_files([plain], tmp_path / "plain", "byte")
    shard_bytes(200)
    tokenize_files([path], tmp_path / "out", "byte", workers=2)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"plain{suffix}").read_bytes()


def test_a_url_is_read_as_the_file_it_names_and_a_dotted_key_reaches_into_objects(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        lines = [{"data": {"text": f"{name}{number}"}} for number in range(3)] + [{"data.text": "plain"}]
        (tmp_path / "in" / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    url, out = f"file://{tmp_path}/in/*.jsonl", str(tmp_path / "out")
    assert CliRunner().invoke(app, ["data", "tokenize", url, "--out", out, "--jsonl-key", "data.text"]).exit_code == 0
    assert CliRunner().invoke(app, ["data", "tokenize", out, "--out", url]).exit_code == 2
    assert texts_of(tmp_path / "out") == ["a0", "a1", "a2", "plain", "b0", "b1", "b2", "plain"]
    with pytest.raises(ValueError, match="no 'body' in it"):
        tokenize_files([f"file://{tmp_path}/in/a.jsonl"], tmp_path / "no", "byte", jsonl_key="data.body")
    for url, said in ((f"file://{tmp_path}/none.jsonl", "none.jsonl cannot be fetched"), ("nope://x", "nope")):
        with pytest.raises(OSError, match=said):
            tokenize_files([url], tmp_path / "no", "byte")


@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.ndjson", "RC_2020-01", "x.csv", "x.txt"])
def test_json_lines_are_read_as_such_under_any_name(tmp_path, shard_bytes, name, kind):
    """Also with blank lines, a byte-order mark, integers that Python does not read, and no newline at the end."""
    records = (b'{"n": %b, "body": "%d"}' % (b"9" * 5000, number) for number in range(5))
    lines = b"\xef\xbb\xbf" + b"\n\n  \n".join(records)
    path = tmp_path / f"{name}{kind}"
    write_packed(path, lines) if kind else path.write_bytes(lines)
    shard_bytes(9_000)
    summary = tokenize_files([path], tmp_path / "out", "byte", jsonl_key="body")
    assert texts_of(tmp_path / "out") == list("01234")
    said = [f"read 1 files as JSON lines, by their first line: ['{path}']"]
    assert [*summary.notes] == ([] if name.endswith(("jsonl", "ndjson")) else said)


def test_an_error_while_the_kind_is_found_is_told_and_no_json_becomes_text(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "x.txt", ["hello"])
    error = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr("megazero.formats.documents._opened", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(ValueError, match="Input/output error"):
        tokenize_files([path], tmp_path / "out", "byte")


def test_a_byte_order_mark_is_no_text_and_a_window_beyond_128_mib_is_refused(tmp_path):
    content = b"\xef\xbb\xbftext"
    block = (1 | len(content) << 3).to_bytes(3, "little")
    frame = b"\x28\xb5\x2f\xfd\x00\xa8" + block  # of a window of 2^31 bytes: RFC 8878, section 3.1.1
    for name, packed in {"a.txt": content, "b.txt.gz": gzip.compress(content), "c.zst": frame + content}.items():
        (tmp_path / name).write_bytes(packed)
    (note,) = tokenize_files([tmp_path], tmp_path / "out", "byte", skip_bad=True).notes
    assert texts_of(tmp_path / "out") == ["text"] * 2
    assert "c.zst: ZSTD decompress failed: Frame requires too much memory" in note


def test_what_is_neither_text_nor_a_known_table_is_refused_with_what_to_do(tmp_path):
    for names, content, why in (
        ("x.csv x.tsv x.json", b"text\nhello\n", "neither a table that is read nor JSON lines"),
        ("x.json x.txt x", b'[{"text": "a"}, {"text": "b"}]', "jq"),
        ("x.txt x.jsonl x.csv", '{"text": "a"}\n'.encode("utf-16"), "UTF-16 text; write it as UTF-8"),
        ("x.txt x.jsonl x.parquet x.json.gz", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("x.wet x", b"WARC/1.0\r\n", "a web archive"),
    ):
        for name in names.split():
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match=why):
                tokenize_files([tmp_path / name], tmp_path / "out", "byte")


@pytest.mark.parametrize(("name", "package"), [("x.parquet", "pyarrow"), ("x.jsonl.zst", "pyarrow")])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"{name} needs the package {package}: pip install 'megazero\[data\]'"
    ):
        tokenize_files([tmp_path / name], tmp_path / "out", "byte")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{text", r"x\.jsonl:3: not a line of JSON"),
        ('{"body": "x"}', r"x\.jsonl:3: no 'text' in it"),
        ('{"text": 5}', r"x\.jsonl:3: 'text' must be a string, found a int"),
        ('{"text": "\\ud800"}', r"x\.jsonl:3: .*surrogates not allowed"),
        ("[" * 100_000, r"x\.jsonl:3: "),
    ],
)
@pytest.mark.parametrize("range_bytes", [4, 1_000_000])
def test_a_bad_line_is_named_and_the_rest_is_written_where_the_caller_agrees(
    tmp_path, shard_bytes, line, message, range_bytes
):
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "a"}}\n\n{line}\n{{"text": "b"}}\n')
    shard_bytes(range_bytes if len(line) < 1000 else 50_000)
    with pytest.raises(ValueError, match=rf"^1 documents or parts of files cannot be read:\n.*{message}"):
        tokenize_files([path], tmp_path / "out", "byte")
    assert sorted(os.listdir(tmp_path)) == ["out.tokenizing", "x.jsonl"]
    (note,) = tokenize_files([path], tmp_path / "out", "byte", skip_bad=True).notes
    assert texts_of(tmp_path / "out") == ["a", "b"]
    assert re.match(rf"left out 1 documents or parts of files that cannot be read:\n.*{message}", note)


def unreadable_things(folder: Path) -> dict[str, str]:
    """Files that cannot be read, with the beginning of what is said about each."""
    os.mkfifo(folder / "pipe")
    (folder / "broken").symlink_to(folder / "absent")
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    (folder / "tape.tar").write_bytes(b"name\0\0\0text")
    (folder / "noise.gz").write_bytes(b"no gzip")
    (folder / "half.jsonl.gz").write_bytes(gzip.compress(b'{"text": "half"}\n')[:-8])
    return {
        "pipe": "neither a file nor a directory",
        "broken": "No such file or directory",
        "image.png": "not a UTF-8 text file",
        "tape.tar": "not a text file: it has zero bytes",
        "noise.gz": "Not a gzipped file",
        "half.jsonl.gz": "Compressed file ended before the end",
    }


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_a_truncated_archive_gives_what_it_holds_and_is_named(tmp_path, kind):
    texts = [os.urandom(40).hex() for _ in range(50)]
    content = write_packed(
        tmp_path / f"x.jsonl{kind}", write_jsonl(tmp_path / "plain", texts).read_bytes()
    ).read_bytes()
    (tmp_path / f"x.jsonl{kind}").write_bytes(content[:-20])
    (tmp_path / "z.txt").write_text("good")
    inputs = [tmp_path / f"x.jsonl{kind}", tmp_path / "z.txt"]
    (note,) = tokenize_files(inputs, tmp_path / "out", "byte", skip_bad=True).notes
    *found, last = texts_of(tmp_path / "out")
    assert (found, last) == (texts[: len(found)], "good")
    assert re.search(rf"x\.jsonl{kind}: (Compressed file ended before the end|Truncated compressed stream)", note)
    assert f"; only {len(found)} documents before it were read" in note


@pytest.mark.parametrize("workers", [1, 2])
def test_one_bad_file_does_not_lose_the_rest(tmp_path, shard_bytes, workers):
    tree = tmp_path / "tree"
    tree.mkdir()
    bad = unreadable_things(tree)
    for name in "afz":
        (tree / f"{name}.txt").write_text(name * 9)
    shard_bytes(1)
    said = tokenize_files([tree], tmp_path / "out", "byte", workers=workers, skip_bad=True).notes
    assert texts_of(tmp_path / "out") == ["a" * 9, "f" * 9, "half", "z" * 9]
    assert said[0].startswith("left out 2 files or directories that cannot be read:")
    assert said[1].startswith("left out 4 documents or parts of files that cannot be read:")
    for name, why in bad.items():
        assert f"{tree / name}: {why}" in "\n".join(said)


def _tokenize_as_nobody(_: int, tree: Path, out: Path) -> None:
    os.setuid(65534)
    with pytest.raises(
        ValueError, match=r"2 files or directories cannot be read:(.|\n)*Permission denied(.|\n)*Permission"
    ):
        tokenize_files([tree], out / "out", "byte")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_directories_and_files_without_permission_are_named():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:  # the folders above tmp_path are closed to others
        tree = Path(folder, "tree")
        (tree / "closed").mkdir(parents=True)
        (tree / "a.txt").write_text("a")
        (tree / "b.txt").write_text("b")
        (tree / "b.txt").chmod(0)
        (tree / "closed").chmod(0)
        Path(folder).chmod(0o777)
        run_world(1, _tokenize_as_nobody, tree, Path(folder))


@pytest.mark.parametrize("done", [1, 3, 6])
def test_a_command_that_was_killed_goes_on_with_what_is_missing(tmp_path, monkeypatch, shard_bytes, done):
    path = write_jsonl(tmp_path / "x.jsonl", [f"line {i}" for i in range(80)])
    tokenize_files([path], tmp_path / "whole", "byte")
    shard_bytes(200)
    shards = len(cut_files([path], 200)[0])
    assert shards > 6

    def die_after_some(finished: int, _: int) -> None:
        if finished >= done * 200:
            os.kill(os.getpid(), signal.SIGKILL)

    killed(lambda: tokenize_files([path], tmp_path / "out", "byte", on_progress=die_after_some))
    assert not (tmp_path / "out.idx").exists()
    again, inner = [], tokenize._tokenize_shard
    monkeypatch.setattr(tokenize, "_tokenize_shard", lambda shard, job: again.append(shard) or inner(shard, job))
    tokenize_files([path], tmp_path / "out", "byte")
    assert len(again) == shards - done
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert not (tmp_path / "out.tokenizing").exists()


@pytest.mark.parametrize("renames", [1, 2])
def test_a_command_that_was_killed_between_its_renames_is_repeated_as_it_is(tmp_path, monkeypatch, renames):
    path, real, count = write_jsonl(tmp_path / "x.jsonl", ["one line"]), Path.replace, [0]

    def die_after_some(self: Path, target: Path) -> Path:
        if Path(target).name in ("out.bin", "out.identity.json", "out.idx"):
            count[0] += 1
            if count[0] > renames:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(self, target)

    monkeypatch.setattr(Path, "replace", die_after_some)
    killed(lambda: tokenize_files([path], tmp_path / "out", "byte"))
    monkeypatch.undo()
    assert (tmp_path / "out.bin").exists()
    tokenize_files([path], tmp_path / "out", "byte")
    assert (tmp_path / "out.idx").exists()


def test_a_shard_of_which_a_bit_flipped_is_tokenized_again(tmp_path):
    (tmp_path / "a.txt").write_text("hello world")

    def interrupt(done: int, _: int) -> None:
        if done:
            raise KeyboardInterrupt

    for number in range(0, 600, 41):
        with pytest.raises(KeyboardInterrupt):
            tokenize_files([tmp_path / "a.txt"], tmp_path / "out", "byte", overwrite=True, on_progress=interrupt)
        (kept,) = (tmp_path / "out.tokenizing").glob("*.zip")
        whole = kept.read_bytes()
        at = number % len(whole)
        kept.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        tokenize_files([tmp_path / "a.txt"], tmp_path / "out", "byte", overwrite=True)
        assert texts_of(tmp_path / "out") == ["hello world"]


def test_a_file_that_is_exchanged_during_the_command_is_refused(tmp_path, shard_bytes):
    path = write_jsonl(tmp_path / "x.jsonl", ["old"] * 40)
    write_jsonl(tmp_path / "new", ["new!"] * 40)
    shard_bytes(100)

    def exchange(*_) -> None:
        if (tmp_path / "new").exists():
            (tmp_path / "new").replace(path)

    with pytest.raises(ValueError, match=r"x\.jsonl changed while it was read; start again"):
        tokenize_files([path], tmp_path / "out", "byte", on_progress=exchange)
    assert not (tmp_path / "out.idx").exists()
    tokenize_files([path], tmp_path / "out", "byte")
    assert texts_of(tmp_path / "out") == ["new!"] * 40


def test_what_an_io_error_hid_is_read_at_the_next_start(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "x.jsonl", ["one", "two"])

    def fail(*_):
        yield 0, "one"
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(tokenize, "documents_of", fail)
    with pytest.raises(ValueError, match=r"x\.jsonl: .*Input/output error; only 1 documents before it were read"):
        tokenize_files([path], tmp_path / "out", "byte")
    monkeypatch.undo()
    tokenize_files([path], tmp_path / "out", "byte")
    assert texts_of(tmp_path / "out") == ["one", "two"]


def test_shards_of_other_settings_are_not_taken(tmp_path, shard_bytes):
    (tmp_path / "a.txt").write_text("a b")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    for name, words in {"one": "a b </s>", "two": "b a </s>"}.items():
        write_tokenizer(tmp_path / f"{name}.json", words)
    inputs = [tmp_path / "a.txt", tmp_path / "b.txt"]
    with pytest.raises(ValueError, match=r"b\.txt"):
        tokenize_files(inputs, tmp_path / "out", tmp_path / "one.json")
    tokenize_files(inputs, tmp_path / "out", tmp_path / "two.json", skip_bad=True)
    assert IndexedDataset(tmp_path / "out").tokens.tolist() == [1, 0, 2]


@pytest.mark.parametrize("name", ["out.bin", "out.idx", "out.identity.json"])
def test_a_file_of_the_user_under_a_name_of_the_output_stays(tmp_path, name):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / name).write_text("my own")
    with pytest.raises(FileExistsError, match=rf"{re.escape(name)} exists; .*--overwrite"):
        tokenize_files([tmp_path / "a.txt"], tmp_path / "out", "byte")
    assert (tmp_path / name).read_text() == "my own"
    assert sorted(os.listdir(tmp_path)) == sorted(["a.txt", name])
    tokenize_files([tmp_path / "a.txt"], tmp_path / "out", "byte", overwrite=True)
    assert texts_of(tmp_path / "out") == ["text"]


def test_of_the_folder_of_shards_only_shards_are_removed_and_a_link_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    folder = tmp_path / "out.tokenizing"
    folder.mkdir()
    (folder / "notes.pdf").write_text("my own")
    (folder / f"{'ef' * 16}.bin.01234567.partial").write_text("of a command that was killed")
    tokenize_files([tmp_path / "a.txt"], tmp_path / "out", "byte")
    assert os.listdir(folder) == ["notes.pdf"]
    (tmp_path / "other.tokenizing").symlink_to(folder)
    with pytest.raises(ValueError, match=r"other\.tokenizing is a link"):
        tokenize_files([tmp_path / "a.txt"], tmp_path / "other", "byte")


def test_of_two_commands_with_one_output_the_second_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("mine")
    with IndexedWriter(tmp_path / "out", np.uint16) as writer:
        with pytest.raises(FileExistsError, match=r"another process is writing .*out"):
            tokenize_files([tmp_path / "a.txt"], tmp_path / "out", "byte")
        writer.add_documents(np.array([*b"theirs", EOD], np.uint16), [6, 1])
    assert IndexedDataset(tmp_path / "out").tokens.tolist() == [*b"theirs", EOD]


def _die(item: int) -> None:
    os._exit(1)


def test_a_worker_that_dies_is_an_error_and_no_hang():
    with pytest.raises(ChildProcessError, match="one of 2 processes died"):
        list(_over_processes(_die, range(20), workers=2))


def test_inputs_that_hold_no_text_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("")
    with pytest.raises(FileNotFoundError, match="no files to tokenize"):
        tokenize_files([tmp_path / "empty"], tmp_path / "out", "byte")
    with pytest.raises(FileNotFoundError, match=r"no file or directory .*absent"):
        find_files([tmp_path / "absent"])
    with pytest.raises(ValueError, match="no text in"):
        tokenize_files([tmp_path / "blank.txt"], tmp_path / "out", "byte")
    with pytest.raises(ValueError, match="workers=0"):
        tokenize_files([tmp_path / "blank.txt"], tmp_path / "out", "byte", workers=0)
    assert not list(tmp_path.glob("out.[bi]*"))


def _build(_: int, cache_dir: Path) -> tuple[str, int]:
    built = []
    inner = corpus._tokenize
    corpus._tokenize = lambda *arguments: built.append(1) or inner(*arguments)
    return str(build_python_stdlib(cache_dir, "byte")), len(built)


def test_of_many_processes_that_want_the_standard_library_one_builds_it(tmp_path):
    answers = run_world(5, _build, tmp_path)
    prefix = tmp_path / f"python-stdlib-{platform.python_version()}-byte"
    assert {answer for answer, _ in answers} == {str(prefix)}
    assert sum(built for _, built in answers) == 1
    assert Path(os.__file__).read_text() in texts_of(prefix)


def test_a_damaged_cache_is_built_again_and_a_whole_one_is_kept(tmp_path, monkeypatch):
    some = stdlib_files()[:5]
    bad = tmp_path / "latin.py"
    bad.write_bytes(b"# \xe9")
    monkeypatch.setattr("megazero.data.corpus.stdlib_files", lambda: [*some, bad])
    prefix = build_python_stdlib(tmp_path, "byte")
    whole = Path(f"{prefix}.bin").read_bytes()
    assert texts_of(prefix) == [text for path in some if (text := path.read_text())]
    for damaged in (whole[:-1], whole[:9] + b"x" + whole[10:]):
        Path(f"{prefix}.bin").write_bytes(damaged)
        assert build_python_stdlib(tmp_path, "byte") == prefix
        assert Path(f"{prefix}.bin").read_bytes() == whole
    monkeypatch.setattr("megazero.data.corpus._tokenize", None)  # a call would fail
    assert build_python_stdlib(tmp_path, "byte") == prefix


def test_a_tokenizer_that_was_trained_spells_any_text_and_tokenizes_it(tmp_path):
    text, out = ("the cat sat on the mat; die Katze saß auf der Matte\n" * 50), tmp_path / "new" / "tokenizer.json"
    (tmp_path / "a.txt").write_text(text)
    with _full_disk(3000), pytest.raises(OSError, match=r"File too large: .*tokenizer\.json'"):
        train_tokenizer([str(tmp_path / "a.txt")], out, 280)
    assert not list(out.parent.iterdir())
    assert train_tokenizer([str(tmp_path / "a.txt")], out, 280) == 280
    encoder = load_tokenizer(out)
    assert (encoder.vocab_size, encoder.eod_token) == (280, "<|endoftext|>")
    for each in (text, "漢字 \U0001f600\t\0 <|endoftext|>"):
        assert encoder.decode(encoder.encode(each)) == each
    assert len(encoder.encode(text)) < len(text) / 2
    assert tokenize_files([tmp_path / "a.txt"], tmp_path / "pair", out).tokens == len(encoder.encode(text)) + 1
    with pytest.raises(FileExistsError, match="name another file"):
        train_tokenizer([str(tmp_path / "a.txt")], out, 280)
    with pytest.raises(ValueError, match="at least 257"):
        train_tokenizer([str(tmp_path / "a.txt")], tmp_path / "b.json", 256)


def test_samples_are_shown_as_training_reads_them(tmp_path):
    """Each of two sources has documents of one letter; at their borders nothing counts where the mask keeps them apart."""
    for name, letters in (("a", "abcdef"), ("z", "uvwxyz")):
        write_jsonl(tmp_path / f"{name}.jsonl", [letter * 5 for letter in letters] * 4)
        tokenize_files([tmp_path / f"{name}.jsonl"], tmp_path / name, "byte")
    sources = f'data.sources=["{tmp_path / "a"}", "{tmp_path / "z"}"]'
    words = ["data", "show", QUICKSTART, *ONE_STAGE, "launch.nproc_per_node=1", "model.seq_len=12", "--samples", 4]
    words += ["data.validation_fraction=0", sources]
    masks = [f"data.document_mask={mask}" for mask in ("false", "true")]
    shown = [CliRunner().invoke(app, [*map(str, words), mask]) for mask in masks]
    for result, counts in zip(shown, (6, 5), strict=True):
        assert result.exit_code == 0, result.output
        samples = re.split(r"^sample ", result.output, flags=re.MULTILINE)[1:]
        assert {sample.split(",")[0].rpartition("/")[2] for sample in samples} == {"a", "z"}
        for sample in samples:
            assert sample.splitlines()[0].endswith("12 tokens")
            found = re.findall(r"document of (\d+) tokens(?:, (\d+) count)?: '((\w)\4*)'", sample)
            assert sum(int(length) for length, *_ in found) == 12
            for length, counted, text, _ in found:
                assert int(length) in (len(text), len(text) + 1)
                assert int(counted or length) == min(int(length), counts)
    missing = CliRunner().invoke(app, ["data", "show", str(tmp_path / "none.toml")])
    assert missing.exit_code == 2
