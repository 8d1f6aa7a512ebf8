"""Next tokens of answers in chats."""

import dataclasses
from typing import Any

from maxramp.keys.section import Relations
from maxramp.objectives.objective import refuse_cuts
from maxramp.objectives.text import TEXT


def refuse_tokenizer(config: Any, reader: str) -> Relations:
    """Refuses a tokenizer that has no chat template."""
    kind = config.data.type_of_tokenizer
    yield (
        kind != "huggingface",
        f"{reader}: tokenizer_type={kind} has no tokens for turns; give tokenizer_path=FOLDER of a "
        "tokenizer.json with a chat template",
    )


def _refuse(config: Any) -> Relations:
    data, reader = config.data, CHATS.asked_by
    yield from refuse_tokenizer(config, reader)
    yield (
        data.packing and not (data.separate_documents and data.grain_packing_type == "best_fit"),
        f"separate_documents={data.separate_documents}, grain_packing_type="
        f"{data.grain_packing_type}: {reader} packs chats whole and apart; use "
        "separate_documents=true grain_packing_type=best_fit, or packing=false",
    )
    yield from refuse_cuts(config, reader)


CHATS = dataclasses.replace(
    TEXT,
    noun="chats",
    key="use_sft",
    chats=1,
    example="configs/post_train/sft.yml",
    refuses=_refuse,
)
