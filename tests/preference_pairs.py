"""Pairs of answers for tests, and a folder with a tokenizer that has marks for turns."""

import json
import pathlib

from maxramp.data.tokenizers import train_bpe

# Text ends with the mark that ends an answer, as TRL takes all of it for the answer.
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKS = ("<|im_start|>", "<|im_end|>", "<|pad|>")


def pairs(count: int = 6) -> list[dict]:
    """Records; answers are of several lengths."""
    records = []
    for i in range(count):
        asked = {"role": "user", "content": f"{i}?"}
        texts = {"chosen": "yes " * (1 + i % 3) + str(i), "rejected": "no" * (1 + i % 2)}
        answers = {name: {"role": "assistant", "content": text} for name, text in texts.items()}
        records.append({name: [asked, answer] for name, answer in answers.items()})
    return records


def write_tokenizer(folder: pathlib.Path, texts=("the quick brown fox",) * 9, size=264) -> int:
    """A tokenizer of bytes and marks, and its template; returns how many ids it has."""
    model = json.loads(train_bpe(iter(texts), size))
    size = len(model["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for i, mark in enumerate(MARKS):
        model["added_tokens"].append({"id": size + i, "content": mark, "special": True} | flags)
    (folder / "tokenizer.json").write_text(json.dumps(model))
    config = {"eos_token": MARKS[1], "pad_token": MARKS[2], "chat_template": TEMPLATE}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return size + len(MARKS)


def write_pairs(path: pathlib.Path, records: list[dict]) -> pathlib.Path:
    """JSON lines of records."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def keys_of(folder: pathlib.Path, file: pathlib.Path, length: int = 95) -> tuple[str, ...]:
    """The keys of a run on the pairs of a file, which begins with the weights of a folder."""
    return (
        *("use_dpo=True", "dataset_type=grain", "packing=False", f"grain_train_files={file}"),
        *(f"tokenizer_path={folder}", "tokenizer_type=huggingface", "eval_fraction=0"),
        *(f"max_target_length={length}", "eval_interval=-1", "enable_rampup_batch_size=False"),
        *("enable_data_shuffling=False", f"load_parameters_path={folder}"),
    )
