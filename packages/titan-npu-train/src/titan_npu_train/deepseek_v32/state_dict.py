"""DeepSeek-V3.2 weights to and from the Hugging Face layout."""

import re
from collections.abc import Iterable

from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter

__all__ = ["DeepSeekV32StateDictAdapter"]

_HF_LAYER_KEY = re.compile(r"model\.layers\.(\d+)\.(.+)")


class DeepSeekV32StateDictAdapter(DeepSeekV3StateDictAdapter):
    """torchtitan's DeepSeek-V3 adapter plus the indexer, in main and MTP layers."""

    def __init__(self, model_config, hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        for part in (
            "wq_b.weight",
            "wk.weight",
            "k_norm.weight",
            "k_norm.bias",
            "weights_proj.weight",
        ):
            self.from_hf_map[f"model.layers.{{}}.self_attn.indexer.{part}"] = (
                f"layers.{{}}.attention.indexer.{part}"
            )

    def initialised_if_absent(self, hf_keys: Iterable[str]) -> set[str]:
        """Of the Hugging Face names a checkpoint lacks, those training may initialise itself.

        A DeepSeek-V3 or V3.1 checkpoint has no indexers: all of an absent indexer's parameters may
        be initialised. An indexer that is there in part is a damaged checkpoint, not an old one.
        """
        absent: dict[str, set[str]] = {}
        for key in hf_keys:
            if (match := _HF_LAYER_KEY.fullmatch(key)) and ".indexer." in key:
                absent.setdefault(match[1], set()).add(key)
        return set().union(*(keys for keys in absent.values() if len(keys) == 5))
