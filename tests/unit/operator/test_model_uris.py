"""URIs of models that are one GGUF file of a folder: the folder is mounted, and the file is served."""

from __future__ import annotations

import pytest

from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile.manifests.model_volumes import ModelUri, model_options, parse_model_uri

pytestmark = pytest.mark.unit

FOLDER = "/var/lib/hetero/model"


@pytest.mark.parametrize(
    ("uri", "parts", "path"),
    [
        ("file:///srv/m", ModelUri("file", "", "/srv/m"), FOLDER),
        ("file:///srv/m/a-Q8_0.gguf", ModelUri("file", "", "/srv/m", "a-Q8_0.gguf"), f"{FOLDER}/a-Q8_0.gguf"),
        ("pvc://claim/m/a.gguf", ModelUri("pvc", "claim", "m", "a.gguf"), f"{FOLDER}/a.gguf"),
        ("pvc://claim/a.gguf", ModelUri("pvc", "claim", "", "a.gguf"), f"{FOLDER}/a.gguf"),
        ("oci://image:1#/m/a.gguf", ModelUri("oci", "image:1", "m", "a.gguf"), f"{FOLDER}/a.gguf"),
        ("oci://image:1", ModelUri("oci", "image:1", "models"), FOLDER),
        ("hf://org/name:Q8_0", ModelUri("hf", "org/name:Q8_0", ""), FOLDER),
    ],
)
def test_a_file_is_served_from_its_folder(uri: str, parts: ModelUri, path: str) -> None:
    assert parse_model_uri(uri) == parts
    assert model_options(spec_of(uri)) == {"--model": path}
    assert model_options(spec_of("hf://a/b", draft=uri)) == {
        "--model": FOLDER,
        "--draft": path.replace("/model", "/draft", 1),
    }


def spec_of(uri: str, *, draft: str | None = None) -> HeteroInferenceSpec:
    speculative = {} if draft is None else {"kind": "Draft", "draft": {"uri": draft}}
    pool = {"name": "cpu", "type": "CPU", "ranks": 1, "cpu": {"coresPerRank": 1}}
    return HeteroInferenceSpec.model_validate(
        {"model": {"uri": uri}, "pools": [pool], "engine": {"speculative": speculative}}
    )
