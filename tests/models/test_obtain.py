"""Models by name from a mirror that stands for the Hub: tiny ones under the real names, and all that goes wrong."""

import io
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir

from specsparse import run
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.experiments import runner
from specsparse.experiments.settings import from_omegaconf
from specsparse.models import catalogue
from specsparse.models.convert.hf import convert_hf
from specsparse.powerinfer.torch_zip import write_torch
from specsparse.support import files
from tests.models.convert import checkpoints
from tests.models.hub_mirror import COMMIT, mirror_of

TARGET, DRAFT = "TheBloke/Llama-2-7B-GGUF", "JackFram/llama-160m"
FILE = "llama-2-7b.Q4_0.gguf"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Target and draft of one SPM vocabulary; the draft in PyTorch's form."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / TARGET).mkdir(parents=True)
    config = checkpoints.CONFIG | {"max_position_embeddings": 512}
    draft = checkpoints.save(folder / DRAFT, config, checkpoints.weights(config, seed=1))
    checkpoints.spm_tokenizer(draft)
    convert_hf(draft, folder / TARGET / FILE, type_name="q4_0")
    (draft / "model.safetensors").unlink()
    write_torch(draft / "pytorch_model.bin", checkpoints.weights(config, seed=1))
    with mirror_of(folder) as mirror:
        yield mirror


@pytest.fixture(autouse=True)
def fresh(server, tmp_path, monkeypatch):
    """A machine with nothing on it, and a network that leads to the mirror."""
    from huggingface_hub import constants, file_download

    server.requests.clear()
    server.breaks, server.damaged, server.gated = [], set(), set()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    for name in ("SPECSPARSE_CACHE", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN", "SPECSPARSE_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wanted(*names):
    return {f"{name}.path": catalogue.find(name) for name in names or ("llama-2-7b", "llama-160m")}


def refusal(names=(), download="yes"):
    with pytest.raises(UserError) as caught:
        catalogue.obtain(wanted(*names), download)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_both_come_and_the_checkpoint_is_converted(server, fresh, capsys):
    catalogue.obtain(wanted(), "yes")
    said = capsys.readouterr().err
    assert "llama-2-7b: " in said and "licence apache-2.0" in said and "converted to F16" in said
    target, draft = (catalogue.resolve(name) for name in ("llama-2-7b", "llama-160m"))
    assert target.read_bytes() == (server.folder / TARGET / FILE).read_bytes()
    assert draft == fresh / "cache/models/llama-160m-f16.gguf"
    assert open_gguf(draft).metadata["tokenizer.ggml.model"] == "llama"
    seen = len(server.requests)
    assert catalogue.path_of("llama-160m", "no") == draft and len(server.requests) == seen
    facts = catalogue.known(catalogue.find("llama-68m")), catalogue.known(catalogue.find("llama-160m"))
    assert facts[0].revision is None and (facts[1].revision, facts[1].licence) == (COMMIT, "apache-2.0")
    assert catalogue.known(catalogue.find("llama-2-7b")).sha256


def test_one_that_was_stopped_goes_on(server):
    server.breaks = [5000] + [0] * 5
    assert "the download failed" in refusal(["llama-2-7b"])
    server.requests.clear()
    one = catalogue.plan(catalogue.find("llama-2-7b"))
    assert one.bytes - one.missing == 5000 and "5 kB of it here" in one.text
    catalogue.obtain(wanted("llama-2-7b"), "yes")
    assert server.sent(FILE) == ["bytes=5000-"]
    assert catalogue.resolve("llama-2-7b").read_bytes() == (server.folder / TARGET / FILE).read_bytes()


@pytest.mark.parametrize("name", [FILE, "pytorch_model.bin"])
def test_a_wrong_checksum(server, name):
    server.damaged = {name}
    assert f"{name} came with another sha256" in refusal()
    server.damaged = set()
    catalogue.obtain(wanted(), "yes")


def test_a_checksum_of_the_catalogue(server, tmp_path, monkeypatch):
    monkeypatch.setenv(catalogue.OWN, str(tmp_path))
    text = f"{{what: x, good_for: y, repo: {TARGET}, file: {FILE}, sha256: {'0' * 64}, source: a test}}"
    (tmp_path / "mine.yaml").write_text(text)
    assert "has another sha256" in refusal(["mine"]) and not server.sent(FILE)


def test_no_room_on_the_disk_or_in_memory(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        assert "are needed on the disk of" in refusal() and "1 kB are free" in refusal()
    monkeypatch.setattr(files, "memory_available", lambda: 1000)
    assert "do not fit into the memory that is available, 1 kB" in refusal()
    assert not server.sent(FILE)


def test_401_and_404(server, tmp_path, monkeypatch):
    server.gated = {TARGET}
    assert f"huggingface.co/{TARGET} asks for consent and a token" in refusal(["llama-2-7b"])
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "asks for consent" in refusal(["llama-2-7b"]) and server.sent(FILE) == []
    monkeypatch.setenv("HF_TOKEN", server.token)
    catalogue.obtain(wanted("llama-2-7b"), "yes")
    assert "no repository JackFram/llama-68m" in refusal(["llama-68m"])
    monkeypatch.setenv(catalogue.OWN, str(tmp_path))
    (tmp_path / "no-file.yaml").write_text(f"{{what: x, good_for: y, repo: {TARGET}, file: x.gguf}}")
    assert f"has no x.gguf; it has {FILE}" in refusal(["no-file"])


def test_a_pattern_means_the_file_that_the_hub_has(server, tmp_path, monkeypatch):
    monkeypatch.setenv(catalogue.OWN, str(tmp_path))
    (tmp_path / "any.yaml").write_text(f"{{what: x, good_for: y, repo: {TARGET}, file: '*Q4_0.gguf'}}")
    (tmp_path / "head.yaml").write_text(f"{{what: x, good_for: y, role: head, repo: {DRAFT}}}")
    catalogue.obtain(wanted("any", "head"), "yes")
    assert catalogue.resolve("any").name == FILE
    assert {"config.json", "pytorch_model.bin"} <= {p.name for p in catalogue.resolve("head").iterdir()}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("answer", ["y", "n", ""])
def test_a_terminal_is_asked(server, monkeypatch, answer):
    out = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    monkeypatch.setattr(sys, "stderr", out)
    if answer == "y":
        catalogue.obtain(wanted("llama-2-7b"), "ask")
    else:
        assert "not downloaded" in refusal(["llama-2-7b"], "ask") and not server.sent(FILE)
    assert "Download " in out.getvalue() and "? [y/N]" in out.getvalue()


def test_elsewhere_the_flag_is_named(server):
    said = refusal((), "ask")
    assert "are not on this machine: download=yes fetches" in said and "llama-2-7b " in said
    assert not server.sent(FILE)
    seen = len(server.requests)
    assert "download=no" in refusal((), "no") and len(server.requests) == seen


@pytest.mark.parametrize("how", ["no route", "offline"])
def test_without_a_network_one_line_says_what_to_fetch_and_where_to_put_it(monkeypatch, fresh, how):
    monkeypatch.setenv(*(("HF_ENDPOINT", "http://127.0.0.1:9") if how == "no route" else ("HF_HUB_OFFLINE", "1")))
    said = refusal((), "yes")
    for part in (
        "llama-2-7b.Q4_0.gguf (3.8 GB, huggingface.co/TheBloke/Llama-2-7B-GGUF)", "; without a network give ",
        "llama-160m-f16.gguf (325 MB, huggingface.co/JackFram/llama-160m, converted to F16)",
        f"or put it into {fresh / 'cache/models'}",
    ):  # fmt: skip
        assert part in said


FEW = ["max_tokens=4", "data.tasks=[chat]", "warmup=false", "time_split=0", "stream=false"]
FEW += ["policy.gamma=4", "policy.n_min=2"]


def test_the_experiment_runs_on_a_fresh_machine(server, fresh, capsys, monkeypatch):
    """As typed: first refused in one line that leaves nothing, then downloaded, converted and run."""
    with pytest.raises(SystemExit) as stop:
        run.main(["+experiment=spec_llama160m", "stand_in=false", *FEW])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "download=yes fetches" in said
    assert not (fresh / "runs").exists()
    with pytest.raises(SystemExit):  # a mistake is found before anything is downloaded
        run.main(["+experiment=spec_llama160m", *FEW, "download=yes", "verifier=wor"])
    assert "verifier=wor" in capsys.readouterr().err and not server.sent(FILE)
    assert run.main(["+experiment=spec_llama160m", *FEW, "download=yes"]) == 0
    record = json.loads(next((fresh / "runs").rglob("record.json")).read_text())
    assert record["summary"]["identity"]["differing"] == 0


def test_a_stand_in_runs_without_consent_though_there_is_a_network(server, monkeypatch):
    """No terminal to ask on, a repository that asks for consent, and a reader who says no."""
    with initialize_config_dir(str(run.conf_dir()), version_base="1.3"):
        cfg = from_omegaconf(compose("config", ["+experiment=spec_llama160m"]))
    reasons = [runner.check(cfg).cfg.stood_in.why]
    server.gated = {TARGET}
    reasons.append(runner.check(cfg).cfg.stood_in.why)
    server.gated = set()
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    monkeypatch.setattr(sys, "stderr", Terminal())
    reasons.append(runner.check(cfg).cfg.stood_in.why)
    said = ("download=yes fetches", "asks for consent", "not downloaded")
    assert all(part in why for part, why in zip(said, reasons, strict=True)), reasons
    assert server.sent(FILE) == []
