"""Tiny checkpoints with a multi-token-prediction head, and its plain reference, which transformers does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_checkpoints import edit_config, save_tiny

LAYERS = 3
"""Layers of the model; the head's layer is the next."""
_QWEN = ("qwen3-next", "qwen3.5")
_QWEN_LAYERS = ("linear_attention", "linear_attention", "full_attention")
_QWEN_NAMES = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "shared_head.norm.": "mtp.norm.",
    "": "mtp.layers.0.",
}
_CALM = 0.01
"""Factor of what the layers of a model that its head agrees with add to the stream."""


@dataclass(frozen=True, slots=True)
class HeadedCheckpoint:
    """A saved model with a prediction head, and transformers' model of its layers and the head's."""

    directory: Path
    reference: Any
    tensors: dict[str, torch.Tensor]
    offset: float = 0.0
    """Added to a norm's weight."""

    def states(self, token_ids: list[int]) -> torch.Tensor:
        """The model's states behind the last norm: float32 [tokens, hidden]."""
        model = self.reference.model
        with torch.no_grad():
            hidden = model.embed_tokens(torch.tensor([token_ids]))
            for number, layer in enumerate(model.layers[:LAYERS]):
                hidden = self._through(layer, hidden, number)
            states: torch.Tensor = model.norm(hidden)[0]
        return states

    def drafted(
        self, token_ids: list[int], *, ahead: Sequence[int] = (), states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The head's logits behind the tokens and those that it drafted: float32 [1 + ahead, vocabulary].

        h' = layer(eh_proj(cat(enorm(embedding of the next token), hnorm(state)))), then shared_head.norm and the head.
        Behind the newest token states are those that it made itself. `states` [tokens - 1, hidden]: the model's; None:
        as they are.
        """
        model = self.reference.model
        states = self.states(token_ids)[:-1] if states is None else states
        read, logits = list(token_ids[1:]), []
        with torch.no_grad():
            for drafted in [*ahead, None]:
                embedded = model.embed_tokens(torch.tensor(read))
                joined = torch.cat([self._norm("enorm", embedded), self._norm("hnorm", states)], dim=-1)
                hidden = self._through(model.layers[LAYERS], (joined @ self._tensor("eh_proj").T)[None], LAYERS)[0]
                newest = self._norm("shared_head.norm", hidden)[-1:]
                logits.append(self.reference.lm_head(newest)[0].float())
                states = torch.cat([states, newest])
                if drafted is not None:
                    read.append(drafted)
        return torch.stack(logits)

    def _through(self, layer: Any, hidden: torch.Tensor, number: int) -> torch.Tensor:
        count = hidden.shape[1]
        positions = torch.arange(count)[None]
        types = getattr(self.reference.config, "layer_types", None)
        keeps_states = types is not None and types[number] == "linear_attention"
        mask = None if keeps_states else torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotations = self.reference.model.rotary_emb(hidden, positions)
        result = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotations)
        found: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return found

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        eps = self.reference.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (self.offset + self._tensor(name))

    def _tensor(self, name: str) -> torch.Tensor:
        return self.tensors[f"model.layers.{LAYERS}.{name}.weight"]


def save_with_head(variant: str, directory: Path, *, agrees: bool = False, **changes: Any) -> HeadedCheckpoint:
    """Save a tiny model whose files have a head. `agrees`: its drafts are right now and then; else all is random."""
    of_qwen = variant.startswith(_QWEN)
    if of_qwen:
        changes = {**changes, "layer_types": [*_QWEN_LAYERS, "full_attention"]}
    tiny = save_tiny(variant, directory, num_hidden_layers=LAYERS + 1, **changes)
    reference, path = tiny.reference, directory / "model.safetensors"
    tensors, prefix = load_file(path), f"model.layers.{LAYERS}"
    hidden, offset = reference.config.hidden_size, float(of_qwen)
    torch.manual_seed(1)
    names = ("enorm", "hnorm", "shared_head.norm")
    head = {f"{prefix}.{name}.weight": 1 - offset + 0.3 * torch.randn(hidden) for name in names}
    head[f"{prefix}.eh_proj.weight"] = 0.3 * torch.randn(hidden, 2 * hidden)
    if agrees:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                tensor *= _CALM
        head[f"{prefix}.enorm.weight"] = torch.full((hidden,), 1 - offset)
        head[f"{prefix}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
        # With layers as calm as those of Qwen3-Next, greedy drafts would always be right.
        noise = 0.1 * of_qwen * torch.randn(hidden, 2 * hidden)
        head[f"{prefix}.eh_proj.weight"] = 0.3 * torch.eye(hidden, 2 * hidden) + noise
    tensors |= head
    if of_qwen:
        save_file({_qwen_name(name): tensor for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
        number = "num_nextn_predict_layers" if variant.startswith("qwen3-next") else "mtp_num_hidden_layers"
        edit_config(directory, num_hidden_layers=LAYERS, layer_types=list(_QWEN_LAYERS), **{number: 1})
        return HeadedCheckpoint(directory, reference, tensors, offset)
    # Published files have them twice.
    twice = {
        f"{prefix}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{prefix}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors | twice, path, metadata={"format": "pt"})
    edit_config(directory, num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    return HeadedCheckpoint(directory, reference, tensors)


def _qwen_name(name: str) -> str:
    """Return the published name of a tensor that lies behind the layers."""
    for part, published in _QWEN_NAMES.items():
        if name.startswith(f"model.layers.{LAYERS}.{part}"):
            return name.replace(f"model.layers.{LAYERS}.{part}", published)
    return name
