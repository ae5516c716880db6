"""Models of text and images are served as text, as transformers saves them and under other published names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hetero_api.errors import ModelError
from hetero_api.wrappers import text_tensors
from hetero_worker.checkpoints.checkpoint import Checkpoint
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.support.tiny_checkpoints import WRAPPED, TinyCheckpoint, edit_config, save_wrapped

pytestmark = pytest.mark.unit

TOLERANCE = 1e-4
SHARES = Shares(kv_heads=((5, 3, 0),), mlp_columns=((17, 30, 3),), vocab_rows=(64, 136, 0), experts=((1, 5, 0),))
PROMPT = [7, 150, 3, 88, 199, 0, 42, 42, 64, 63, 127]
WEIGHTS = "model.safetensors"
OLDER: Mapping[str, str] = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
NEWER: Mapping[str, str] = {text: stored for stored, text in OLDER.items()}


@pytest.fixture(scope="module", params=WRAPPED)
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyCheckpoint:
    return save_wrapped(request.param, tmp_path_factory.mktemp(request.param))


def _renamed(directory: Path, prefixes: Mapping[str, str]) -> None:
    """Rename the text part's tensors; prefixes of the others do not matter."""
    tensors = {}
    for name, tensor in load_file(directory / WEIGHTS).items():
        prefix = next((old for old in prefixes if name.startswith(old)), "")
        tensors[prefixes.get(prefix, "") + name.removeprefix(prefix)] = tensor
    save_file(tensors, directory / WEIGHTS)


@pytest.mark.parametrize("prefixes", [{}, OLDER, NEWER], ids=["as saved", "older names", "newer names"])
def test_logits_equal_the_reference(checkpoint: TinyCheckpoint, prefixes: Mapping[str, str]) -> None:
    _renamed(checkpoint.directory, prefixes)
    builder = PlanBuilder(RankGroup(checkpoint.directory, SHARES))
    builder.start(0, PROMPT)
    for _ in range(2):
        expected = checkpoint.logits(builder.sequences[0].tokens)[-1]
        builder.schedule(0)
        assert (builder.run().logits[0] - expected).abs().max() <= TOLERANCE


def test_parts_that_are_not_served_are_named(checkpoint: TinyCheckpoint) -> None:
    found: dict[str, list[int]] = {}
    with safe_open(checkpoint.directory / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            for part in ("vision_tower", "multi_modal_projector", "embed_vision", "visual"):
                if part in name:
                    found.setdefault(part, []).append(file.get_tensor(name).nbytes)
    assert max(map(len, found.values())) > 5
    notes = [
        f"{part} left out ({len(sizes)} tensors, {sum(sizes) / 1e6:.1f} MB)" for part, sizes in sorted(found.items())
    ]
    group = RankGroup(checkpoint.directory, SHARES)
    assert [list(report.weight_notes) for report in group.reports] == [notes] * 3


def test_parts_in_several_files_are_found(tmp_path: Path) -> None:
    checkpoint = save_wrapped("gemma3", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    builder = PlanBuilder(RankGroup(checkpoint.directory, SHARES))
    builder.start(0, PROMPT)
    builder.schedule(0)
    assert (builder.run().logits[0] - checkpoint.logits(PROMPT)[-1]).abs().max() <= TOLERANCE


def test_an_output_head_that_is_not_tied_after_all_is_refused(tmp_path: Path) -> None:
    """As transformers saves a model whose config.json said nothing, and whose head is not the embedding."""
    save_wrapped("mistral3", tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from .*; set tie_word_embeddings to false"):
        RankGroup(tmp_path, SHARES)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    save_wrapped("gemma3", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    norm = next(tensor for name, tensor in tensors.items() if name.endswith("model.norm.weight"))
    both = {"language_model.model.norm.weight": norm, "model.language_model.norm.weight": norm.clone()}
    save_file({**tensors, **both}, tmp_path / WEIGHTS)
    with (
        pytest.raises(ModelError, match=r"are both model\.norm\.weight of the text part; keep one"),
        Checkpoint(tmp_path),
    ):
        pass


def test_a_prediction_head_is_a_part_of_the_text() -> None:
    stored = ["model.language_model.norm.weight", "mtp.fc.weight", "model.visual.norm.weight", "lm_head.weight"]
    names = ["model.norm.weight", "mtp.fc.weight", "lm_head.weight"]
    assert list(text_tensors(stored)) == names
