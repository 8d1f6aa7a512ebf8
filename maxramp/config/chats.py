"""Relations between the keys of chats and of pairs, and other keys."""

from maxramp.data.keys import DataKeys
from maxramp.keys.section import Relations


def check_chats(keys: DataKeys) -> Relations:
    """Relations of a configuration that reads chats; none for another."""
    if not (asked := keys.reads_chats):
        return
    yield (
        keys.use_sft and keys.use_dpo,
        "use_sft=True trains on chats and use_dpo=True on pairs of them; leave one of them out",
    )
    yield (
        keys.dataset_type not in ("grain", "hf"),
        f"{asked} reads chats, and dataset_type={keys.dataset_type} has none; use "
        "dataset_type=grain grain_train_files=FILES",
    )
    yield (
        keys.type_of_tokenizer != "huggingface",
        f"{asked}: tokenizer_type={keys.type_of_tokenizer} has no marks for turns; give "
        "tokenizer_path=FOLDER of a tokenizer.json with a chat template",
    )
    yield (
        not keys.tokenize_train_data,
        f"tokenize_train_data=False: {asked} makes the tokens of chats itself; leave it out",
    )
    yield (
        keys.use_dpo and keys.packing,
        "packing=True would put several pairs into a row, and a sample of use_dpo=True is one; use "
        "packing=false",
    )
    yield (
        keys.use_dpo and keys.long_chats == "cut",
        "long_chats=cut would compare the beginnings of answers; use_dpo=True leaves such pairs "
        "out: leave it out",
    )
    yield (
        keys.use_dpo and not keys.sft_train_on_completion_only,
        "sft_train_on_completion_only=False: use_dpo=True compares the last answers; leave it out",
    )
    yield (
        keys.packing and not (keys.separate_documents and keys.grain_packing_type == "best_fit"),
        f"separate_documents={keys.separate_documents}, grain_packing_type="
        f"{keys.grain_packing_type}: use_sft=True packs chats whole and apart; use "
        "separate_documents=true grain_packing_type=best_fit, or packing=false",
    )
    yield (
        keys.sft_train_on_last_answer_only and not keys.sft_train_on_completion_only,
        "sft_train_on_last_answer_only=True: sft_train_on_completion_only=False trains on all; "
        "leave one of them out",
    )
    for switch in keys.chat_template_switches:
        yield (
            "=" not in str(switch),
            f"chat_template_switches={list(keys.chat_template_switches)}: {switch} has no value; "
            "write it as enable_thinking=false",
        )
