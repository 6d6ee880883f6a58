"""Downloads by huggingface_hub from a mirror on loopback: the cache, resuming, revisions, shards, and every refusal."""

import dataclasses
import errno
import os
import shutil
import subprocess
import sys

import pytest

from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.measure.costs.roofline import outline
from specsparse.models import catalogue, hub
from specsparse.models.convert.hf import convert_hf
from specsparse.powerinfer.torch_zip import write_torch
from specsparse.support.hub_names import is_reference
from specsparse.testing import write_tiny_gguf
from tests.models.convert import checkpoints
from tests.models.hub_mirror import OLD_COMMIT, mirror_of


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    (folder / "gated/model").mkdir(parents=True)
    (folder / "tiny/empty").mkdir(parents=True)
    for repo in ("tiny/model/sub", "tiny/model@old", "private/model", "tiny/quants", "tiny/one"):
        (folder / repo).mkdir(parents=True)
    write_tiny_gguf(folder / "tiny/model/t.gguf", tokenizer="spm", n_layers=1)
    write_tiny_gguf(folder / "tiny/model@old/t.gguf", tokenizer="spm", n_layers=1, seed=7)
    shutil.copy(folder / "tiny/model/t.gguf", folder / "private/model/t.gguf")
    shutil.copy(folder / "tiny/model/t.gguf", folder / "tiny/model/sub/t.gguf")
    for name in ("mmproj-q.gguf", "q-F16.gguf", "q.q4_k_m.gguf", "q-Q8_0.gguf"):
        write_tiny_gguf(folder / "tiny/quants" / name, tokenizer="none", n_layers=1, quant="Q8_0")
    shutil.copy(folder / "tiny/model/t.gguf", folder / "tiny/one/t-IQ2_M.gguf")
    with mirror_of(folder) as mirror:
        yield mirror


@pytest.fixture(autouse=True)
def cache(server, tmp_path, monkeypatch):
    """An empty cache, no token, the mirror as endpoint, and no waiting before a broken download goes on."""
    from huggingface_hub import constants, file_download

    server.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def refusal(text):
    with pytest.raises(UserError) as caught:
        catalogue.resolve(text)
    assert str(caught.value).startswith(text) and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_downloaded_once(server):
    path = catalogue.resolve("hf://tiny/model/t.gguf")
    assert path.read_bytes() == (server.folder / "tiny/model/t.gguf").read_bytes()
    assert catalogue.resolve("hf://tiny/model/t.gguf") == path
    assert len(server.sent("t.gguf")) == 1
    assert catalogue.resolve("hf://tiny/model/sub/t.gguf").parent.name == "sub"


def test_a_revision_is_pinned(server):
    old = (server.folder / "tiny/model@old/t.gguf").read_bytes()
    assert catalogue.resolve("hf://tiny/model/t.gguf").read_bytes() != old
    assert catalogue.resolve("hf://tiny/model/t.gguf@old").read_bytes() == old
    assert OLD_COMMIT in str(catalogue.resolve(f"hf://tiny/model/t.gguf@{OLD_COMMIT}"))


def test_a_broken_download_goes_on_where_it_was(server):
    server.breaks = [5000]
    written = (server.folder / "tiny/model/t.gguf").read_bytes()
    assert catalogue.resolve("hf://tiny/model/t.gguf").read_bytes() == written
    assert server.sent("t.gguf") == [None, "bytes=5000-"]


def test_one_that_makes_no_progress_is_given_up_and_goes_on_at_the_next_call(server, tmp_path):
    server.breaks = [5000] + [0] * 5
    assert "the download failed" in refusal("hf://tiny/model/t.gguf")
    assert [p.stat().st_size for p in (tmp_path / "hub").rglob("*.partial")] == [5000]
    server.requests.clear()
    written = (server.folder / "tiny/model/t.gguf").read_bytes()
    assert catalogue.resolve("hf://tiny/model/t.gguf").read_bytes() == written
    assert server.sent("t.gguf") == ["bytes=5000-"]
    assert not list((tmp_path / "hub").rglob("*.partial"))


def test_a_file_of_another_sha256_is_removed(server, tmp_path):
    server.damaged = {"t.gguf"}
    said = refusal("hf://tiny/model/t.gguf")
    server.damaged = set()
    assert "t.gguf came with another sha256" in said and "run the command again" in said
    assert not [p for p in (tmp_path / "hub").rglob("*") if p.is_file() and p.stat().st_size > 1000]
    assert catalogue.resolve("hf://tiny/model/t.gguf").is_file()


def test_a_disk_that_runs_full(server, monkeypatch):
    from huggingface_hub import file_download

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(file_download, "http_get", full)
        assert "the download failed: [Errno 28] No space left on device" in refusal("hf://tiny/model/t.gguf")
    assert catalogue.resolve("hf://tiny/model/t.gguf").is_file()


def test_offline_takes_the_cache_only(server, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not in the cache, and HF_HUB_OFFLINE forbids" in refusal("hf://tiny/model/t.gguf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    path = catalogue.resolve("hf://tiny/model/t.gguf")
    seen = len(server.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert catalogue.resolve("hf://tiny/model/t.gguf") == path and len(server.requests) == seen


def test_a_token_opens_what_is_private(server, monkeypatch):
    assert "no repository private/model, or no access to it" in refusal("hf://private/model/t.gguf")
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert catalogue.resolve("hf://private/model/t.gguf").is_file()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hf://tiny/model:Q9_K", "no file of the type Q9_K; tiny/model has sub/t.gguf, t.gguf"),
        ("tiny/nothing", "no such file here, and on the Hub: no repository tiny/nothing"),
        ("tiny/quants:Q5_0", "and on the Hub: no file of the type Q5_0; tiny/quants has "),
        ("hf://tiny/model@old/t.gguf@old", "is no reference to the Hub; the form is owner/repo, "),
        ("hf://tiny/model/x.gguf", "no such file; tiny/model has sub/t.gguf, t.gguf"),
        ("hf://tiny/empty/x.gguf", "`specsparse convert hf tiny/empty OUT.gguf`"),
        ("hf://tiny/nothing/x.gguf", "no repository tiny/nothing"),
        ("hf://tiny/model/t.gguf@v9", "has no revision v9"),
        ("hf://gated/model/t.gguf", "asks for consent: accept its terms at http://127.0.0.1"),
        ("hf://", "is no reference to the Hub"),
        ("hf://a/b/../../etc/passwd", "is no file of a repository; the form is owner/repo"),
        ("hf://a/b//f.gguf", "is no file of a repository"),
        ("hf://a/b/f.gguf@../../x", "is no file of a repository"),
        ("hf://a/b/c.gguf@x@y", "is no reference to the Hub"),
        ("hf://a/../b.gguf", "hf://a/../b.gguf"),
    ],
)
def test_refusals(text, says):
    assert says in refusal(text)


def test_no_connection(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in refusal("hf://tiny/model/t.gguf")


def test_all_shards_come(server, tmp_path):
    from tests.engine.gguf.shards import split

    names = split(server.folder / "tiny/model/t.gguf", server.folder / "tiny/model", count=3)
    first = catalogue.resolve(f"hf://tiny/model/{names[0]}")
    assert len(open_gguf(first).tensors) == len(open_gguf(server.folder / "tiny/model/t.gguf").tensors)
    for name in names:
        (server.folder / "tiny/model" / name).unlink()


def test_a_checkpoint_is_downloaded_and_converted(server, tmp_path):
    folder = checkpoints.save(
        server.folder / "tiny/checkpoint", checkpoints.CONFIG, checkpoints.weights(checkpoints.CONFIG)
    )
    checkpoints.bpe_tokenizer(folder)
    (folder / "pytorch_model.bin").write_bytes(b"twice the size for nothing")
    convert_hf(folder, tmp_path / "local.gguf")
    convert_hf("tiny/checkpoint", tmp_path / "repo.gguf")
    assert (tmp_path / "repo.gguf").read_bytes() == (tmp_path / "local.gguf").read_bytes()
    assert server.sent("model.safetensors") and not server.sent("pytorch_model.bin")
    write_torch(folder / "pytorch_model.bin", checkpoints.weights(checkpoints.CONFIG))
    (folder / "model.safetensors").unlink()
    convert_hf("tiny/checkpoint@main", tmp_path / "torch.gguf")
    assert open_gguf(tmp_path / "torch.gguf").tensors.keys() == open_gguf(tmp_path / "local.gguf").tensors.keys()
    for text, says in (("tiny/nothing", "no repository tiny/nothing"), ("hf://a/b/c.gguf", "a repository is needed")):
        with pytest.raises(UserError, match=says):
            convert_hf(text, tmp_path / "out.gguf")


def test_from_the_command_line(server, tmp_path):
    """The environment alone, in a process of its own: cache, mirror, token."""
    env = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": server.url, "HF_TOKEN": server.token}
    argv = [sys.executable, "-m", "specsparse", "inspect", "hf://private/model/t.gguf", "--device", "a100"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "1 layers, width 64" in done.stdout, done.stderr
    assert (tmp_path / "home/hub/models--private--model").is_dir()


def test_a_reference_reads_back():
    for text in ("hf://a/b/c/d.gguf", "hf://a/b/c.gguf@main", "hf://a/b@v1", "hf://a/b", "hf://a/b:Q4_0@v1"):
        assert str(dataclasses.replace(hub.Reference.parse(text), text="")) == text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a/b", ("a/b", None, None, None)),
        ("a/b:Q4_K_M", ("a/b", None, None, "Q4_K_M")),
        ("a/b@v1", ("a/b", None, "v1", None)),
        ("hf://a/b@v1/c/d.gguf", ("a/b", "c/d.gguf", "v1", None)),
        ("hf://a/b@refs%2Fpr%2F3/d.gguf", ("a/b", "d.gguf", "refs/pr/3", None)),
        ("hf://a/b@refs/pr/3", ("a/b", None, "refs/pr/3", None)),
        ("hf://a/b@refs/pr/3/d.gguf", ("a/b", "d.gguf", "refs/pr/3", None)),
        ("hf://a/b/c.gguf@feature/x", ("a/b", "c.gguf", "feature/x", None)),
    ],
)
def test_the_forms_of_a_reference(text, parts):
    found = hub.Reference.parse(text)
    assert (found.repo, found.file, found.revision, found.tag) == parts and is_reference(text)


def test_what_is_a_file_here_goes_before_the_hub(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").touch()
    monkeypatch.chdir(tmp_path)
    here = ("a/b", "a/c.gguf", "./a/c", "~/a/c", "a/b/c", "/a/c", "a", "a/", "a/b/c@v1")
    assert not any(map(is_reference, here)) and is_reference("a/c")


def test_a_repository_or_a_type_is_a_file_of_it(server, monkeypatch):
    for text, name in (
        ("tiny/quants", "q.q4_k_m.gguf"), ("tiny/quants:q8_0", "q-Q8_0.gguf"), ("hf://tiny/quants:F16", "q-F16.gguf"),
        ("tiny/one", "t-IQ2_M.gguf"), ("hf://tiny/model@old/t.gguf", "t.gguf"), ("tiny/model@old", "t.gguf"),
    ):  # fmt: skip
        assert catalogue.resolve(text).name == name == catalogue.published(text).name
        assert ("@old" in text) == (OLD_COMMIT in str(catalogue.resolve(text)))
    assert hub.download_header("tiny/quants:q8_0").name == "q-Q8_0.gguf"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub._gguf_names.cache_clear()
    assert catalogue.resolve("tiny/quants:q8_0").name == "q-Q8_0.gguf"
    assert "HF_HUB_OFFLINE forbids" in refusal("tiny/other")


@pytest.mark.parametrize("how", [("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://127.0.0.1:9")])
def test_a_drafter_comes_from_the_cache_without_a_connection(server, monkeypatch, how):
    """A checkpoint as its folder, a repository without one as its GGUF; with a connection the Hub is asked once."""
    folder = server.folder / "tiny/drafter"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", "drafter.gguf"):
        (folder / name).write_bytes(b"{}")
    hub._gguf_names.cache_clear()
    found = [catalogue.published(text) for text in ("tiny/drafter", "tiny/one")]
    assert sorted(p.name for p in found[0].iterdir()) == ["config.json", "model.safetensors"]
    assert found[1].name == "t-IQ2_M.gguf"
    assert [sum(p.startswith("/api/") and repo in p for _, p, _ in server.requests) for repo in ("drafter", "one")] == [
        1, 1,
    ]  # fmt: skip
    monkeypatch.setenv(*how)
    hub._gguf_names.cache_clear()
    assert [catalogue.published(text) for text in ("tiny/drafter", "tiny/one")] == found
    with pytest.raises(hub.UnreachableError, match="tiny/quants: no such file here, and on the Hub: nothing of it is"):
        catalogue.published("tiny/quants")


@pytest.fixture
def wide(server, tmp_path_factory):
    """A file whose weights are far larger than its header."""
    folder = server.folder / "tiny/wide"
    if not folder.is_dir():
        folder.mkdir()
        write_tiny_gguf(folder / "w.gguf", tokenizer="spm", n_layers=2, d_model=256, d_ff=512, n_heads=4)
    return folder / "w.gguf"


def test_a_header_comes_without_the_weights(server, wide, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "FIRST_BYTES", 1000)
    path = hub.download_header("hf://tiny/wide/w.gguf")
    told, whole = open_gguf(path), open_gguf(wide)
    assert told.metadata.keys() == whole.metadata.keys() and path.stat().st_size == wide.stat().st_size
    assert [(t.name, t.type, t.shape) for t in told.tensors.values()] == [
        (t.name, t.type, t.shape) for t in whole.tensors.values()
    ]
    asked = [r for r in server.sent("w.gguf") if r]
    assert asked[:3] == ["bytes=0-999", "bytes=1000-1999", "bytes=2000-3999"]  # twice as much until the header is whole
    last = int(asked[-1].split("-")[1]) + 1
    assert whole.layout.data <= last < wide.stat().st_size / 4 and len(asked) < 12
    assert hub.is_header(path) and not hub.is_header(wide)
    server.requests.clear()
    assert hub.download_header("hf://tiny/wide/w.gguf") == path and not any(server.sent("w.gguf"))
    found = outline("hf://tiny/wide/w.gguf")
    assert found.path is None and found.nbytes == sum(t.nbytes for t in whole.tensors.values())


def test_a_damaged_header_is_one_line_and_leaves_nothing(server, wide, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(server, "damaged", {"w.gguf"})
    with pytest.raises(UserError, match=r"^hf://tiny/wide/w\.gguf: ") as caught:
        hub.download_header("hf://tiny/wide/w.gguf")
    assert "\n" not in str(caught.value) and not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    with pytest.raises(UserError, match="no such file"):
        hub.download_header("hf://tiny/wide/missing.gguf")
