"""The losses of pairs and their gradients beside TRL's DPOTrainer, from records to numbers."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import make_mesh
from later import Later
from opened import config_of, load, named_arrays
from preference_pairs import keys_of, pairs, write_pairs, write_tokenizer
from small_models import write_folder

from maxramp.data.batch import stack
from maxramp.data.opening import open_rows
from maxramp.parallel.sharding import ROWS_BT
from maxramp.training.preferences import answer_log_probs, preference

torch = Later("torch")
transformers = Later("transformers")
trl = Later("trl")
datasets = Later("datasets")
pytestmark = pytest.mark.slow

PAIRS = pairs()
# Ours, TRL's, the label smoothing, and how many pairs TRL takes at a time. Its sigmoid has no label
# smoothing any more; its aot, which sorts a batch, is cDPO for a single pair.
LOSSES = {
    "sigmoid": ("sigmoid", "sigmoid", 0.0, len(PAIRS)),
    "ipo": ("ipo", "ipo", 0.0, len(PAIRS)),
    "robust": ("robust", "robust", 0.2, len(PAIRS)),
    "smoothed": ("sigmoid", "aot", 0.2, 1),
}
CASES = [*(("llama2", name) for name in LOSSES), ("qwen3_5", "sigmoid")]


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory):
    """Models of a family with a tokenizer: what the policy stays near to, and the policy."""
    paths = []
    for name in ("reference", "policy"):
        folder = tmp_path_factory.mktemp(name)
        size = write_tokenizer(folder)
        rows = -(-size // 8) * 8
        write_folder(folder, request.param, vocab_size=rows, eos_token_id=size - 2)
        paths.append(folder)
    policy = transformers.AutoModelForCausalLM.from_pretrained(paths[1])
    torch.manual_seed(0)
    with torch.no_grad():
        for x in policy.parameters():
            x += 0.02 * torch.randn_like(x)
    config = (paths[1] / "config.json").read_text()
    policy.save_pretrained(paths[1])
    (paths[1] / "config.json").write_text(config)
    return paths


@pytest.mark.parametrize("folders, name", CASES, indirect=["folders"])
def test_losses_and_gradients_are_those_of_trl(folders, tmp_path, name):
    """Within 1e-5, and so are its metrics; TRL reads apart the two chats that are a row here."""
    (reference, policy), (ours, theirs, smoothing, at_a_time) = folders, LOSSES[name]
    plain = {"report_to": [], "use_cpu": True, "bf16": False, "disable_dropout": True}
    plain |= {"gradient_checkpointing": False, "output_dir": str(tmp_path)}
    asked = {"loss_type": [theirs], "beta": 0.3, "label_smoothing": smoothing}
    args = trl.DPOConfig(**plain, **asked, per_device_train_batch_size=at_a_time)
    models = [transformers.AutoModelForCausalLM.from_pretrained(x) for x in (policy, reference)]
    trainer = trl.DPOTrainer(
        model=models[0],
        ref_model=models[1],
        args=args,
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=transformers.AutoTokenizer.from_pretrained(reference),
    )
    loss, shown_there = 0.0, trainer._metrics["train"]
    trainer.model.train()
    batches = list(trainer.get_train_dataloader())
    for inputs in batches:
        batch_loss = trainer.compute_loss(trainer.model, inputs) / len(batches)
        batch_loss.backward()
        loss += batch_loss.item()

    file = write_pairs(tmp_path / "pairs.jsonl", PAIRS)
    config = config_of(
        reference,
        *keys_of(reference, file),
        *("dpo_beta=0.3", f"dpo_loss_type={ours}", f"dpo_label_smoothing={smoothing}"),
    )
    (part,) = open_rows(config.data, True).train
    rows = [part.items[i] for i in range(len(part.items))]
    assert len(rows) == len(PAIRS)
    batch = stack(rows, config.data.fields(config.model.max_target_length))
    objective = preference(config.loss, config.model)

    def mean(weights, batch):
        total, aux = objective(weights, batch)
        return total / aux.shown["pairs"], aux.shown

    with jax.set_mesh(make_mesh(config)):
        batch = jax.device_put(batch, ROWS_BT)
        known, _ = jax.jit(lambda model: answer_log_probs(config.loss, config.model, model, batch))(
            load(reference, config)
        )
        batch = dataclasses.replace(batch, reference_log_probs=known)
        (own, shown), gradient = jax.jit(jax.value_and_grad(mean, has_aux=True))(
            load(policy, config), batch
        )
    np.testing.assert_allclose(own, loss, rtol=1e-5)
    assert len(names := [metric for metric in shown if "/" in metric]) == 6
    for metric in names:
        value = float(shown[metric]) / len(PAIRS)
        np.testing.assert_allclose(value, np.mean(shown_there[metric]), rtol=1e-5, err_msg=metric)
    expected = dict(trainer.model.named_parameters())
    for tensor, own in named_arrays(gradient, config.model.decoder_block).items():
        grad = expected[tensor].grad.numpy()
        np.testing.assert_allclose(own, grad, atol=1e-5 * np.abs(grad).max(), rtol=1e-5)
